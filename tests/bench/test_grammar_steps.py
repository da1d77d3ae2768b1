"""Test the benchmark of steps with a grammar: it times their parts, and removes its clocks afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from minillm.bench import grammar_steps
from minillm.engine.engine import Engine
from minillm.grammar.vocabulary import Vocabulary


def test_every_part_of_a_step_is_timed_and_no_clock_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_steps, "_WARM_UP", 1)
    monkeypatch.setattr(grammar_steps, "_STEPS", 4)
    before = Engine.step, Engine.note_computed, Vocabulary.fill
    parts = grammar_steps.grammar_steps(3, 640)
    assert (Engine.step, Engine.note_computed, Vocabulary.fill) == before
    assert list(parts) == [
        "the engine itself", "scheduler and cache", "matchers take tokens", "texts and ends", "masks: the library",
        "launching forward passes", "launching draws",
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in parts.values())


def test_the_time_of_a_called_part_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(grammar_steps.time, "perf_counter", lambda: float(next(clock)))
    inner: Any = Vocabulary
    outer: Any = Engine
    monkeypatch.setattr(inner, "fill", lambda: None)
    monkeypatch.setattr(outer, "step", lambda: inner.fill())
    with grammar_steps._parts_of_steps() as seconds:
        outer.step()
    assert seconds == {"the engine itself": 2.0, "masks: the library": 1.0}
