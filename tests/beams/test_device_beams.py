"""Test beam searches on the device: they find the beams of transformers, and the bookkeeping follows their tables."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

from lib.beams import CASES, EOS, assert_same, beam_models, expected, prompts
from lib.cache_checks import check, check_swap
from lib.engine import engine_for, run
from lib.kernels import attend_by_list
from minillm import kernels
from minillm.beams.device_searches import PendingSearches
from minillm.engine.engine import Engine
from minillm.kernels import Field
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner.device.beams import Chosen
from minillm.runner.device.runner import DeviceRunner
from minillm.sequence import Chunk, Schedule, SequenceGroup


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return beam_models()


class Witness:
    """Compares every beam's bookkeeping with its row on the device after each step."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(engine.runner, DeviceRunner)
        self.runner, self.cache = engine.runner, engine.cache
        self.num_compared = self.num_ahead = 0  # beams; of them, those whose next step was under way
        self.rows: dict[int, list[list[int]]] = {}  # by flight: all rows as the device left them
        choose, conclude = engine.runner.beams.choose, PendingSearches.conclude

        def noted(*arguments: Any, **options: Any) -> Chosen:
            chosen = choose(*arguments, **options)
            self.rows[id(chosen)] = self.runner.state.words.tolist()
            return chosen

        def compared(flight: PendingSearches) -> list[Any]:
            deltas = conclude(flight)
            rows = self.rows.pop(id(flight.chosen))
            for group in flight.on_device:
                self.compare(group, rows)
            return deltas

        monkeypatch.setattr(engine.runner.beams, "choose", noted)
        monkeypatch.setattr(PendingSearches, "conclude", compared)

    def compare(self, group: SequenceGroup, rows: list[list[int]]) -> None:
        held, size = self.runner.state.cpu_rows._row_of, self.cache.block_size
        for beam in group.unfinished:
            if beam.table is None or beam.seq_id not in held:  # preempted meanwhile
                continue
            words, computed = rows[held[beam.seq_id].index], len(beam.token_ids) - 1
            count = -(-computed // size)
            assert words[Field.TABLE : Field.TABLE + count] == beam.blocks[:count]
            assert words[Field.POSITION] == computed
            assert words[Field.TOKEN] == beam.token_ids[-1]
            assert words[Field.RANK] == beam.index
            [logprob] = struct.unpack("<f", struct.pack("<i", words[Field.LOGPROB]))
            assert logprob == beam.cumulative_logprob == group.state.searches[0].logprobs[beam.index]
            last = beam.blocks[count - 1]
            assert computed % size == 0 or self.cache.ref_counts[last] == 1, "two beams would write to one block"
            self.num_compared += 1
            self.num_ahead += beam.num_pending


@pytest.mark.parametrize(
    ("block_size", "eos"), [(1, [EOS, 11, 40]), (4, [EOS]), (4, []), (16, [EOS, 11, 40])], ids=repr
)
def test_the_same_beams_and_scores_as_transformers(
    models: tuple[Any, Any], block_size: int, eos: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all cases in one batch, with samples, and with searches that the CPU decides, such as with penalties."""
    theirs, model = models
    requests: list[tuple[list[int], Any]] = []
    for number, (params, prompt) in enumerate(zip(CASES, prompts(len(CASES)), strict=True)):
        requests.append((prompt, params))
        if number % 3 == 0:
            requests.append((prompt[::-1], SamplingParams(n=2, seed=number, max_tokens=10)))
    sizes: dict[str, Any] = {"num_blocks": 2048 // block_size, "block_size": block_size}
    engine = engine_for(
        model, **sizes, eos=frozenset(eos), max_num_seqs=128, max_num_batched_tokens=128, on_device=True
    )
    witness = Witness(engine, monkeypatch)
    outputs = run(engine, requests)
    assert witness.num_compared > 200
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if isinstance(params, BeamSearchParams):
            assert_same(output, *expected(theirs, prompt, params, eos))


@pytest.mark.parametrize("block_size", [1, 4])
def test_searches_run_ahead_where_nothing_needs_the_host(
    models: tuple[Any, Any], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, model = models
    plain = [each for each in CASES if not each.has_penalties and not each.no_repeat_ngram_size and not each.min_tokens]
    requests: list[tuple[list[int], Any]] = list(zip(prompts(len(plain)), plain, strict=True))
    requests += [(prompt[::-1], SamplingParams(seed=0, max_tokens=12)) for prompt, _ in requests[:3]]
    engine = engine_for(
        model,
        num_blocks=2048 // block_size,
        block_size=block_size,
        eos=frozenset([EOS]),
        max_num_seqs=128,
        max_num_batched_tokens=512,
        on_device=True,
    )
    witness = Witness(engine, monkeypatch)
    outputs = run(engine, requests)
    assert witness.num_ahead > 0.8 * witness.num_compared
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if isinstance(params, BeamSearchParams):
            assert_same(output, *expected(theirs, prompt, params, [EOS]))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_survive_preemption(
    models: tuple[Any, Any], preemption: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, model = models
    params = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts(5, longest=30)]
    engine = engine_for(
        model,
        num_blocks={1: 150, 4: 40, 16: 15}[block_size],
        block_size=block_size,
        host_blocks=400 // block_size if preemption == "swap" else 0,
        admission="optimistic",
        on_device=True,
    )
    Witness(engine, monkeypatch)
    outputs = run(engine, requests)
    assert engine.scheduler.preemption.count > 0
    for (prompt, _), output in zip(requests, outputs, strict=True):
        assert_same(output, *expected(theirs, prompt, params, []))


def mixed(rng: random.Random, count: int, *, hosted: bool) -> list[tuple[list[int], Any]]:
    """Searches for the device, samples, and with ``hosted`` searches for the host, which nothing runs ahead of."""
    requests: list[tuple[list[int], Any]] = []
    for number in range(count):
        prompt = [rng.randrange(3, 97) for _ in range(rng.randint(1, 18))]
        length = rng.randint(1, 20)
        ends: dict[str, Any] = {
            "max_tokens": length,
            "stop_token_ids": [rng.randrange(3, 97) for _ in range(rng.choice((0, 1, 9)))],
        }
        kinds: list[Any] = [
            BeamSearchParams(
                beam_width=rng.randint(1, 6),
                early_stopping=rng.choice((True, False, "never")),
                length_penalty=rng.choice((-1.0, 0.0, 1.0, 2.0)),
                **ends,
            ),
            BeamSearchParams(beam_width=rng.randint(2, 4), min_tokens=min(4, length), **ends),
            BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=0.5, **ends),
            BeamSearchParams(beam_width=3, repetition_penalty=1.3, **ends),
            SamplingParams(temperature=0, **ends),
            SamplingParams(n=rng.randint(1, 3), seed=number, **ends),
            SamplingParams(temperature=0, logit_bias={7: 2.0}, **ends),  # computed ahead, and drawn when it is its turn
        ]
        plain = [kinds[0], kinds[0], *kinds[4:]]
        requests.append((prompt, rng.choice(kinds + plain if hosted else plain)))
    return requests


def preempting(engine: Engine, rng: random.Random, share: float) -> None:
    """Preempt the latest group in a random ``share`` of the steps, even if the device is running ahead."""
    scheduler, decode = engine.scheduler, engine.scheduler._decode

    def decode_or_preempt(schedule: Schedule) -> list[Chunk]:
        if len(scheduler.running) > 1 and rng.random() < share:
            victim = scheduler.running.pop()
            scheduler.waiting.appendleft(victim)
            scheduler.preemption.take_out(victim, schedule)
        return decode(schedule)

    scheduler._decode = decode_or_preempt  # type: ignore[method-assign]


def told(output: RequestOutput) -> Any:
    return [(each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]


@pytest.mark.parametrize("seed", range(8))
def test_preemption_and_aborts_at_any_step(models: tuple[Any, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = models
    rng = random.Random(seed)
    requests = mixed(rng, 16, hosted=seed % 2 == 0)
    alone = [run(engine_for(model, num_blocks=200, on_device=False), [each])[0] for each in requests]
    size = rng.choice((1, 2, 4, 16))
    engine = engine_for(
        model,
        num_blocks=640 // size,
        block_size=size,
        host_blocks=600 * (seed // 2 % 2),
        max_num_seqs=16,
        max_num_batched_tokens=40,
        prefix_caching=rng.random() < 0.7,
        on_device=True,
    )
    witness = Witness(engine, monkeypatch)
    preempting(engine, rng, 0.2)
    aborted = {str(number) for number in range(len(requests)) if rng.random() < 0.2}
    outputs: dict[str, RequestOutput] = {}
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        if rng.random() < 0.2 and aborted & engine.requests.groups.keys():
            engine.abort(rng.choice(sorted(aborted & engine.requests.groups.keys())))
        engine.step()
        check(engine.cache)
        check_swap(engine.scheduler.preemption.swap)
        outputs |= {output.request_id: output for output in engine.take_finished()}
    assert engine.cache.num_free == engine.cache.num_blocks
    assert engine.scheduler.preemption.swap.num_free == engine.scheduler.preemption.swap.num_blocks
    assert engine.scheduler.preemption.count > 0
    assert witness.num_compared > 0
    for number, output in enumerate(alone):
        if str(number) not in aborted:
            assert told(outputs[str(number)]) == told(output), requests[number][1]
            scores = [each.score for each in output.outputs]
            assert [each.score for each in outputs[str(number)].outputs] == pytest.approx(scores, abs=1e-3)


def test_the_next_step_is_launched_before_the_host_has_seen_this_one(models: tuple[Any, Any]) -> None:
    _, model = models
    engine = engine_for(model, on_device=True)
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    group = engine.add_request("0", [5, 6, 7], params)
    engine.step()  # the prompt: one beam becomes four, on the host
    assert [beam.num_pending for beam in group.sequences] == [0] * 4
    for number in range(2, 10):
        engine.step()
        tokens = [(beam.num_output_tokens, beam.num_pending, beam.num_computed) for beam in group.sequences]
        assert tokens == [(number, 1, number + 3)] * 4
        assert {beam.index for beam in group.sequences} == set(range(4))
    while engine.has_work:
        engine.step()
    assert engine.figures.num_steps == 10, "no step was launched for a token beyond max_tokens"


def test_what_a_step_too_many_has_chosen_is_dropped(models: tuple[Any, Any]) -> None:
    """The CPU sees a search's end while the next step runs. The blocks are reused at once."""
    theirs, model = models
    engine = engine_for(model, num_blocks=512, eos=frozenset([EOS]), on_device=True)
    params = BeamSearchParams(beam_width=2, early_stopping=True, max_tokens=60)
    other = BeamSearchParams(beam_width=3, max_tokens=70, ignore_eos=True)
    requests: list[tuple[list[int], Any]] = [(prompt, params) for prompt in prompts(8)] + [([9, 9, 9], other)]
    outputs = run(engine, requests)
    for (prompt, each), output in zip(requests, outputs, strict=True):
        assert_same(output, *expected(theirs, prompt, each, [] if each is other else [EOS]))
    early = [output for output in outputs if max(len(each.token_ids) for each in output.outputs) < 50]
    assert len(early) > 3


def test_logits_of_nan_end_the_request_alone(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = models
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    [expected_] = run(engine_for(model, on_device=False), [([5, 6, 7], params)])
    engine = engine_for(model, on_device=True)
    assert isinstance(engine.runner, DeviceRunner)
    choose, steps = engine.runner.beams.choose, []

    def poisoned(logits: torch.Tensor, logit_rows: list[int], searches: Any, **options: Any) -> Chosen:
        steps.append(logit_rows)
        if len(steps) == 4:
            logits[logit_rows[1]] = float("nan")
        return choose(logits, logit_rows, searches, **options)

    monkeypatch.setattr(engine.runner.beams, "choose", poisoned)
    engine.add_request("bad", [9, 9], params)
    engine.add_request("good", [5, 6, 7], params)
    while engine.has_work:
        engine.step()
        check(engine.cache)
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert "NaN" in (outputs["bad"].error or "")
    assert outputs["good"].error is None
    assert told(outputs["good"]) == told(expected_)
    assert engine.cache.num_free == engine.cache.num_blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernel itself is compared")
def test_shared_blocks_are_those_that_stay_shared(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention uses only the list of shared blocks, which is rebuilt as the beams share more."""
    theirs, model = models
    params = BeamSearchParams(beam_width=4, max_tokens=60, ignore_eos=True)
    plans: list[Any] = []
    plan_attention = kernels.plan_attention

    def noted(*arguments: Any) -> Any:
        plans.append(plan_attention(*arguments))
        return plans[-1]

    monkeypatch.setattr(kernels, "prefix_attention", attend_by_list)
    monkeypatch.setattr(kernels, "plan_attention", noted)
    engine = engine_for(model, num_blocks=512, block_size=2, on_device=True)
    requests = [(prompt, params) for prompt in prompts(4)]
    for (prompt, _), output in zip(requests, run(engine, requests), strict=True):
        assert_same(output, *expected(theirs, prompt, params, []))
    assert len(plans) < 40, "not at every step"
    assert max(max(plan.tails) for plan in plans if plan is not None) > 40, "more than the prompts"


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=4, max_tokens=6, logprobs=2),
        BeamSearchParams(beam_width=4, max_tokens=6, num_beam_groups=2, diversity_penalty=1.0),
        BeamSearchParams(beam_width=3, max_tokens=6, repetition_penalty=1.2),
        BeamSearchParams(beam_width=2, max_tokens=6, logits_processor=lambda prompt, output, logits: logits),
        BeamSearchParams(beam_width=2, max_tokens=6, stop_token_ids=list(range(3, 12))),
        BeamSearchParams(beam_width=60, max_tokens=6),
    ],
    ids=["logprobs", "groups", "penalty", "processor", "nine end tokens", "too wide for the vocabulary"],
)
def test_what_the_host_must_see_it_decides(
    models: tuple[Any, Any], params: BeamSearchParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = models
    expected_ = run(engine_for(model, num_blocks=400, on_device=False), [([5, 6, 7], params)])
    engine = engine_for(model, num_blocks=400, on_device=True)
    assert isinstance(engine.runner, DeviceRunner)
    monkeypatch.setattr(engine.runner.beams, "choose", None)
    assert told(run(engine, [([5, 6, 7], params)])[0]) == told(expected_[0])
