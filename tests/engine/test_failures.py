"""Test requests that are aborted or fail at any step: the bookkeeping of the pool and of host memory stays right."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial
from typing import Any

import pytest

from lib.engine import check_cache, engine_for, everything_is_back, run
from lib.models import hf_model, ours
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner.step import StepWork
from minillm.sequence import Schedule


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model(seed=1, num_hidden_layers=1, vocab_size=97, max_position_embeddings=512))


def crowd(rng: random.Random) -> list[tuple[list[int], Any]]:
    """Requests of every kind, on prompts that often begin alike."""
    kinds = (
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True),
        BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True),
        BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=0.5, max_tokens=8, logprobs=2),
    )
    prefix = list(range(3, 20))
    return [
        (prefix[: rng.randint(1, 17)] + [rng.randrange(20, 97) for _ in range(rng.randint(0, 12))], rng.choice(kinds))
        for _ in range(10)
    ]


def tight(model: Llama, on_device: bool) -> Engine:
    return engine_for(model, num_blocks=48, host_blocks=60, max_num_batched_tokens=24, max_num_seqs=24,
                      admission="optimistic", on_device=on_device)  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
def test_aborts_at_every_step_give_every_block_back(model: Llama, on_device: bool) -> None:
    preemptions = 0
    for seed in range(0, 40, 2):
        rng = random.Random(seed)
        engine = tight(model, on_device)
        for number, (prompt, params) in enumerate(crowd(rng)):
            engine.add_request(str(number), prompt, params, hold=number % 4 == 0, salt="s" if number % 5 == 0 else None)
        steps = 0
        while engine.has_work:
            if rng.random() < 0.3:
                engine.abort(str(rng.randrange(10)))
            engine.step()
            check_cache(engine)
            steps += 1
            if steps == seed:  # then all at once
                for number in range(10):
                    engine.abort(str(number))
        engine.carry_out_aborts()
        assert len(engine.take_finished()) == 10
        for sequence in list(engine.scheduler.idle.idle.values()):
            idle_sequences.release(Driver(engine), sequence)
        everything_is_back(engine)
        preemptions += engine.scheduler.preemption.count
    assert preemptions > 0


@pytest.mark.parametrize("on_device", [False, True])
def test_a_device_that_fails_at_any_step_fails_that_steps_requests_only(model: Llama, on_device: bool) -> None:
    failed = finished = 0
    for seed in range(20):
        rng = random.Random(seed)
        engine = tight(model, on_device)
        steps = 0

        def breaking(*arguments: Any, call: Any, rng: random.Random = rng) -> Any:
            result = call(*arguments)
            if rng.random() < 0.08:
                raise RuntimeError("the device is gone")
            return result

        engine.runner.run = partial(breaking, call=engine.runner.run)  # type: ignore[method-assign]
        engine.conclude = partial(breaking, call=engine.conclude)  # type: ignore[method-assign]
        for number, (prompt, params) in enumerate(crowd(rng)):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            steps += 1
            assert steps < 2000, "no progress"
            try:
                engine.step()
            except RuntimeError:
                failed += 1
            check_cache(engine)
        outputs = engine.take_finished()
        assert len(outputs) == 10
        assert all(output.error is None or "device is gone" in output.error for output in outputs)
        finished += sum(output.error is None for output in outputs)
        everything_is_back(engine)
    assert failed > 10
    assert finished > 10


@pytest.mark.parametrize("calls", ["before", "after"])
def test_a_move_to_host_memory_that_fails_changes_no_token(model: Llama, calls: str) -> None:
    """A step moves blocks and computes nothing: a request is preempted while its token is on the device."""
    request = [5, 6, 7, 8, 9, 10], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [alone] = run(engine_for(model), [request])
    engine = engine_for(model, host_blocks=64, on_device=True)
    engine.add_request("0", *request)
    for _ in range(4):
        engine.step()
    scheduler, save = engine.scheduler, engine.runner.host_pool.save

    def preempting() -> Schedule:
        schedule, victim = Schedule(), scheduler.running.pop()
        scheduler.waiting.appendleft(victim)
        scheduler.preemption.take_out(victim, schedule)
        return schedule

    def failing(pairs: list[tuple[int, int]]) -> None:
        if calls == "after":
            save(pairs[:1])
        raise RuntimeError("the device is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", preempting)
        patch.setattr(engine.runner.host_pool, "save", failing)
        with pytest.raises(RuntimeError, match="is gone"):
            engine.step()
    check_cache(engine)
    while engine.has_work:
        engine.step()
    [output] = engine.take_finished()
    assert output.error is None
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    everything_is_back(engine)


def test_blocks_of_a_failed_step_are_not_found(model: Llama) -> None:
    """The step's K and V may be wrong: the same prompt is computed again."""
    engine, prompt = engine_for(model), list(range(3, 25))
    draw = engine.runner.draw

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("the device is gone")

    engine.runner.draw = failing  # type: ignore[method-assign, assignment]
    engine.add_request("fails", prompt, SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(RuntimeError):
        engine.step()
    engine.runner.draw = draw  # type: ignore[method-assign]
    engine.add_request("again", prompt, SamplingParams(temperature=0, max_tokens=4))
    while engine.has_work:
        engine.step()
    outputs = {output.request_id: output for output in engine.take_finished()}
    assert "gone" in (outputs["fails"].error or "")
    assert outputs["again"].num_cached_tokens == 0


@pytest.mark.parametrize("on_device", [False, True])
def test_what_outlives_a_failure_has_its_own_tokens(model: Llama, on_device: bool) -> None:
    """Requests that waited, or were saved on the host, while a step failed before or after the device's work."""
    kinds = (
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(n=2, seed=1, max_tokens=24, repetition_penalty=1.2),
        BeamSearchParams(beam_width=2, max_tokens=24),
    )
    requests: list[tuple[list[int], Any]] = [([5 + n] * (4 + n), kinds[n % 3]) for n in range(12)]
    alone = run(engine_for(model, num_blocks=512, on_device=False), requests)
    survived = saved = 0
    for seed in range(16):
        engine = tight(model, on_device)
        launch, steps = engine.runner.run, itertools.count()
        failed: list[int] = []

        def breaking(
            schedule: Any, copies: Any, *, seed: int = seed, launch: Any = launch, steps: Any = steps,
            failed: list[int] = failed,
        ) -> Any:  # fmt: skip
            """Fail once: before the device saves a group's blocks, or when it has done a step's work."""
            nonlocal saved
            early = seed % 2 and schedule.moves.out
            if not failed and early:
                saved += 1
                failed.append(seed)
                raise RuntimeError("the device is gone")
            result = launch(schedule, copies)
            if not failed and not seed % 2 and next(steps) == 3 * seed:
                failed.append(seed)
                raise RuntimeError("the device is gone")
            return result

        engine.runner.run = breaking  # type: ignore[method-assign]
        for number, (prompt, params) in enumerate(requests[seed % 3 :] + requests[: seed % 3]):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            with contextlib.suppress(RuntimeError):
                engine.step()
        for output in engine.take_finished():
            if output.error is None:
                expected = next(each for each in alone if each.prompt_token_ids == output.prompt_token_ids)
                assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
                survived += 1
    assert survived > 50
    assert saved > 3


def test_the_device_is_told_everything_after_a_failure(model: Llama) -> None:
    """The failed step's rows never reached the device, and the next request takes the same one."""
    params = SamplingParams(temperature=0, max_tokens=6)
    [expected] = run(engine_for(model, on_device=False), [([7, 8, 9], params)])
    engine = engine_for(model, max_num_seqs=1, on_device=True)
    compute = engine.runner.compute

    def failing(work: StepWork) -> Any:
        if work.decode is not None:
            raise RuntimeError("the device is gone")
        return compute(work)

    engine.runner.compute = failing  # type: ignore[method-assign]
    engine.add_request("fails", [5, 6], params)
    with pytest.raises(RuntimeError):
        engine.step()  # the prompt's, and the one after it
    engine.runner.compute = compute  # type: ignore[method-assign]
    engine.take_finished()
    [output] = run(engine, [([7, 8, 9], params)])
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
