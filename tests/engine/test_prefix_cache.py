"""The prefix cache, swapping, pinning and admission, through the engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib.cache_checks import check
from lib.engine import engine_for, run
from lib.models import hf_model, ours
from minillm.cache import explain_miss
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.errors import CapacityError
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams
from minillm.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model(seed=1, vocab_size=97, max_position_embeddings=512))


def finish(engine: Engine, request_id: str, prompt: list[int], params: Any = GREEDY, **options: Any) -> Any:
    engine.add_request(request_id, prompt, params, **options)
    while engine.has_work:
        engine.step()
    return engine.take_finished()[0]


def test_a_prompt_that_was_computed_before_is_found(model: Llama) -> None:
    engine = engine_for(model)
    prompt = list(range(3, 25))
    first = finish(engine, "a", prompt)
    second = finish(engine, "b", prompt)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    longer = finish(engine, "c", prompt + first.outputs[0].token_ids + [5])
    assert longer.num_cached_tokens == 28, "what was generated is found, too: 29 tokens of it were computed"


def test_a_hit_on_the_whole_prompt_still_computes_the_last_token(model: Llama) -> None:
    engine = engine_for(model)
    prompt = list(range(3, 23))
    assert len(prompt) % engine.cache.block_size == 0
    first = finish(engine, "a", prompt)
    second = finish(engine, "b", prompt)
    assert second.num_cached_tokens == 16
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_salts_keep_users_apart(model: Llama) -> None:
    engine = engine_for(model)
    prompt = list(range(3, 25))
    finish(engine, "a", prompt, salt="one")
    assert finish(engine, "b", prompt, salt="two").num_cached_tokens == 0
    assert finish(engine, "c", prompt).num_cached_tokens == 0
    assert finish(engine, "d", prompt, salt="one").num_cached_tokens == 20


def test_identical_prompts_in_one_batch_compute_once(model: Llama) -> None:
    engine = engine_for(model, max_num_batched_tokens=64)
    prompt = [random.Random(2).randrange(3, 97) for _ in range(100)]
    outputs = run(engine, [(prompt, GREEDY), (prompt, GREEDY), (prompt[:50] + [7] * 40, GREEDY)])
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 48]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_cached_blocks_of_a_prompt_are_no_room_for_it(model: Llama) -> None:
    """Blocks that no sequence holds are free until a prompt finds them: then they cannot be its new ones as well."""
    engine = engine_for(model, num_blocks=20)
    prompt = list(range(3, 43))
    finish(engine, "first", prompt)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request("other", [50] * 34, params)
    engine.step()
    assert (engine.cache.num_free, engine.cache.num_cached) == (11, 11)
    engine.add_request("again", [*prompt, 60, 61, 62, 63, 64], params)  # 12 blocks, 10 of them found
    while engine.has_work:
        engine.step()
    assert [len(output.outputs[0].token_ids) for output in engine.take_finished()] == [2, 2]


def test_the_longest_unused_prefix_is_evicted_first(model: Llama) -> None:
    engine = engine_for(model, num_blocks=20)
    prompts = [[10 + i] * 21 for i in range(5)]
    for number in (0, 1, 2, 0):
        finish(engine, "x", prompts[number])
    finish(engine, "x", prompts[3])
    assert engine.cache.num_evictions > 0
    assert finish(engine, "x", prompts[0]).num_cached_tokens == 20, "used again: younger than prefix 1"
    assert finish(engine, "x", prompts[1]).num_cached_tokens < 20


def test_explain_miss_names_the_first_token_that_differs(model: Llama) -> None:
    engine = engine_for(model)
    prompt = list(range(3, 25))
    finish(engine, "a", prompt)
    report = explain_miss(engine.cache, [*prompt[:10], 90, *prompt[11:]])
    assert (report.num_cached_tokens, report.num_matching_tokens) == (8, 10)
    assert (report.expected, report.found) == (prompt[10], 90)
    assert "token 13" in str(report)
    assert "90" in str(report)
    assert "has 'cat' (token 13) where the prompt has token 90" in str(replace(report, texts={13: "cat"}))
    assert explain_miss(engine.cache, [1, 2, 3]).num_matching_tokens == 0
    assert "whole prompt" in str(explain_miss(engine.cache, prompt[:8]))


def test_a_pinned_prefix_survives_any_load(model: Llama) -> None:
    engine = engine_for(model, num_blocks=24)
    system = list(range(3, 20))
    one_token = SamplingParams(temperature=0, max_tokens=1)

    def held(prompt: list[int]) -> Sequence:
        group = engine.add_request("pin", prompt, one_token, hold=True)
        while engine.has_work:
            engine.step()
        return group.sequences[0]

    pinned = held(system)
    idle_sequences.pin(Driver(engine), pinned)
    for number in range(12):
        finish(engine, "x", [30 + number] * 40)
    for number in range(2):  # both at once have no room beside the pinned blocks
        engine.add_request(str(number), [70 + number] * 40, GREEDY)
    while engine.has_work:
        engine.step()
    engine.take_finished()
    assert finish(engine, "y", [*system, 50, 51]).num_cached_tokens == 16
    assert engine.figures.cache_stats().used_blocks == 5
    large = held([60] * 60)
    with pytest.raises(CapacityError, match="pinned"):
        idle_sequences.pin(Driver(engine), large)
    with pytest.raises(CapacityError, match="5 of them pinned"):
        engine.add_request("z", [4] * 60, SamplingParams(max_tokens=20))
    idle_sequences.unpin(Driver(engine), pinned)
    assert engine.cache.num_free == 24
    check(engine.cache)


def test_statistics_follow_a_run(model: Llama) -> None:
    engine = engine_for(model, num_blocks=40, host_blocks=40, admission="optimistic")
    prompt = list(range(3, 25))
    run(engine, [([*prompt, i], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for i in range(6)])
    stats = engine.figures.cache_stats()
    assert stats.num_hit_tokens == 5 * 20
    assert stats.num_looked_up_tokens >= 6 * 23
    assert 0 < stats.hit_rate < 1
    assert stats.peak_used_blocks > 30
    assert 5 < stats.mean_used_blocks < stats.peak_used_blocks
    assert stats.num_preemptions > 0
    assert stats.num_swapped_in == stats.num_swapped_out > 0
    assert stats.host_blocks_used == stats.used_blocks == 0
    assert stats.cached_blocks > 0
    engine.figures.reset_peaks()
    assert engine.figures.cache_stats().peak_used_blocks == 0


def test_nan_is_never_found_again(model: Llama) -> None:
    engine = engine_for(model)
    prompt = list(range(3, 25))
    embedding = model.embedding
    assert isinstance(embedding, torch.Tensor)
    weight = embedding[prompt[5]].clone()
    embedding[prompt[5]] = float("nan")
    try:
        assert "NaN" in (finish(engine, "a", prompt).error or "")
    finally:
        embedding[prompt[5]] = weight
    output = finish(engine, "b", prompt)
    assert output.num_cached_tokens <= 4
    assert output.error is None
    assert not torch.isnan(embedding).any()


REQUESTS = (
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21],
    [5] * 33,
    [40, 41, 42],
)
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True),
    "four samples": SamplingParams(n=4, seed=5, max_tokens=16, ignore_eos=True, repetition_penalty=1.1),
    "beams": BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True),
}


def tokens_of(engine: Engine, kind: str, others: int) -> list[list[list[int]]]:
    rng = random.Random(9)
    crowd = [
        ([rng.randrange(3, 97) for _ in range(rng.randint(1, 30))], SamplingParams(seed=i, max_tokens=12, n=1 + i % 2))
        for i in range(others)
    ]
    requests = [(prompt, KINDS[kind]) for prompt in REQUESTS]
    outputs = run(engine, [*crowd[: others // 2], *requests, *crowd[others // 2 :]])[others // 2 :][: len(requests)]
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_request_gives_the_same_tokens_whatever_else_happens(model: Llama, kind: str) -> None:
    """Prefix cache on and off; no preemption, swap and recompute; block and chunk sizes; alone and in a crowd.

    Each kind of request runs in half of the combinations, in which every three settings meet. Two kinds run in each
    combination.
    """
    expected = tokens_of(engine_for(model, num_blocks=512, prefix_caching=False), kind, 0)
    preempted = {"swap": 0, "recompute": 0}
    for number, (block_size, pressure, caching, chunk, others) in enumerate(
        itertools.product((1, 16, 256), ("none", "swap", "recompute"), (True, False), (16, 512), (0, 10))
    ):
        # The last three settings are the lowest bits of the number: kinds take turns with their parity.
        if (number & 7).bit_count() % 2 != (number // 8 + list(KINDS).index(kind)) % 2:
            continue
        if (block_size == 256 and pressure != "none") or (others == 0 and chunk == 512 and pressure != "none"):
            continue
        longest = 4 * 32 + 33
        tight = {1: longest + 20, 16: 14, 256: 8}[block_size]
        engine = engine_for(
            model,
            num_blocks=max(tight, 8) if pressure != "none" else 4096 // block_size,
            block_size=block_size,
            max_num_seqs=16 if chunk == 16 else 64,
            max_num_batched_tokens=chunk,
            prefix_caching=caching,
            host_blocks=600 if pressure == "swap" else 0,
            admission="optimistic" if pressure != "none" else "predicted",
        )
        assert tokens_of(engine, kind, others) == expected, (caching, block_size, chunk, others, pressure)
        if pressure != "none":
            preempted[pressure] += engine.scheduler.preemption.count
            assert pressure == "swap" or not engine.scheduler.preemption.swap.num_swapped_out
    assert min(preempted.values()) > 0, "nothing was preempted"


def test_a_pin_leaves_room_for_requests_that_wait(model: Llama) -> None:
    engine = engine_for(model, num_blocks=8, block_size=4)
    held = engine.add_request("held", [5] * 11, SamplingParams(temperature=0, max_tokens=1), hold=True).sequences[0]
    while engine.has_work:
        engine.step()
    engine.add_request("large", [6] * 10, SamplingParams(temperature=0, max_tokens=16))
    with pytest.raises(CapacityError, match="under way may need 7 of 8"):
        idle_sequences.pin(Driver(engine), held)
    while engine.has_work:
        engine.step()
    assert all(output.error is None for output in engine.take_finished())
    with pytest.raises(CapacityError, match="other requests took"):
        idle_sequences.pin(Driver(engine), held)
    assert engine.cache.num_free == 8
