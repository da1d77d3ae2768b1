"""The engine on a small random model: the same request gives the same tokens, under any load."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.cache_checks import check
from lib.engine import change_logits, engine_for
from lib.models import hf_model, ours
from minillm.cache import pool_stats
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.errors import CapacityError, UsageError
from minillm.llm import LLM
from minillm.model.llama import Batch, Llama
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, SamplingParams
from minillm.sequence import Schedule, SequenceGroup, Stage


@pytest.fixture(scope="module")
def theirs() -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def model(theirs: Any) -> Llama:
    return ours(theirs)


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, 96) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(
    engine: Engine, requests: list[tuple[list[int], Any]], each_step: Callable[[], None] = lambda: None
) -> list[RequestOutput]:
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
        check(engine.cache)
        each_step()
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert engine.take_finished() == [], "an output comes once"
    return [outputs[str(number)] for number in range(len(requests))]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(temperature=1.0, max_tokens=20, seed=7)


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(theirs: Any, model: Llama) -> None:
    for prompt in prompts(8):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        [output] = run(engine_for(model, eos=frozenset({2})), [(prompt, GREEDY)])
        assert output.outputs[0].token_ids == expected.tolist()
        assert output.outputs[0].finish_reason == ("stop" if expected[-1] == 2 else "length")


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=1, max_tokens=20)]
)
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_batch_chunks_and_preemption_change_nothing(model: Llama, params: SamplingParams, block_size: int) -> None:
    requests = [(prompt, params) for prompt in prompts(8)]
    ample: dict[str, Any] = {"num_blocks": -(-2048 // block_size), "block_size": block_size}
    alone = [run(engine_for(model, **ample), [request])[0] for request in requests]
    together = run(engine_for(model, **ample, max_num_batched_tokens=512), requests)
    assert tokens(together) == tokens(alone)
    chunked = run(engine_for(model, **ample, max_num_batched_tokens=7, max_num_seqs=7), requests)
    assert tokens(chunked) == tokens(alone)
    longest = 40 + 3 * 20 if params.n > 1 else 60
    tight = engine_for(model, num_blocks=-(-longest // block_size) + 3 * params.n, block_size=block_size)
    preempted = run(tight, requests)
    assert tokens(preempted) == tokens(alone)
    if block_size <= 4:
        assert sum(output.metrics.num_preemptions for output in preempted if output.metrics) > 0, (
            "nothing was preempted"
        )


def test_samples_share_the_prompt_and_differ(model: Llama) -> None:
    engine = engine_for(model, num_blocks=64, block_size=4)
    shared: list[int] = []
    prompt = prompts(1)[0][:18] + [5] * (18 - len(prompts(1)[0][:18]))
    engine.cache.subscribers.append(lambda event: shared.append(pool_stats(engine.cache).shared_blocks))
    [output] = run(engine, [(prompt, SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=12))])
    assert max(shared) == 5, "four full blocks and the partly filled one are shared after the fork"
    assert engine.cache.num_copies == 3, "each sample but the last owner copies that one block"
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]


def test_sample_i_is_the_same_for_any_n(model: Llama) -> None:
    prompt = prompts(3)[2]
    many = run(engine_for(model), [(prompt, SamplingParams(n=5, seed=11, max_tokens=10))])[0]
    few = run(engine_for(model), [(prompt, SamplingParams(n=2, seed=11, max_tokens=10))])[0]
    assert tokens([many])[0][:2] == tokens([few])[0]


def test_unseeded_requests_differ_and_the_engines_seed_repeats_them(model: Llama) -> None:
    prompt = prompts(3)[2]
    requests = [(prompt, SamplingParams(max_tokens=10))] * 2
    first, second = tokens(run(engine_for(model, seed=1), requests))
    assert first != second
    assert tokens(run(engine_for(model, seed=1), requests)) == [first, second]
    assert tokens(run(engine_for(model, seed=2), requests)) != [first, second]


@pytest.mark.parametrize("step", range(0, 30, 3))
def test_abort_at_any_step_returns_every_block(model: Llama, step: int) -> None:
    engine = engine_for(model, num_blocks=40, block_size=4, max_num_batched_tokens=16, max_num_seqs=16)
    for number, prompt in enumerate(prompts(8)):
        engine.add_request(str(number), prompt, SamplingParams(n=1 + number % 3, seed=0, max_tokens=15))
    for _ in range(step):
        engine.step()
    for number in range(0, 8, 2):
        engine.abort(str(number))
    engine.abort("never heard of")
    engine.step()
    check(engine.cache)
    assert not {"0", "2", "4", "6"} & set(engine.requests.groups)
    while engine.has_work:
        engine.step()
    assert engine.cache.num_free == 40
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert len(outputs) == 8
    for output in outputs.values():
        assert output.finished
        for completion in output.outputs:
            assert completion.finish_reason in ("abort", "length")


@pytest.mark.parametrize("on_device", [False, True])
def test_an_aborted_id_can_be_used_again_at_once(model: Llama, on_device: bool) -> None:
    """On the device, a step of both requests is under way."""
    engine = engine_for(model, on_device=on_device)
    for name in "01":
        engine.add_request(name, [5, 6, 7], GREEDY)
    engine.step()
    with pytest.raises(UsageError, match="in use"):
        engine.add_request("0", [5, 6, 7], GREEDY)
    engine.abort("0")
    engine.carry_out_aborts()
    engine.take_finished()
    [output] = run(engine, [([5, 6, 7], GREEDY)])
    assert output.outputs[0].finish_reason == "length"


def test_an_abort_that_comes_too_late_does_not_end_the_next_request_of_its_id(model: Llama) -> None:
    engine = engine_for(model)
    run(engine, [([5, 6, 7], GREEDY)])
    engine.abort("0")
    [output] = run(engine, [([5, 6, 7], GREEDY)])
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("bad", [-1, 96, 1 << 31, True, 2.0, "7", None])
def test_bad_token_ids_are_refused_before_they_reach_the_device(model: Llama, bad: Any) -> None:
    with pytest.raises(UsageError, match="token id"):
        engine_for(model).add_request("a", [5, bad], GREEDY)


def test_prompts_at_the_edge_of_the_context(model: Llama) -> None:
    for length in (254, 255):
        engine = engine_for(model, num_blocks=64, block_size=4, max_num_batched_tokens=300)
        [output] = run(engine, [([7] * length, SamplingParams(temperature=0, max_tokens=100))])
        assert len(output.outputs[0].token_ids) == 256 - length
        assert output.outputs[0].finish_reason == "length"
    for length in (256, 257):
        with pytest.raises(UsageError, match="context holds 256"):
            engine_for(model).add_request("a", [7] * length, GREEDY)
    with pytest.raises(UsageError, match="empty"):
        engine_for(model).add_request("a", [], GREEDY)


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic(model: Llama) -> None:
    engine = engine_for(model, num_blocks=8, block_size=4)
    with pytest.raises(CapacityError, match=r"11 blocks of 4 tokens \(10 prompt tokens, 3 x 10 new ones\).* has 8"):
        engine.add_request("a", [7] * 10, SamplingParams(n=3, max_tokens=10))
    with pytest.raises(CapacityError, match="raise max_num_seqs"):
        engine_for(model, max_num_seqs=2).add_request("a", [7], SamplingParams(n=3))
    engine.add_request("b", [7] * 10, SamplingParams(n=2, max_tokens=10, seed=0))
    while engine.has_work:
        engine.step()


def test_a_request_as_large_as_the_pool_is_taken_and_one_block_larger_is_not(model: Llama) -> None:
    params = SamplingParams(n=2, seed=0, max_tokens=14, ignore_eos=True)
    [output] = run(engine_for(model, num_blocks=10, block_size=4), [([7] * 10, params)])
    assert [len(completion.token_ids) for completion in output.outputs] == [14, 14]
    with pytest.raises(CapacityError, match=r"10 blocks of 4 tokens .* has 9"):
        engine_for(model, num_blocks=9, block_size=4).add_request("a", [7] * 10, params)
    [output] = run(engine_for(model, max_num_seqs=2), [([7] * 10, params)])
    assert len(output.outputs) == 2


def test_a_step_keeps_to_its_budget_and_its_seats(model: Llama) -> None:
    """The tokens of a step and the running sequences never exceed their limits, and both limits are reached."""
    requests = [(prompt, SamplingParams(n=1 + number % 3, seed=number, max_tokens=1 + number % 9))
                for number, prompt in enumerate(prompts(30))]  # fmt: skip
    engine = engine_for(model, num_blocks=400, max_num_batched_tokens=12, max_num_seqs=7)
    launch, tokens_of_steps, seats = engine.runner.run, [], []

    def noted(schedule: Any, copies: Any) -> Any:
        tokens_of_steps.append(sum(chunk.count for chunk in schedule.chunks))
        seats.append(sum(group.num_seqs for group in engine.scheduler.running))
        return launch(schedule, copies)

    engine.runner.run = noted  # type: ignore[method-assign]
    run(engine, requests)
    assert max(tokens_of_steps) == 12
    assert max(seats) == 7


def test_two_requests_are_not_admitted_into_the_room_of_one(model: Llama) -> None:
    """Only the prompt of the first one has blocks yet, and its samples will need one each."""
    engine = engine_for(model, num_blocks=8, block_size=4)
    params = SamplingParams(n=3, seed=0, max_tokens=4)
    run(engine, [([6] * 8, params), ([7] * 8, params)])
    assert engine.scheduler.preemption.count == 0


def test_a_prompt_that_lacks_one_block_waits(model: Llama) -> None:
    engine = engine_for(model, num_blocks=8, block_size=4, admission="optimistic")
    three = SamplingParams(temperature=0, max_tokens=3)
    outputs = run(engine, [([5] * 13, three), ([6] * 17, three)])
    assert engine.scheduler.preemption.count == 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


@pytest.mark.parametrize(
    "params", [SamplingParams(n=3, seed=1, max_tokens=9), BeamSearchParams(beam_width=3, max_tokens=9)]
)
def test_a_saved_group_comes_back_as_a_whole(model: Llama, params: Any) -> None:
    """A prompt ahead of it leaves less of the budget than the group has sequences: it waits for the next step."""
    [alone] = run(engine_for(model), [([5] * 4, params)])
    engine = engine_for(model, max_num_batched_tokens=4, max_num_seqs=4, host_blocks=60, on_device=False)
    group = engine.add_request("0", [5] * 4, params)
    for _ in range(3):
        engine.step()
    scheduler, schedule = engine.scheduler, Schedule()
    scheduler.running.remove(group)
    scheduler.waiting.append(group)
    scheduler.preemption.take_out(group, schedule)
    engine.runner.move(schedule)
    assert group.stage is Stage.SAVED
    engine.add_request("1", [6] * 3, GREEDY)
    scheduler.waiting.rotate(1)
    for _ in range(100):
        engine.step()
        check(engine.cache)
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert tokens([outputs["0"]]) == tokens([alone])


def test_the_latest_is_preempted_and_comes_back_first(model: Llama) -> None:
    """The oldest request is never preempted, and a preempted one goes before those that have not begun."""
    engine = engine_for(model, num_blocks=16, block_size=4, max_num_seqs=3, admission="optimistic")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = run(engine, [([5 + number] * 6, params) for number in range(6)])
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert metrics[0].num_preemptions == 0
    assert sum(each.num_preemptions for each in metrics) > 0
    ends = [each.finished_time or 0.0 for each in metrics]
    assert ends == sorted(ends)


def test_a_failing_device_ends_its_requests_and_nothing_else(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, num_blocks=64, max_num_batched_tokens=8, max_num_seqs=8)
    for number, prompt in enumerate([[5] * 8, [6] * 8]):
        engine.add_request(str(number), prompt, GREEDY)
    with monkeypatch.context() as patch:
        change_logits(patch, lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    [failed] = engine.take_finished()
    assert failed.request_id == "0"
    assert failed.error is not None
    assert "device lost" in failed.error
    check(engine.cache)
    while engine.has_work:
        engine.step()
    [other] = engine.take_finished()
    assert other.error is None
    assert engine.cache.num_free == 64


def test_a_request_whose_logits_are_nan_fails_alone(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model)

    def poisoned(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        tokens = batch.token_ids if batch.logit_rows is None else batch.token_ids[batch.logit_rows]
        return logits.masked_fill_((tokens == 13)[:, None], float("nan"))

    change_logits(monkeypatch, poisoned)
    never_13 = SamplingParams(temperature=0, max_tokens=4, logit_bias={13: -100.0})
    bad, good = run(engine, [([5, 13], GREEDY), ([5, 14], never_13)])
    assert bad.error is not None
    assert "NaN" in bad.error
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 4


def test_a_held_sequence_gives_its_blocks_to_the_next_turn(model: Llama) -> None:
    engine = engine_for(model, num_blocks=64, block_size=4)
    group = engine.add_request("1", [5] * 10, GREEDY, hold=True)
    while engine.has_work:
        engine.step()
    held = group.sequences[0]
    assert held.table is not None
    assert engine.cache.num_free < 64
    longer = [*held.token_ids, 8, 9, 10]
    second = engine.add_request("2", longer, GREEDY, parent=held)
    while engine.has_work:
        engine.step()
    _, output = engine.take_finished()
    assert output.num_cached_tokens == second.num_cached_tokens == len(held.token_ids) - 1
    idle_sequences.release(Driver(engine), held)
    assert engine.cache.num_free == 64
    [afresh] = run(engine_for(model), [(longer, GREEDY)])
    assert tokens([output]) == tokens([afresh])
    # A different prompt shares only the common beginning; an identical prompt still computes its last token.
    group = engine.add_request("3", [5] * 10, GREEDY, hold=True)
    while engine.has_work:
        engine.step()
    for prompt, common in (([5] * 6 + [9, 9], 6), ([5] * 10, 9), ([9], 0)):
        again = engine.add_request("4", prompt, GREEDY, parent=group.sequences[0])
        while engine.has_work:
            engine.step()
        assert again.num_cached_tokens == common
        assert tokens([engine.take_finished()[-1]]) == tokens(run(engine_for(model), [(prompt, GREEDY)]))


def test_held_sequences_give_way_to_requests(model: Llama) -> None:
    engine = engine_for(model, num_blocks=16, block_size=4)
    group = engine.add_request("1", [5] * 30, GREEDY, hold=True)
    while engine.has_work:
        engine.step()
    assert engine.cache.num_free == 16 - 13
    other = run(engine, [([6] * 30, GREEDY)])[0]
    assert len(other.outputs[0].token_ids) == 20
    assert group.sequences[0].table is None


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_log_probabilities_are_the_models_own(theirs: Any, model: Llama, logprobs: int) -> None:
    prompt = prompts(2)[1]
    params = SamplingParams(temperature=1.7, top_k=20, seed=5, max_tokens=8, logprobs=logprobs, repetition_penalty=1.2)
    completion = run(engine_for(model), [(prompt, params)])[0].outputs[0]
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs))
    for row, entry, token_id in zip(expected, completion.logprobs, completion.token_ids, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.topk(logprobs)
        assert [found for found, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("offline", [True, False])
def test_only_offline_runs_compute_whole_prompts_next_to_decodes(model: Llama, offline: bool) -> None:
    """A prompt of 40 tokens needs one step next to an offline request, and chunks next to one that somebody reads."""
    engine = engine_for(model)
    engine.scheduler.prefill_chunk = 8
    first = engine.add(Request(list(range(3, 9)), GREEDY, request_id="first", offline=offline)).sequences[0]
    while first.num_tokens == first.num_prompt_tokens:
        engine.step()
    second = engine.add(Request(list(range(3, 43)), GREEDY, request_id="second", offline=True)).sequences[0]
    steps = 0
    while second.num_tokens == second.num_prompt_tokens:
        engine.step()
        steps += 1
    assert steps <= 2 if offline else steps >= 40 // 8, "one step may have been launched ahead"
    engine.close()


def test_an_explicit_chunk_holds_for_offline_runs_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM.generate` runs offline requests, and `LLM.stream` does not."""
    with LLM(str(tiny_model), prefill_chunk=32, max_num_seqs=8) as llm:
        assert (llm.engine.scheduler.prefill_chunk, llm.engine.scheduler.offline_chunk) == (32, 32)
        seen: list[bool] = []
        add = llm.engine.add

        def noting(request: Request) -> SequenceGroup:
            seen.append(request.offline)
            return add(request)

        monkeypatch.setattr(llm.engine, "add", noting)
        llm.generate([[3, 4], [5]], GREEDY)
        list(llm.stream([3, 4], GREEDY))
        assert seen == [True, True, False]
