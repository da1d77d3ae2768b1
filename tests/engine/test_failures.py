"""Requests that are aborted or that fail, at every point of their lives: the books balance, here and on the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support import engine_for, hf_model, ours

from minillm.cache import check
from minillm.engine import held
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model(seed=1, vocab_size=97, max_position_embeddings=512))


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


def check_books(engine: Engine) -> None:
    check(engine.cache)
    engine.scheduler.swap.check()


def everything_is_back(engine: Engine) -> None:
    check_books(engine)
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert engine.scheduler.swap.num_free == engine.scheduler.swap.num_blocks, "host blocks leaked"
    assert not engine.requests.groups
    assert not engine.scheduler.running


@pytest.mark.parametrize("on_device", [False, True])
def test_aborts_at_every_step_give_every_block_back(model: Llama, on_device: bool) -> None:
    preemptions = 0
    for seed in range(40):
        rng = random.Random(seed)
        engine = tight(model, on_device)
        for number, (prompt, params) in enumerate(crowd(rng)):
            engine.add_request(str(number), prompt, params, hold=number % 4 == 0, salt="s" if number % 5 == 0 else None)
        steps = 0
        while engine.has_work:
            if rng.random() < 0.3:
                engine.abort(str(rng.randrange(10)))
            engine.step()
            check_books(engine)
            steps += 1
            if steps == seed:  # then all at once
                for number in range(10):
                    engine.abort(str(number))
        engine.carry_out_aborts()
        assert len(engine.take_finished()) == 10
        for sequence in list(engine.scheduler.idle.idle.values()):
            held.release(Driver(engine), sequence)
        everything_is_back(engine)
        preemptions += engine.scheduler.preemption.count
    assert preemptions > 0


@pytest.mark.parametrize("on_device", [False, True])
def test_a_device_that_fails_at_any_step_fails_that_steps_requests_only(model: Llama, on_device: bool) -> None:
    failed = finished = 0
    for seed in range(30):
        rng = random.Random(seed)
        engine = tight(model, on_device)
        run, steps = engine.runner.run, 0

        def breaking(schedule: Any, copies: Any, run: Any = run, rng: random.Random = rng) -> Any:
            result = run(schedule, copies)
            if rng.random() < 0.08:
                raise RuntimeError("the device is gone")
            return result

        engine.runner.run = breaking  # type: ignore[method-assign]
        for number, (prompt, params) in enumerate(crowd(rng)):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            steps += 1
            assert steps < 2000, "no progress"
            try:
                engine.step()
            except RuntimeError:
                failed += 1
            check_books(engine)
        outputs = engine.take_finished()
        assert len(outputs) == 10
        assert all(output.error is None or "device is gone" in output.error for output in outputs)
        finished += sum(output.error is None for output in outputs)
        everything_is_back(engine)
    assert failed > 10
    assert finished > 10
