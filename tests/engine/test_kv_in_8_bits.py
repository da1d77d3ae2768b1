"""Test the engine with an 8-bit KV cache: load changes no token of a request, and scales move with their blocks.

Every pool here is full of NaN at first, so that a block whose scales were left behind gives no tokens at all.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.engine import engine_for, logits_in_chunks, run
from lib.models import hf_model, ours, write_tiny_model
from minillm import LLM
from minillm.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.errors import UsageError
from minillm.kernels import KVCache
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner.host_pool import HostPool, host_memory

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLES = SamplingParams(n=4, temperature=0.9, top_p=0.9, seed=1, max_tokens=20)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=12)


@pytest.fixture(scope="module")
def plain() -> Llama:
    return ours(hf_model())


@pytest.fixture(scope="module")
def model(plain: Llama) -> Llama:
    return replace(plain, kv_in_8_bits=True)


def poisoned(model: Llama, **options: Any) -> Engine:
    engine = engine_for(model, **options)
    cache = engine.runner.kv_cache
    assert cache.scales is not None
    cache.scales.fill_(float("nan"))
    cache.values.fill_(77)
    return engine


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    begin = [rng.randrange(3, 96) for _ in range(13)]
    return [(begin if i % 2 else []) + [rng.randrange(3, 96) for _ in range(rng.randint(1, 40))] for i in range(count)]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("params", "block_size"), [(GREEDY, 16), (SAMPLES, 4), (BEAMS, 4)], ids=["greedy", "samples", "beams"]
)
def test_load_changes_no_token(model: Llama, params: Any, block_size: int, on_device: bool) -> None:
    requests = [(prompt, params) for prompt in prompts(4)]
    ample: dict[str, Any] = {"num_blocks": -(-2048 // block_size), "block_size": block_size, "on_device": on_device}
    alone = [tokens(run(poisoned(model, **ample, prefix_caching=False), [request]))[0] for request in requests]
    assert tokens(run(poisoned(model, **ample, max_num_batched_tokens=512), requests)) == alone
    assert tokens(run(poisoned(model, **ample, max_num_batched_tokens=9, max_num_seqs=9), requests)) == alone
    longest = 53 + 4 * 20
    tight = {**ample, "num_blocks": -(-longest // block_size) + 8, "admission": "optimistic"}
    for host_blocks in (0, 4 * tight["num_blocks"]):
        engine = poisoned(model, **tight, host_blocks=host_blocks)
        assert tokens(run(engine, requests)) == alone
        stats = engine.figures.cache_stats()
        if block_size <= 4:
            assert stats.num_preemptions > 0
            assert (stats.num_swapped_in > 0) == (host_blocks > 0)


def test_a_prefix_that_was_computed_before_gives_the_same_tokens(model: Llama) -> None:
    prompt = prompts(1)[0] + list(range(3, 50))
    engine = poisoned(model, num_blocks=64, block_size=4)
    first, second = (run(engine, [(prompt, SAMPLES)])[0] for _ in range(2))
    assert second.num_cached_tokens > 40
    assert tokens([first]) == tokens([second])


def test_guesses_change_no_token(model: Llama) -> None:
    requests = [(prompt * 3, GREEDY) for prompt in prompts(4)]
    expected = tokens(run(poisoned(model, num_blocks=256), requests))
    assert tokens(run(poisoned(model, num_blocks=256, speculate="lookup"), requests)) == expected


def test_chunks_of_a_prompt_give_the_same_logits(model: Llama, plain: Llama) -> None:
    """In float32 a chunk changes last digits, and those may move a number to the next whole one: a small step."""
    ids = [random.Random(5).randrange(3, 96) for _ in range(90)]
    whole = logits_in_chunks(model, ids, [90]).double()
    exact = logits_in_chunks(plain, ids, [90]).double()
    for chunks in ([40, 50], [7] * 12 + [6], [30] + [1] * 60):
        parts = logits_in_chunks(model, ids, chunks).double()
        assert float((parts - whole).norm() / whole.norm()) < 1e-3
    rounding = float((whole - exact).norm() / exact.norm())
    assert 1e-4 < rounding < 5e-2, "below: nothing was rounded"


def test_blocks_go_to_the_host_and_back_with_their_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (2, 2, 9, 4, 3, 8), dtype=torch.int8, generator=generator)
    cache = KVCache(values, torch.rand(2, 2, 9, 3, 4, generator=generator))
    before = [tensor.clone() for tensor in cache.tensors]
    pool = HostPool(cache, 5)
    pool.save([(7, 0), (2, 3), (5, 1)])
    cache.zero_()
    pool.restore([(0, 4), (3, 2), (1, 8)])
    for tensor, old in zip(cache.tensors, before, strict=True):
        assert torch.equal(tensor[:, :, [4, 2, 8]], old[:, :, [7, 2, 5]])
        assert not tensor[:, :, [0, 1, 3, 5, 6, 7]].any()


def test_host_memory_that_is_missing_once_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(torch.ones(2, 2, 9, 4, 3, 8, dtype=torch.int8), torch.ones(2, 2, 9, 3, 4))
    pool, empty = HostPool(cache, 5), torch.empty

    def failing(shape: Any, *, dtype: torch.dtype, **options: Any) -> Tensor:
        if dtype == torch.float32:
            raise RuntimeError("out of memory")
        return empty(shape, dtype=dtype, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.save([(7, 0)])
    pool.save([(7, 0)])
    cache.zero_()
    pool.restore([(0, 4)])
    assert all(tensor[:, :, 4].all() for tensor in cache.tensors)


def test_host_memory_that_cannot_be_pinned_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(shape: Any, *, pin_memory: bool, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("no memory to pin\nmore about it")
        return empty(shape, **options)

    cache, empty = KVCache(torch.ones(2, 2, 9, 4, 3, 8, dtype=torch.int8), torch.ones(2, 2, 9, 3, 4)), torch.empty
    monkeypatch.setattr(torch, "empty", failing)
    with pytest.warns(UserWarning, match="slower: no memory to pin$"):
        levels, scales = host_memory(cache.tensors, 5, pinned=True)
    assert (levels.shape, levels.dtype, scales.shape) == ((5, 2, 2, 4, 3, 8), torch.int8, (5, 2, 2, 3, 4))


def test_the_option_makes_the_pool_hold_nearly_twice_the_tokens_of_16_bits(tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path))
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_blocks": 64}
    llm, plain = LLM(directory, **options, kv_cache_dtype="int8"), LLM(directory, **options)
    cache, wide = (each.engine.runner.kv_cache for each in (llm, plain))
    assert cache.values.dtype == torch.int8
    config, count = llm.engine.runner.model.config, 64 * 16
    assert sum(tensor.nbytes for tensor in cache.tensors) == count * config.kv_bytes_per_token(1)
    assert wide.values.nbytes == count * config.kv_bytes_per_token(2)
    [output] = llm.generate("one two", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_a_wrong_form_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="kv_cache_dtype must be one of auto, int8"):
        EngineConfig(kv_cache_dtype="fp8")
