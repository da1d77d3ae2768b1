"""Piecewise steps: the hidden states, K and V of a plain forward pass, whatever the padding holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lib.graphs import WorkGraphs
from lib.models import DEVICE, hf_model, ours
from minillm.model.llama import Llama
from minillm.runner.device import piecewise
from minillm.runner.device.ahead import Ahead
from minillm.runner.device.piecewise import PiecewiseForward
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.runner import Runner
from minillm.runner.step import ChunkWork

BLOCKS, BLOCK_SIZE, LONGEST = 64, 4, 128


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


def new_runner(model: Llama) -> Runner:
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": LONGEST}
    runner = DeviceRunner(model, BLOCKS, BLOCK_SIZE, graphs=DEVICE.type == "cuda", sharing=None, **sizes)
    for tensor in runner.kv_cache.tensors:
        tensor.fill_(0.5)
    return runner


def chunks_of(rng: random.Random, lengths: list[int]) -> list[ChunkWork]:
    """Chunks of sequences that share no block, each after some tokens of its sequence."""
    free, chunks = list(range(1, BLOCKS)), []
    rng.shuffle(free)
    for length in lengths:
        first = rng.randint(1, 9)
        blocks = [free.pop() for _ in range(-(-(first + length) // BLOCK_SIZE))]
        chunks.append(ChunkWork([rng.randrange(3, 96) for _ in range(length)], first, blocks, first + length, 1))
    return chunks


@pytest.mark.parametrize("seed", range(8))
def test_it_computes_what_the_model_does(model: Llama, seed: int) -> None:
    rng = random.Random(seed)
    num_decodes = rng.choice([0, 1, 5])
    lengths = [1] * num_decodes + [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
    chunks = chunks_of(rng, lengths)
    mine, plain = new_runner(model), new_runner(model)
    assert isinstance(mine, DeviceRunner)
    assert mine.piecewise is not None
    with torch.inference_mode():
        mine.piecewise.hidden(mine.batch(chunks_of(rng, [40, 17]), 0))  # leaves its numbers in the buffers
        for tensor in mine.kv_cache.tensors:
            tensor.fill_(0.5)
        got = mine.piecewise.hidden(mine.batch(chunks, num_decodes))
        expected = model.hidden(plain.batch(chunks, num_decodes), plain.kv_cache)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)
    for mine_tensor, plain_tensor in zip(mine.kv_cache.tensors, plain.kv_cache.tensors, strict=True):
        assert torch.allclose(mine_tensor, plain_tensor, atol=1e-4, rtol=1e-4)


def test_a_size_is_recorded_whole_before_it_is_used(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording in the middle would compute a layer twice."""
    monkeypatch.setattr(piecewise, "MOST_TOKENS", 128)
    runner, graphs = new_runner(model), WorkGraphs()
    forward = PiecewiseForward(model, runner.kv_cache, graphs, Ahead())
    layers = len(model.layers)
    batch = runner.batch(chunks_of(random.Random(0), [30, 2]), 0)
    with torch.inference_mode():
        expected = model.hidden(batch, runner.kv_cache)
        assert torch.allclose(forward.hidden(batch), expected, atol=1e-4, rtol=1e-4)
        assert [key[2] for key in graphs.ran] == list(range(-1, layers))  # type: ignore[index]
        assert len(graphs._recorded) == layers + 1
        for shape in forward.shapes():
            assert shape.record is not None
            shape.record()
        assert len(graphs._recorded) == 2 * (layers + 1), "64 and 128 tokens"
        graphs.ran.clear()
        forward.hidden(batch)
        assert len(graphs.ran) == layers + 1


def test_while_requests_wait_nothing_is_recorded(model: Llama) -> None:
    """A step runs kernel by kernel, or on the graphs of up to twice its size. Steps that recur are recorded at last."""
    runner, graphs, ahead = new_runner(model), WorkGraphs(), Ahead()
    forward = PiecewiseForward(model, runner.kv_cache, graphs, ahead)
    ahead.prepares = True
    short, long = (runner.batch(chunks_of(random.Random(0), lengths), 0) for lengths in ([30, 2], [100, 30]))
    with torch.inference_mode():
        assert torch.equal(forward.hidden(short), model.hidden(short, runner.kv_cache))
        graphs.clear()
        while ahead.advance(lambda: list(forward.shapes())[1:2]):  # 128 tokens
            pass
        kept = list(graphs._recorded)
        expected = model.hidden(long, runner.kv_cache)
        for _ in range(7):
            assert torch.equal(forward.hidden(long), expected)
        assert list(graphs._recorded) == kept
        got = forward.hidden(short)
        assert torch.allclose(got, model.hidden(short, runner.kv_cache), atol=1e-4, rtol=1e-4)
        assert {key[1] for key in graphs.ran[-1 - len(model.layers) :]} == {128}  # type: ignore[index]
        assert list(graphs._recorded) == kept
        assert torch.allclose(forward.hidden(long), expected, atol=1e-4, rtol=1e-4)
        assert {key[1] for key in graphs._recorded} == {128, 192}  # type: ignore[index]


def test_a_longer_step_is_launched_op_by_op(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MOST_TOKENS", 64)
    runner, graphs = new_runner(model), WorkGraphs()
    forward = PiecewiseForward(model, runner.kv_cache, graphs, Ahead())
    batch = runner.batch(chunks_of(random.Random(0), [60, 5]), 0)
    with torch.inference_mode():
        assert torch.equal(forward.hidden(batch), model.hidden(batch, runner.kv_cache))
    assert not graphs.ran
