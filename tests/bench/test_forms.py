"""Test the benchmark of grammars: it times the parts of real steps, and removes its clocks afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.models import write_tiny_model
from minillm.bench import form_steps
from minillm.bench.forms import Options, measure
from minillm.bench.parts import PARTS, WAIT, parts_of_steps
from minillm.bench.table import Subject
from minillm.engine.engine import Engine
from minillm.llm import LLM
from minillm.params import SamplingParams
from minillm.runner.runner import Runner


def test_every_part_of_a_step_without_a_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_steps, "_WARM_UP", 1)
    monkeypatch.setattr(form_steps, "_STEPS", 4)
    parts = form_steps.form_steps(3, 640)
    assert set(parts) == set(PARTS) - {WAIT}
    assert all(seconds > 0 for seconds in parts.values())


def test_parts_add_up_and_leave_no_clock_behind(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_model(tmp_path)), device="cpu", num_blocks=200)
    before = Engine.step, Runner.run, Runner.draw
    [result] = measure(Subject(llm, "tiny", "forms"), Options(batch_size=[2], output_len=8, runs=1)).values()
    assert (Engine.step, Runner.run, Runner.draw) == before
    assert result.batch_size == 2
    assert [each.part for each in result.host] == list(PARTS)
    library = next(each for each in result.host if each.part == "masks: the library")
    assert library.free == 0 < library.one_formed
    with parts_of_steps() as seconds:
        llm.generate("x", SamplingParams(max_tokens=3))
    assert seconds["the engine itself"] > 0
    assert seconds["launching forward passes"] > 0
    assert "masks: the library" not in seconds
