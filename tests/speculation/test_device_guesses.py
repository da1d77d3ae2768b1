"""Guesses that the device makes and judges itself: the same answers as without, always a step ahead of the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from speculated import assert_begins, assert_begins_at_error, assert_same, counting_model, guesses_of, play
from support import engine_for, hf_model, ours, write_tiny_model

from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.model.llama import Llama
from minillm.params import SamplingParams
from minillm.runner.device_runner import DeviceRunner
from minillm.speculation import guesses
from minillm.speculation import method as speculation
from minillm.speculation.method import DeviceVerification
from minillm.text.tokenizer import Tokenizer

LOOP = [11, 12, 13, 14, 15, 16, 17]


@pytest.fixture(autouse=True)
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any host is too slow to wait for; guesses have one price on all devices."""
    monkeypatch.setattr(speculation, "_SLOW_HOST", -1.0)
    monkeypatch.setattr(speculation, "_price", lambda model: speculation._GPU_PRICE)


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model(vocab_size=640, max_position_embeddings=512))


@pytest.fixture(scope="module")
def counting() -> Llama:
    """A model behind whose token t comes t + 1."""
    return counting_model(vocab_size=640, max_position_embeddings=512)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write_tiny_model(tmp_path_factory.mktemp("text")))


def guessing(model: Llama, **options: Any) -> tuple[Engine, list[DeviceVerification]]:
    """An engine, and a list of the steps for which the device is to make guesses."""
    engine = engine_for(model, on_device=True, speculate="lookup", **options)
    method, steps = guesses_of(engine), list[DeviceVerification]()
    launch = method.launch

    def launched(*args: Any) -> Any:
        flight = launch(*args)
        if isinstance(flight, DeviceVerification):
            steps.append(flight)
        return flight

    method.launch = launched  # type: ignore
    return engine, steps


def some_params(rng: random.Random) -> SamplingParams:
    """Options of which none keeps the device from guessing, but for a few requests."""
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 90), "seed": rng.getrandbits(40)}
    options["temperature"] = rng.choice((0, 0, 0.5, 1.0))
    if options["temperature"]:
        options["top_k"] = rng.randint(1, 3)
    choices: list[dict[str, Any]] = [
        {"logprobs": rng.randint(0, 5)},
        {"logprobs": 40},
        {"stop_token_ids": [rng.randrange(640) for _ in range(9)]},
        {"stop": rng.sample(["on", "aa", "b", "e", "th", " ", "1"], 2)},
        {"stop": ["a"], "min_tokens": rng.randint(0, options["max_tokens"])},
        {"ignore_eos": True},
        {"repetition_penalty": 1.1},
        {"n": 2},
        {"prompt_logprobs": 1},
    ]
    for choice in rng.sample(choices, rng.randint(0, 2)):
        options |= choice
    return SamplingParams(**options)


def some_requests(rng: random.Random) -> list[Request]:
    """Prompts that repeat something; behind some of them the model that counts repeats a part of them."""
    requests = []
    for number in range(rng.choice((1, 1, 2, 3))):
        first, part = rng.randrange(3, 500), [rng.randrange(3, 640) for _ in range(rng.randint(1, 12))]
        run = [*range(first, first + rng.randint(4, 60)), *part, first - 1]
        requests.append(Request(rng.choice((part * rng.randint(1, 4), run)), some_params(rng), request_id=str(number)))
    return requests


def test_random_requests_have_the_same_tokens(model: Llama, counting: Llama, tokenizer: Tokenizer) -> None:
    """They come, are preempted and aborted at any step; sometimes one runs alone, and the device guesses."""
    rng = random.Random(5)
    right = guessed = preempted = by_device = 0
    for turn in range(22):
        each, requests = (model, counting)[turn % 2], some_requests(rng)
        arrivals = [rng.choice((0, rng.randint(0, 60))) for _ in requests]
        aborts = {rng.randint(0, 40): rng.choice(requests).request_id for _ in range(rng.choice((0, 0, 1)))}
        size = rng.choice((1, 4, 16))
        needed = max(
            -(-len(r.token_ids) // size) + r.params.num_sequences * (r.params.max_tokens // size + 2) for r in requests
        )
        options: dict[str, Any] = {
            "block_size": size,
            "num_blocks": needed + rng.choice((0, 0, 4, 512 // size)),
            "host_blocks": rng.choice((0, 64)),
            "max_num_batched_tokens": rng.choice((12, 64)),
            "admission": rng.choice(("predicted", "optimistic")),
        }
        plain = engine_for(each, tokenizer=tokenizer, num_blocks=512, on_device=False)
        expected = play(plain, requests, [0] * len(requests), {})
        engine, steps = guessing(each, tokenizer=tokenizer, **options)
        found = play(engine, requests, arrivals, aborts)
        for request in requests:
            name = request.request_id
            (assert_begins if name in aborts.values() else assert_same)(found[name], expected[name])
        method = guesses_of(engine)
        right, guessed = right + method.num_right, guessed + method.num_guessed
        preempted += engine.scheduler.preemption.count
        by_device += len(steps)
    print(right, guessed, preempted, by_device)
    assert right > 150
    assert guessed > right
    assert preempted > 2
    assert by_device > 40


def test_no_step_waits_and_fewer_are_needed(counting: Llama) -> None:
    """The next step is under way whenever the host looks at one, and goes on from wherever that one has come."""
    text = [*range(100, 200), 99]
    request = Request(text, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), request_id="r")
    engine, steps = guessing(counting, num_blocks=128)
    engine.add(request)
    while engine.has_work:
        engine.step()
        for group in engine.requests.groups.values():
            assert engine._under_way is not None or not group.sequences[0].num_output_tokens
    [answer] = engine.take_finished()
    assert answer.outputs[0].token_ids == list(range(100, 200))
    assert engine.figures.num_steps < 20
    assert guesses_of(engine).num_right > 80
    assert len(steps) > 8


def test_a_text_that_repeats_nothing_has_plain_steps(counting: Llama) -> None:
    request = Request([3, 9, 5, 100], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), request_id="r")
    engine, steps = guessing(counting, num_blocks=128)
    play(engine, [request], [0], {})
    assert not steps


def test_guesses_that_are_wrong_become_rare(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some are expected at every step, of a text of random tokens."""
    monkeypatch.setattr(guesses.Lookups, "_source", lambda *_: object())
    params = SamplingParams(temperature=5, seed=3, max_tokens=200, ignore_eos=True)
    engine, steps = guessing(model, num_blocks=256)
    play(engine, [Request(list(range(3, 100)), params, request_id="r")], [0], {})
    assert 0 < len(steps) < 25


@pytest.mark.parametrize("rows", [(4, 8, 16), (16, 16, 16)])
@pytest.mark.parametrize("size", [1, 4])
def test_there_is_no_room_for_guesses_where_the_pool_is_full(
    counting: Llama, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], size: int
) -> None:
    """Guesses take no block that the answer needs, and cost no preemption, while others hold the rest of the pool."""
    monkeypatch.setattr(guesses, "ROWS", rows)
    text = [*range(100, 140), 99]
    request = Request(text, SamplingParams(temperature=0, max_tokens=43, ignore_eos=True), request_id="r")
    guessed = 0
    for spare in range(20 // size + 2):
        engine, steps = guessing(counting, block_size=size, num_blocks=512 // size)
        other = engine.cache.allocate(engine.requests.new_seq_id())
        engine.cache.append(other, 512 // size * size - 84 - spare * size)
        engine.add(request)
        while engine.has_work:
            engine.step()
        [answer] = engine.take_finished()
        assert answer.outputs[0].token_ids == list(range(100, 143))
        assert engine.scheduler.preemption.count == 0
        guessed += len(steps)
    assert guessed


def test_blocks_of_wrong_guesses_may_become_others(model: Llama) -> None:
    """Another sequence takes a block at every step, so one that was given back is gone when the text comes to it."""
    params = SamplingParams(temperature=0.5, top_k=2, seed=1, max_tokens=90, ignore_eos=True)
    requests = [Request(LOOP[:count] * 6, params, request_id=str(count)) for count in range(2, 8)]
    expected = play(engine_for(model, num_blocks=1024, on_device=False), requests, [0] * len(requests), {})
    wrong = 0
    for request in requests:
        engine, _ = guessing(model, block_size=1, num_blocks=1024)
        free = engine.cache._free
        take = free.take
        free.take = lambda count, after=None, take=take: take(count)  # type: ignore
        other = engine.cache.allocate(engine.requests.new_seq_id())
        engine.add(request)
        while engine.has_work:
            engine.step()
            engine.cache.append(other, 1)
        [answer] = engine.take_finished()
        assert_same(expected[request.request_id], answer)
        wrong += guesses_of(engine).num_guessed - guesses_of(engine).num_right
    assert wrong > 50


def test_an_abort_at_every_step_leaves_nothing(counting: Llama, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [Request([*range(100, 160), 99], params, request_id="0"), Request(LOOP * 3, params, request_id="1")]
    expected = play(engine_for(counting, num_blocks=256, on_device=False), requests, [0, 0], {})
    for step in range(16):
        engine, _ = guessing(counting, num_blocks=256)
        found = play(engine, requests, [0, step // 2], {step: "0"})
        assert_begins(found["0"], expected["0"])
        assert_same(expected["1"], found["1"])


@pytest.mark.parametrize("where", [(DeviceRunner, "draw_guesses"), (DeviceVerification, "wait"), (DeviceRunner, "run")])
def test_a_step_that_fails_takes_its_own_request_only(
    counting: Llama, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    rng, (owner, name) = random.Random(1), where
    done, broken = getattr(owner, name), 0
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [Request([*range(100 + i, 160), 99 + i], params, request_id=str(i)) for i in range(3)]
    expected = play(engine_for(counting, num_blocks=256, on_device=False), requests, [0] * 3, {})

    def breaking(*arguments: Any) -> Any:
        result = done(*arguments)
        if rng.random() < 0.1:
            raise RuntimeError("a seeded fault")
        return result

    for turn in range(8):
        engine, _ = guessing(counting, num_blocks=256)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaking)
            found = play(engine, requests, [0, 8 * turn, 16 * turn], {}, lambda error: "seeded" in str(error))
        for each in requests:
            output = found[each.request_id]
            if output.error is None:
                assert_same(expected[each.request_id], output)
            else:
                assert_begins_at_error(output, expected[each.request_id])
                broken += 1
        again = play(engine, requests, [0] * 3, {})
        for each in requests:
            assert_same(expected[each.request_id], again[each.request_id])
    assert broken


def test_a_text_near_the_longest_of_all_ends_there(counting: Llama) -> None:
    """The last steps have no guesses: these would need room behind the longest text."""
    text = [*range(100, 560), 99]
    request = Request(text, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True), request_id="r")
    engine, steps = guessing(counting, num_blocks=256)
    answer = play(engine, [request], [0], {})["r"]
    assert answer.outputs[0].token_ids == list(range(100, 100 + 512 - len(text)))
    assert steps


def test_held_blocks_of_an_answer_are_those_of_its_tokens(counting: Llama) -> None:
    """An answer that ends within right guesses is held without what lies behind its end; another goes on with it."""
    text = [*range(100, 160), 99]
    for length in range(20, 36):
        params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[100 + length], ignore_eos=True)
        engine, _ = guessing(counting, num_blocks=128)
        engine.add(Request(text, params, request_id="r", hold=True))
        while engine.has_work:
            engine.step()
        [answer] = engine.take_finished()
        assert answer.outputs[0].token_ids == list(range(100, 101 + length))
        [idle] = engine.scheduler.idle.idle.values()
        more = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        token_ids = [*text, *answer.outputs[0].token_ids]
        engine.add(Request(token_ids, more, request_id="s", parent=idle))
        while engine.has_work:
            engine.step()
        [after] = engine.take_finished()
        assert after.outputs[0].token_ids == list(range(101 + length, 121 + length))


def test_a_nan_ends_the_request_alone(counting: Llama) -> None:
    """A row of guesses that is NaN behind a wrong guess matters to nobody; one that counts ends the request."""
    text = [*range(100, 160), 99]
    engine, _ = guessing(counting, num_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add(Request(text, params, request_id="r"))
    for _ in range(6):
        engine.step()
    with torch.inference_mode():
        engine.runner.model.norm.fill_(float("nan"))
    try:
        while engine.has_work:
            engine.step()
    finally:
        with torch.inference_mode():
            engine.runner.model.norm.fill_(1.0)
    [answer] = engine.take_finished()
    assert answer.error is not None
    assert "NaN" in answer.error
    assert engine.cache.num_free == engine.cache.num_blocks
