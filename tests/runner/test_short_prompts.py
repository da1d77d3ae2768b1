"""Test graphs of short prompts at padded sizes: the same logits, K and V, no other writes, only where faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.graphs import WorkGraphs
from lib.low_bit import LAYOUTS
from lib.models import DEVICE, hf_model, ours
from minillm.cache import HostMoves
from minillm.kernels import FP8
from minillm.model.llama import Llama
from minillm.params import SamplingParams
from minillm.runner.device import prompts as short_prompts
from minillm.runner.device.ahead import Shape
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.prompts import SIZES, ShortPrompts, most_tokens
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.runner import Runner
from minillm.runner.step import ChunkWork, StepWork
from minillm.speculation.drafter import Drafter

BLOCKS, BLOCK_SIZE, LONGEST = 64, 4, 128


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


def runner_of(model: Llama, max_num_seqs: int = 12) -> DeviceRunner:
    graphs = DEVICE.type == "cuda"
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": LONGEST}
    runner = DeviceRunner(model, BLOCKS, BLOCK_SIZE, graphs=graphs, sharing=None, **sizes)
    for tensor in runner.kv_cache.tensors:
        tensor.fill_(3)  # what is written where shows
    return runner


def chunks_of(rng: random.Random, count: int, most: int) -> list[ChunkWork]:
    """Chunks of sequences that share no block; some begin in the middle, and some want no logits."""
    free, chunks = list(range(1, BLOCKS)), []
    rng.shuffle(free)
    for _ in range(count):
        first, length = rng.choice([0, 0, 3, 8]), rng.randint(1, most)
        blocks = [free.pop() for _ in range(-(-(first + length) // BLOCK_SIZE))]
        token_ids = [rng.randrange(3, 96) for _ in range(length)]
        chunks.append(ChunkWork(token_ids, first, blocks, first + length, rng.choice([0, 1, 1])))
    return chunks


def step(chunks: list[ChunkWork]) -> StepWork:
    return StepWork(HostMoves(), [], None, chunks, 0)


@pytest.mark.parametrize("seed", range(12))
def test_padding_changes_nothing(model: Llama, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 1, 2, 3, 5, 9])
    chunks = chunks_of(rng, count, 60 // count)
    padded, plain = runner_of(model), runner_of(model)
    assert padded.prompts is not None
    assert padded.prompts.takes(chunks)
    plain.prompts = None
    # The numbers of a longer step are still there.
    padded.compute(step(chunks_of(random.Random(99), 9, 12)))
    for tensor in padded.kv_cache.tensors:
        tensor.fill_(3)
    got, expected = padded.compute(step(chunks)), plain.compute(step(chunks))
    assert got.shape == expected.shape == (sum(chunk.num_logits for chunk in chunks), 96)
    assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(padded.kv_cache.tensors, plain.kv_cache.tensors, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4, rtol=1e-4)


def test_what_is_computed_has_a_padded_size(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, keys = runner_of(model), []

    def noted(key: Any, work: Callable[[], Any]) -> None:
        keys.append(key)
        work()

    monkeypatch.setattr(runner.state.forwards, "run", noted)
    for lengths in ([1], [16], [17], [5, 5, 5], [30, 30, 30]):
        free = iter(range(1, BLOCKS))
        chunks = [ChunkWork([5] * n, 0, [next(free) for _ in range(-(-n // BLOCK_SIZE))], n, 1) for n in lengths]
        runner.compute(step(chunks))
    assert keys == [("prompts", *each) for each in ((16, 1), (16, 1), (32, 1), (16, 4), (96, 4))]


def test_only_short_steps_of_prompts_come_here(model: Llama) -> None:
    runner = runner_of(model)
    takes = runner.prompts.takes  # type: ignore[union-attr]

    def chunk(length: int, **changes: Any) -> ChunkWork:
        return replace(ChunkWork([5] * length, 0, list(range(-(-length // BLOCK_SIZE))), length, 1), **changes)

    assert takes([chunk(2000), chunk(48)])
    assert not takes([chunk(2000), chunk(49)])
    assert takes([chunk(2)] * 12)
    assert not takes([chunk(2)] * 13)
    assert takes([chunk(9, num_logits=0)])
    assert not takes([chunk(9, num_logits=2)])  # with a guess
    assert not takes([chunk(9, targets=[4])])  # whose log-probabilities are wanted


def test_a_model_has_them_as_far_as_launching_takes_longer() -> None:
    def most(num_parameters: int, layout: Any = None, kv_in_8_bits: bool = False) -> int:
        shape = SimpleNamespace(num_parameters=num_parameters)
        parts = () if layout is None else (SimpleNamespace(layout=layout),)
        layer = SimpleNamespace(qkv=SimpleNamespace(parts=parts))
        model: Any = SimpleNamespace(local=shape, layers=[layer], kv_in_8_bits=kv_in_8_bits)
        return most_tokens(model)

    assert most(135_000_000) == SIZES[-1]
    assert SIZES[0] < most(8_030_000_000) < 300
    assert most(10**12) < SIZES[0]
    assert most(8_030_000_000, FP8) == 2 * most(8_030_000_000) + 1
    assert most(8_030_000_000, LAYOUTS["q4_0"]) == most(8_030_000_000)
    assert most(135_000_000, kv_in_8_bits=True) == 192


def test_a_model_too_large_for_them_goes_without(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_prompts, "_MOST_WORK", 1)
    runner = runner_of(model)
    chunks = chunks_of(random.Random(1), 2, 9)
    assert isinstance(runner.prompts, ShortPrompts)
    assert not runner.prompts.takes(chunks)
    assert runner.compute(step(chunks)).shape[0] == sum(chunk.num_logits for chunk in chunks)


def test_requests_begin_with_them(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run chunks of a long prompt, several prompts at once, and the rest of a prompt after a cached prefix."""
    sizes = []
    compute = ShortPrompts.compute

    def noted(self: ShortPrompts, chunks: list[ChunkWork]) -> bool:
        sizes.append([len(chunk.token_ids) for chunk in chunks])
        return compute(self, chunks)

    monkeypatch.setattr(ShortPrompts, "compute", noted)
    rng = random.Random(5)
    common = [rng.randrange(3, 96) for _ in range(24)]
    requests = [(common + [rng.randrange(3, 96) for _ in range(1 + 7 * i)], SamplingParams(max_tokens=5, temperature=0))
                for i in range(4)]  # fmt: skip
    engines = [engine_for(model, on_device=on_device, max_num_batched_tokens=40) for on_device in (True, False)]
    for part in (requests[:1], requests[1:]):
        with_them, without = (run(engine, part) for engine in engines)
        assert [each.outputs[0].token_ids for each in with_them] == [each.outputs[0].token_ids for each in without]
    assert len(sizes) >= 2
    assert any(len(lengths) > 1 for lengths in sizes)


def recording(model: Llama) -> tuple[DeviceRunner, WorkGraphs]:
    runner = runner_of(model)
    graphs = WorkGraphs(runner.state.rows)
    assert runner.prompts is not None
    runner.state.forwards = runner.prompts._graphs = graphs
    runner.ahead.prepares = True
    runner.piecewise = None
    return runner, graphs


def prompts_of(graphs: WorkGraphs) -> list[int]:
    return [key[1] for key in graphs._recorded if key[0] == "prompts"]  # type: ignore[index]


def test_graphs_are_recorded_while_nobody_waits(model: Llama) -> None:
    runner, graphs = recording(model)
    before = [tensor.clone() for tensor in runner.kv_cache.tensors]
    free = iter(range(1, BLOCKS))
    chunk = ChunkWork([5] * 40, 0, [next(free) for _ in range(10)], 40, 1)
    runner.compute(step([chunk]))
    kept = [tensor.clone() for tensor in runner.kv_cache.tensors]
    assert not torch.equal(kept[0], before[0])
    while runner.prepare_ahead():
        pass
    assert prompts_of(graphs) == [48, *(size for size in SIZES if size != 48)]  # one has been met
    decodes = {key for key in graphs._recorded if key[0] != "prompts"}  # type: ignore[index]
    assert {key[0] for key in decodes} == {1, 2, 4, 8, 16, 40}  # type: ignore[index]
    assert runner.ahead.progress[0] == runner.ahead.progress[1] > len(graphs._recorded)
    for tensor, same in zip(runner.kv_cache.tensors, kept, strict=True):
        assert torch.equal(tensor, same), "padding is written nowhere"


def test_without_graphs_nothing_is_recorded(model: Llama) -> None:
    if DEVICE.type == "cpu":
        assert not runner_of(model).prepare_ahead()
    assert not Runner(model, 4, BLOCK_SIZE).prepare_ahead()


def test_a_draft_model_is_prepared_behind_the_model(model: Llama) -> None:
    (runner, mine), (other, drafts) = recording(model), recording(model)
    runner.observers.append(Drafter(other, BLOCKS, 0, model, 64))
    while runner.prepare_ahead():
        assert not drafts._recorded or prompts_of(mine) == list(SIZES)
    assert prompts_of(drafts) == list(SIZES)


def test_memory_that_is_short_leaves_prompts_as_they_are(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner, graphs = recording(model)
    monkeypatch.setattr(runner, "shapes", lambda: [Shape(print, short), Shape(print, short)])
    assert not runner.prepare_ahead()
    chunks = chunks_of(random.Random(2), 2, 9)
    for _ in range(short_prompts._OFTEN):
        assert runner.compute(step(chunks)).shape[0] == sum(chunk.num_logits for chunk in chunks)
    assert not graphs._recorded


def test_rows_are_back_when_a_recording_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([3, 1, 2])
    graphs, seen = Graphs(rows, enabled=True), []

    def fail(works: object) -> None:
        seen.append(rows.tolist())
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "_rehearse", fail)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run("key", lambda: None)
    assert seen == [[-1, -1, -1]]
    assert rows.tolist() == [3, 1, 2]
    assert graphs.lacks("key")
