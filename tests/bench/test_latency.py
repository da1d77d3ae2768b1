"""`minillm bench latency` on a small model: the reported figures, not the speed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minillm.bench.latency import RUNS, Options, measure
from minillm.bench.meter import LoadLimits, metered
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


class FakeLlama:
    """A fake of the llama-cpp-python model, with the calls that the benchmark uses."""

    ctx = "context"

    def __init__(self, path: str, **options: object) -> None:
        self.path, self.options = path, options
        self.evaluated: list[list[int]] = [[]]

    def reset(self) -> None:
        self.evaluated.append([])

    def eval(self, tokens: list[int]) -> None:
        self.evaluated[-1].append(len(tokens))


def test_llama_cpp_reads_the_same_file_and_prompt(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeLlama] = []
    waits: list[str] = []

    def llama(path: str, **options: object) -> FakeLlama:
        made.append(FakeLlama(path, **options))
        return made[-1]

    module = SimpleNamespace(Llama=llama, llama_synchronize=waits.append, __version__="1")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    results = measure(replace(subject, name="m.gguf"), Options(input_len=3, output_len=4, peer="llama.cpp"))
    assert [result.name for result in results] == ["minillm m.gguf", "llama.cpp 1 m.gguf"]
    assert made[0].path == "m.gguf"
    assert made[0].options["n_threads"] == torch.get_num_threads()
    assert made[0].evaluated[1:] == [[3, 1, 1, 1]] * (1 + RUNS), "the prompt, then token by token, in each run"
    assert waits == ["context"] * (4 * (1 + RUNS))
    with pytest.raises(UsageError, match="GGUF"):
        measure(subject, Options(peer="llama.cpp"))
    with pytest.raises(UsageError, match="one sequence"):
        measure(subject, Options(peer="llama.cpp", batch_size=2))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UsageError, match="pip install llama-cpp-python"):
        measure(subject, Options(peer="llama.cpp"))


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"batch_size": 0}, {"output_len": 0}, {"busy": -1}, {"peer": "others"}, {"shape": "gpt-5"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Options(**wrong)


def test_the_meter_counts_every_step_and_leaves_no_trace(subject: Subject) -> None:
    llm = subject.llm
    one = LoadLimits(float(llm.engine.runner.model.weight_bytes))  # a second for the weights
    before = dict(vars(llm.engine.runner))
    with metered(llm.engine, one) as meter:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert 4 < meter.floor < 5, "one prompt and three tokens after the first: four steps, and the blocks' bytes"
    assert meter.peak_blocks == 1
    assert dict(vars(llm.engine.runner)) == before
