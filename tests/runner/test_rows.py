"""Test steps that run ahead of the CPU, with device state: the same tokens, and correct bookkeeping."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.cache_checks import check
from lib.engine import engine_for, run
from lib.kernels import attend_by_list
from lib.models import hf_model, ours
from minillm import kernels
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Schedule
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner.device import rows, state
from minillm.runner.device.rows import padded_length, padded_size
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.device.state import DeviceState


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


def test_a_runner_is_gone_with_its_last_name(model: Llama) -> None:
    """A reference cycle would keep its tensors until garbage collection: 200 MB for an 8B model."""
    engine = engine_for(model, on_device=True)
    kept = weakref.ref(engine.runner)
    collects = gc.isenabled()
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        if collects:
            gc.enable()


def banning_the_last(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Ban the last token, so that no token repeats."""
    logits[(output or prompt)[-1]] = float("-inf")
    return logits


def everything(rng: random.Random, count: int) -> list[tuple[list[int], Any]]:
    """Requests of every kind, with ends that only the token itself brings."""
    prefix = [rng.randrange(3, 96) for _ in range(24)]
    requests: list[tuple[list[int], Any]] = []
    for number in range(count):
        start = prefix if rng.random() < 0.4 else []
        prompt = start + [rng.randrange(3, 96) for _ in range(rng.randint(1, 20))]
        if rng.random() < 0.15:
            prompt = list(requests[-1][0]) if requests else prompt  # the same prompt again
        shared: dict[str, Any] = {
            "max_tokens": rng.randint(1, 20),
            "stop_token_ids": [rng.randrange(3, 96) for _ in range(rng.choice((0, 0, 8)))],
        }
        kinds: list[Any] = [
            SamplingParams(temperature=0, **shared),
            SamplingParams(seed=number, temperature=rng.choice((0.5, 2.0)), **shared),
            SamplingParams(seed=number, n=rng.randint(2, 4), top_p=0.9, top_k=rng.choice((0, 7)), **shared),
            SamplingParams(seed=number, min_p=0.02, logprobs=rng.choice((0, 3)), **shared),
            SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, **shared),
            SamplingParams(temperature=0, min_tokens=min(5, shared["max_tokens"]), **shared),
            SamplingParams(seed=number, allowed_token_ids=range(rng.randrange(3, 90), 95), n=2, **shared),
            SamplingParams(seed=number, logit_bias={rng.randrange(3, 96): 20.0 for _ in range(3)}, **shared),
            SamplingParams(seed=number, bad_words=[[rng.randrange(3, 96)] for _ in range(60)], **shared),
            SamplingParams(seed=number, bad_words=[[i, j] for i in range(90) for j in (5, i, 60)], **shared),
            SamplingParams(seed=number, no_repeat_ngram_size=2, **shared),  # the host must know each token first
            SamplingParams(seed=number, n=2, logits_processor=banning_the_last, **shared),
            BeamSearchParams(beam_width=rng.randint(2, 4), **shared),
        ]
        requests.append((prompt, rng.choice(kinds)))
    return requests


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(c.token_ids, c.finish_reason, c.stop_reason, [t.top for t in c.logprobs or ()]) for c in o.outputs]
        for o in outputs
    ]


@pytest.mark.parametrize("seed", range(6))
def test_running_ahead_changes_no_token(model: Llama, seed: int) -> None:
    rng = random.Random(seed)
    requests = everything(rng, 25)
    expected = run(engine_for(model, num_blocks=400, on_device=False), requests)
    ample = engine_for(model, num_blocks=400, on_device=True)
    outputs = run(ample, requests)
    for ours_, theirs, (_, params) in zip(told(outputs), told(expected), requests, strict=True):
        if getattr(params, "logprobs", None):  # floats of other batches
            ours_, theirs = ([c[:3] for c in each] for each in (ours_, theirs))
        assert ours_ == theirs, params
    for options in (
        {"num_blocks": 64, "host_blocks": 80, "max_num_seqs": 9, "admission": "optimistic"},
        {"num_blocks": 64, "max_num_seqs": 5, "max_num_batched_tokens": 11, "admission": "optimistic"},
        {"num_blocks": 120, "block_size": 1, "prefix_caching": False},
    ):
        tight = engine_for(model, **{"block_size": 4, **options}, on_device=True)  # type: ignore[arg-type]
        fitting = []
        for prompt, params in requests:
            blocks = params.num_sequences * -(-(len(prompt) + params.max_tokens + 4) // tight.cache.block_size)
            if blocks <= tight.cache.num_blocks and params.num_sequences <= tight.scheduler.max_num_seqs:
                fitting.append((prompt, params))
        indices = [requests.index(each) for each in fitting]
        for number, output in zip(indices, run(tight, fitting), strict=True):
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected[number].outputs], options


def happening(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that will get the engine's calls in order: run, draw, conclude."""
    happened = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            happened.append(name)
            return function(*args)

        return call

    for place, name in ((engine.runner, "run"), (engine.runner, "draw"), (engine, "conclude")):
        monkeypatch.setattr(place, name, noted(name, getattr(place, name)))
    return happened


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {7: 9.0}, "presence_penalty": 0.5},
        {"allowed_token_ids": range(3, 50), "bad_words": [[9]]},
        {"stop_token_ids": range(3, 96), "min_tokens": 3},
    ],
)
def test_draws_run_ahead_where_they_need_no_token(
    model: Llama, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    """A step is launched, its draw too, before the one in front is concluded; the tokens are those of a plain run."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4, **values})
    [expected] = run(engine_for(model, on_device=False), [([5, 6, 7], params)])
    engine = engine_for(model, on_device=True)
    happened = happening(engine, monkeypatch)
    [output] = run(engine, [([5, 6, 7], params)])
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert happened[:5] == ["run", "draw", "run", "draw", "conclude"]


def test_logits_are_computed_ahead_where_a_draw_needs_the_host(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, num_blocks=100, on_device=True)
    happened = happening(engine, monkeypatch)
    run(engine, [([5, 6, 7], SamplingParams(seed=0, no_repeat_ngram_size=2, max_tokens=4))])
    first, *between, last = ["run draw", "run conclude draw", "run conclude draw", "run conclude draw", "conclude"]
    assert " ".join(happened) == " ".join([first, *between, last])


@pytest.mark.parametrize("seed", range(2))
def test_what_sequences_share_is_known_at_every_step(model: Llama, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, beams, prefix hits, preemption by swap and recompute, prompts between: the list is never stale."""
    rng = random.Random(seed)
    requests = [each for each in everything(rng, 20) if not getattr(each[1], "logprobs", None)]
    expected = run(engine_for(model, num_blocks=400, on_device=False), requests)
    used: list[int] = []

    def attend(*arguments: Any) -> Tensor:
        used.append(arguments[0].shape[0])
        return attend_by_list(*arguments)

    if not torch.cuda.is_available():  # there the kernel itself is compared
        monkeypatch.setattr(kernels, "prefix_attention", attend)
    cases: list[dict[str, Any]] = [
        {"num_blocks": 400},
        {"num_blocks": 100, "host_blocks": 80, "max_num_seqs": 9, "admission": "optimistic"},
        {"num_blocks": 400, "block_size": 1, "max_num_batched_tokens": 11, "max_num_seqs": 8},
    ]
    for options in cases:
        outputs = run(engine_for(model, **options, on_device=True), requests)
        assert told(outputs) == told(expected), options
        unshared = run(engine_for(model, **options, on_device=True, sharing=None), requests)
        assert told(unshared) == told(expected), options
    assert used or torch.cuda.is_available()


def test_a_plan_is_made_when_tables_change_and_not_when_they_grow(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    plan_attention = kernels.plan_attention

    def noted(*arguments: Any) -> Any:
        plans.append(plan_attention(*arguments))
        return plans[-1]

    monkeypatch.setattr(kernels, "plan_attention", noted)
    engine = engine_for(model, on_device=True)
    engine.add_request("0", list(range(3, 23)), SamplingParams(n=3, seed=0, max_tokens=30))
    while engine.has_work:
        engine.step()
    assert 1 <= len(plans) <= 3, "the prompt's samples, and their first copies on write"
    assert plans[0] is not None
    assert plans[0].tails[:3] == [20, 20, 20]


def test_a_plan_is_made_anew_when_own_tokens_have_doubled(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for few tokens of their own may be the wrong one for many."""
    own: list[int] = []
    plan_attention = kernels.plan_attention

    def noted(tables: list[list[int]], lens: list[int], *arguments: Any) -> Any:
        plan = plan_attention(tables, lens, *arguments)
        assert plan is not None
        own.append(lens[0] - plan.tails[0])
        return plan

    monkeypatch.setattr(kernels, "plan_attention", noted)
    engine = engine_for(model, num_blocks=200, on_device=True)
    engine.add_request("0", list(range(3, 23)), SamplingParams(n=3, seed=0, max_tokens=150, ignore_eos=True))
    while engine.has_work:
        engine.step()
    first = own[-4]
    assert first < 8, "those of the beginning"
    assert own[-3:] == [first + 32, 2 * (first + 32), 4 * (first + 32)]


def test_the_next_step_is_launched_before_the_host_has_seen_this_one(model: Llama) -> None:
    engine = engine_for(model, on_device=True)
    group = engine.add_request("0", [5, 6, 7], SamplingParams(temperature=0, max_tokens=10))
    engine.step()
    sequence = group.sequences[0]
    assert (sequence.num_output_tokens, sequence.num_pending, sequence.num_computed) == (1, 1, 4)
    engine.step()
    assert (sequence.num_output_tokens, sequence.num_pending, sequence.num_computed) == (2, 1, 5)
    while engine.has_work:
        engine.step()
    assert sequence.num_output_tokens == 10
    assert sequence.num_pending == 0
    assert engine.figures.num_steps == 10, "no step was launched for a token beyond max_tokens"


def test_a_held_sequence_ends_where_its_tokens_end(model: Llama) -> None:
    """A stop token is seen when the step after it is under way: the token of that step is not the sequence's."""
    engine = engine_for(model, on_device=True)
    [plain] = run(engine, [([5, 6, 7], SamplingParams(temperature=0, max_tokens=12))])
    stop = plain.outputs[0].token_ids[6]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    group = engine.add_request("held", [5, 6, 7], params, hold=True)
    while engine.has_work:
        engine.step()
    held = group.sequences[0]
    assert held.table is not None
    assert held.num_computed == held.table.num_tokens == len(held.token_ids) - 1
    check(engine.cache)
    longer = [*held.token_ids, 9, 9]
    engine.add_request("next", longer, SamplingParams(temperature=0, max_tokens=5), parent=held)
    while engine.has_work:
        engine.step()
    output = {output.request_id: output for output in engine.take_finished()}["next"]
    [alone] = run(engine_for(model, on_device=False), [(longer, SamplingParams(temperature=0, max_tokens=5))])
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert output.num_cached_tokens == len(held.token_ids) - 1
    idle_sequences.release(Driver(engine), held)
    assert engine.cache.num_free == engine.cache.num_blocks


def test_blocks_are_saved_in_a_step_that_computes_nothing(model: Llama) -> None:
    """The first request waits for its last token, and the only other one must make room: nothing is left to compute."""
    requests = [
        ([5, 6, 7], SamplingParams(temperature=0, max_tokens=17)),
        ([8] * 9, SamplingParams(temperature=0, max_tokens=24)),
    ]
    expected = [output.outputs[0].token_ids for output in run(engine_for(model, on_device=False), requests)]
    moved = 0
    for num_blocks in range(9, 13):
        for late in range(1, 12):
            engine = engine_for(model, on_device=True, block_size=4, num_blocks=num_blocks, host_blocks=40,
                                admission="optimistic")  # fmt: skip
            move = engine.runner.move

            def count(schedule: Schedule, move: Any = move) -> None:
                nonlocal moved
                moved += len(schedule.moves.out)
                move(schedule)

            engine.runner.move = count  # type: ignore[method-assign]
            engine.add_request("0", *requests[0])
            for _ in range(late):
                engine.step()
            engine.add_request("1", *requests[1])
            while engine.has_work:
                engine.step()
            outputs = {output.request_id: output.outputs[0].token_ids for output in engine.take_finished()}
            assert [outputs["0"], outputs["1"]] == expected
        if moved:
            break
    assert moved


def test_a_failure_between_two_steps_loses_no_finished_answer(model: Llama) -> None:
    """The first step's tokens are reported although the launch of the next one failed."""
    engine: Engine = engine_for(model, on_device=True)
    engine.add_request("ends", [5, 6], SamplingParams(temperature=0, max_tokens=1))
    engine.add_request("goes on", [7, 8], SamplingParams(temperature=0, max_tokens=5))
    launch, launched = engine.runner.run, []

    def failing(*arguments: Any) -> Any:
        launched.append(arguments)
        if len(launched) == 2:
            raise RuntimeError("the device is gone")
        return launch(*arguments)

    engine.runner.run = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    deltas = engine.step()
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert outputs["ends"].error is None
    assert len(outputs["ends"].outputs[0].token_ids) == 1
    assert "gone" in (outputs["goes on"].error or "")
    assert "ends" in {delta.request_id for delta in deltas}
    assert engine.cache.num_free == engine.cache.num_blocks


def test_padded_sizes() -> None:
    sizes = [padded_size(n) for n in range(1, 300)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 30
    assert all(size <= 2 * n for n, size in enumerate(sizes, 1))


def test_padded_lengths() -> None:
    lengths = [padded_length(tokens, 5000) for tokens in range(1, 5001)]
    assert all(length >= tokens for tokens, length in enumerate(lengths, 1))
    assert lengths == sorted(lengths)
    assert sorted(set(lengths)) == [256, 512, 2048, 5000]
    assert padded_length(3, 100) == 100


def test_tables_are_as_wide_as_the_longest_context_asks(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches get narrow tables, because attention splits their contexts. Large batches get the whole tables."""
    monkeypatch.setattr(rows, "SHORTEST", 8)
    monkeypatch.setattr(state, "SHORTEST", 8 * 1024)
    engines = [engine_for(model, on_device=on_device, max_num_seqs=8, sharing=None) for on_device in (True, False)]
    runner = engines[0].runner
    assert isinstance(runner, DeviceRunner)
    few, whole = 2, runner.state.width
    monkeypatch.setattr(type(runner.state.shape), "num_parts", lambda self, n: 1 << 20 if n <= few else 1)
    widths, blocks_for = set(), DeviceState.blocks_for

    def noted(self: DeviceState, size: int, longest: int) -> int:
        blocks = blocks_for(self, size, longest)
        most = padded_length(longest, 4 * whole) if size <= few else 4 * whole
        assert blocks == -(-most // 4)
        widths.add((size, blocks))
        return blocks

    monkeypatch.setattr(DeviceState, "blocks_for", noted)
    for number, count in enumerate((1, 2, 5)):
        rng = random.Random(number)
        requests = [([rng.randrange(3, 96) for _ in range(3 + 2 * i)], SamplingParams(max_tokens=40, temperature=0.0))
                    for i in range(count)]  # fmt: skip
        ours, theirs = (run(engine, requests) for engine in engines)
        assert [each.outputs[0].token_ids for each in ours] == [each.outputs[0].token_ids for each in theirs]
    assert len({width for size, width in widths if size == 1}) == 3
    assert len({width for size, width in widths if size > few}) == 1


def test_the_most_probable_tokens_are_those_without_graphs(model: Llama) -> None:
    """Requests of one step ask for different numbers of them, also with draft tokens."""
    text = [11, 12, 13, 14] * 6
    counts = (0, 3, None, 7, 20, 40, -1)
    ways: list[dict[str, Any]] = [{}, {"speculate": "lookup"}]
    for options in ways:
        for few in (counts, counts[:3], counts[1:2]):
            params = [SamplingParams(temperature=0, max_tokens=12, logprobs=count, ignore_eos=True) for count in few]
            requests: list[tuple[list[int], Any]] = [(text[i:], each) for i, each in enumerate(params)]
            expected = run(engine_for(model, num_blocks=400, on_device=False), requests)
            found = run(engine_for(model, num_blocks=400, on_device=True, **options), requests)
            for output, other, count in zip(found, expected, few, strict=True):
                assert output.outputs[0].token_ids == other.outputs[0].token_ids
                for one, two in zip(output.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
                    assert len(one.top) == len(two.top) == (96 if count == -1 else count)
                    assert [i for i, _ in one.top[:5]] == [i for i, _ in two.top[:5]]
                    assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
