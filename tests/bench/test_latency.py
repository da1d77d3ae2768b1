"""`minillm bench latency` on a small model: the reported figures, not the speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.bench.latency import Options, measure
from minillm.bench.meter import Limits, metered
from minillm.bench.table import Subject
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import SamplingParams


@pytest.fixture
def subject(tiny_model: Path) -> Subject:
    return Subject(LLM(str(tiny_model), device="cpu", num_blocks=64), "tiny", "latency")


def test_a_busy_machine_is_measured_beside_the_quiet_one(subject: Subject) -> None:
    results = measure(subject, Options(batch_size=2, input_len=3, output_len=4, busy=1))
    assert [result.name for result in results] == ["minillm tiny", "minillm tiny, 1 busy"]
    assert all(result.decode_rate > 0 and result.batch_size == 2 for result in results)
    assert results[0].floor_rate == results[1].floor_rate, (
        "what the machine can do at best is measured when it is quiet"
    )
    assert results[0].peak_kv_tokens == 2 * 16


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"batch_size": 0}, {"output_len": 0}, {"busy": -1}, {"peer": "others"}, {"shape": "gpt-5"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Options(**wrong)


def test_the_meter_counts_every_step_and_leaves_no_trace(subject: Subject) -> None:
    llm = subject.llm
    one = Limits(float(llm.engine.runner.model.weight_bytes))  # a second for the weights
    before = dict(vars(llm.engine.runner))
    with metered(llm.engine, one) as meter:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert 4 < meter.floor < 5, "one prompt and three tokens after the first: four steps, and the blocks' bytes"
    assert meter.peak_blocks == 1
    assert dict(vars(llm.engine.runner)) == before
