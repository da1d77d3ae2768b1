"""Test the engine's reports: progress of a prompt, memory, and the end of an answer without tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minillm.outputs import CompletionOutput, RequestMetrics
from minillm.service import reporting
from minillm.service.messages import Event, Finished, Generate, Reading
from minillm.service.reporting import Answer, Reporter, memory_use


def test_a_prompt_is_reported_while_part_of_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: now))
    sent: list[Event] = []
    cache = SimpleNamespace(subscribers=[], num_blocks=0)
    engine: Any = SimpleNamespace(cache=cache, figures=SimpleNamespace(last_step=None), disk=None)
    sequence = SimpleNamespace(num_computed=0)
    group: Any = SimpleNamespace(
        sequences=[sequence], num_prompt_tokens=32, metrics=SimpleNamespace(first_token_time=None)
    )
    reporter, answer = Reporter(engine, sent.append, dict), Answer(Generate("r", "c", []), group, False)
    for now, sequence.num_computed in ((100.0, 0), (101.0, 8), (103.0, 16), (105.0, 32)):  # noqa: B007
        reporter.end_step([answer])
    # 8 tokens in two seconds: the other 16 take four.
    assert sent == [Reading("r", 8, 32, None), Reading("r", 16, 32, 4.0)]


@pytest.mark.parametrize(
    ("seconds", "num_tokens", "rate"), [(2.0, 5, 2.0), (0.0, 5, 0.0), (2.0, 0, 0.0), (0.5, 1, 0.0), (0.5, 3, 4.0)]
)
def test_the_rate_counts_the_tokens_after_the_first(
    seconds: float, num_tokens: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: 100.0 + seconds))
    sent: list[Event] = []
    metrics = RequestMetrics(arrival_time=99.5, first_token_time=100.0)
    group: Any = SimpleNamespace(sequences=[], num_prompt_tokens=32, num_cached_tokens=0, metrics=metrics, state=None)
    engine: Any = SimpleNamespace(
        cache=SimpleNamespace(subscribers=[], num_blocks=0), figures=SimpleNamespace(last_step=None), disk=None
    )
    output: Any = SimpleNamespace(outputs=[CompletionOutput(0, "", [7] * num_tokens, None, None, "length")])
    Reporter(engine, sent.append, dict).end_beams(Answer(Generate("r", "c", []), group, False), output)
    assert sent[-1] == Finished("r", 0, "length", num_tokens, rate, 32 + num_tokens)


@pytest.mark.parametrize(
    ("own", "parts"),
    [
        (0, (0, 0, 0)),
        (900, (900, 0, 0)),
        (1_000, (1_000, 0, 0)),
        (1_300, (1_000, 300, 0)),
        (5_000, (1_000, 400, 3_600)),
    ],
)
def test_the_memory_of_the_process_is_divided(
    own: int, parts: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "device_memory", lambda device: (2_000, 8_000, own))
    local = SimpleNamespace(kv_bytes_per_token=lambda size: 5 * size)
    model = SimpleNamespace(device="cpu", weight_bytes=1_000, kv_element_size=2, local=local)
    cache = SimpleNamespace(block_size=4, num_blocks=10)
    engine: Any = SimpleNamespace(runner=SimpleNamespace(model=model), cache=cache)
    use = memory_use(engine)
    assert (use.free, use.total) == (2_000, 8_000)
    assert (use.weights, use.cache, use.rest) == parts
