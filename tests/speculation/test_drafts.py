"""Test draft models: their K and V belong to the right tokens after any change of the blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.engine import engine_for, run
from lib.models import hf_model, noisy, ours
from lib.speculation import facts, guesses_of
from minillm.engine.engine import Engine
from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama
from minillm.params import SamplingParams
from minillm.runner.observers import StepObserver
from minillm.runner.step import StepWork
from minillm.speculation import drafter as drafting
from minillm.speculation.draft_length import DraftCosts, ModelDraftLength
from minillm.speculation.drafter import MOST_SEQS, Drafter

WORDS = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


@pytest.fixture(scope="module")
def draft() -> Llama:
    """Return a draft model that mostly agrees with the model."""
    return noisy(hf_model(), 0.05)


@pytest.fixture(scope="module")
def stranger() -> Llama:
    """Return a draft model that agrees with the model only by chance."""
    return ours(hf_model(seed=9, num_hidden_layers=1, hidden_size=24, num_attention_heads=2, num_key_value_heads=1))


class Seen(StepObserver):
    """The steps of a runner."""

    def __init__(self, engine: Engine, *, draft: bool = True) -> None:
        self.works: list[StepWork] = []
        (drafter_of(engine).runner if draft else engine.runner).observers.append(self)

    def begin(self, work: StepWork) -> None:
        self.works.append(work)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.works)


def drafter_of(engine: Engine) -> Drafter:
    drafter = drafting.drafter_of(engine.runner)
    assert drafter is not None
    return drafter


def kv_of(model: Llama, token_ids: list[int]) -> Tensor:
    """K and V of tokens, computed alone: ``[layers, 2, tokens, heads, head_dim]``."""
    n = len(token_ids)
    cache = new_kv_cache(model, 1, 1 << (n - 1).bit_length())
    numbers = torch.arange(n, device=model.device)
    batch = Batch(
        torch.tensor(token_ids, device=model.device), numbers, numbers,
        torch.zeros(1, 1, dtype=torch.int32, device=model.device),
        torch.tensor([n], dtype=torch.int32, device=model.device), 0,
        torch.tensor([0, n], dtype=torch.int32, device=model.device),
    )  # fmt: skip
    with torch.inference_mode():
        model.forward(batch, cache)
    return cache.values[:, :, 0, :n]


def assert_known_is_right(engine: Engine) -> int:
    """Check that the draft model has the K and V that its bookkeeping claims. Return their number of tokens."""
    drafter, found = drafter_of(engine), 0
    size, cache = drafter.runner.block_size, drafter.runner.kv_cache.values
    for group in engine.scheduler.running:
        for sequence in group.sequences:
            if sequence.table is not None:
                known = min(drafter._drafted.length(sequence.blocks), sequence.num_computed, len(sequence.token_ids))
                if known:
                    expected = kv_of(drafter.runner.model, sequence.token_ids[:known])
                    at = torch.arange(known, device=cache.device)
                    blocks = torch.tensor(sequence.blocks, device=cache.device)[at // size]
                    assert torch.allclose(cache[:, :, blocks, at % size], expected, atol=1e-3, rtol=1e-3)
                found += known
    return found


def some_requests(rng: random.Random, names: str) -> dict[str, tuple[list[int], SamplingParams]]:
    """Requests that begin alike, so that they find each other's blocks."""
    requests = {}
    for name in names:
        prompt = [each for _ in range(rng.randint(1, 5)) for each in WORDS[rng.randrange(2)]]
        params = SamplingParams(
            temperature=rng.choice((0, 0.7)), seed=rng.randrange(99), n=rng.choice((1, 2)),
            max_tokens=rng.randint(1, 30), ignore_eos=True,
        )  # fmt: skip
        requests[name] = prompt, params
    return requests


@pytest.mark.parametrize(("on_device", "block_size"), [(False, 1), (True, 4)])
def test_what_is_known_of_a_draft_is_so(model: Llama, draft: Llama, block_size: int, on_device: bool) -> None:
    """Check after every step of random requests that fork, abort, hit the cache, and are preempted in both ways."""
    rng = random.Random(block_size)
    found = preempted = swapped = hits = right = 0
    pairs: list[tuple[Any, Any]] = []
    for _ in range(9):
        requests = some_requests(rng, "abcdef")
        engine = engine_for(
            model, draft=draft, on_device=on_device, block_size=block_size,
            num_blocks={1: 86, 4: 24}[block_size],
            host_blocks=rng.choice((0, 64)), admission="optimistic", max_num_seqs=12,
            max_num_batched_tokens=rng.choice((12, 64)),
        )  # fmt: skip
        aborted = rng.choice("abcdef")
        outputs = {}
        for number, (name, request) in enumerate(requests.items()):
            engine.add_request(name, *request)
            for _ in range(rng.randint(0, 3)):
                engine.step()
                found += assert_known_is_right(engine)
            if number == 4:
                engine.abort(aborted)
        while engine.has_work:
            engine.step()
            found += assert_known_is_right(engine)
        outputs = {output.request_id: output for output in engine.take_finished()}
        pairs += [(request, outputs[name]) for name, request in requests.items() if name != aborted]
        preempted += engine.scheduler.preemption.count
        swapped += engine.scheduler.preemption.swap.num_swapped_in
        hits += engine.cache.num_hit_tokens
        right += guesses_of(engine).num_accepted
    plain = run(engine_for(model, num_blocks=2048, block_size=block_size), [request for request, _ in pairs])
    assert [facts(output) for _, output in pairs] == [facts(output) for output in plain]
    assert min(preempted, swapped, hits) > 0
    assert right > 60
    assert found > 600


def test_a_cached_prefix_is_not_drafted_again(model: Llama, draft: Llama) -> None:
    """A second turn: the draft model computes what is new, as the model does."""
    engine = engine_for(model, draft=draft, num_blocks=256)
    seen = Seen(engine)
    prompt = [each for _ in range(8) for each in WORDS[0]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = run(engine, [(prompt, params)])[0].outputs[0].token_ids
    assert seen.num_tokens >= len(prompt)
    del seen.works[:]
    run(engine, [([*prompt, *first, *WORDS[1]], params)])
    prompts = sum(len(chunk.token_ids) for work in seen.works for chunk in work.chunks if work.num_decodes == 0)
    assert prompts < 12, "the last block of each, and the new word"


def test_a_draft_model_that_is_wrong_is_soon_left_alone(model: Llama, stranger: Llama) -> None:
    engine = engine_for(model, draft=stranger, num_blocks=256)
    seen = Seen(engine)
    run(engine, [(WORDS[0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))])
    guesses = guesses_of(engine)
    assert 0 < guesses.num_drafted < 60
    assert guesses.num_accepted <= 3
    assert seen.num_tokens < 240, "each token once at most, and the guesses"
    assert engine.figures.num_steps >= 200 - guesses.num_accepted


def test_right_guesses_become_many(model: Llama) -> None:
    """The same weights guess right; each step makes as many tokens as it may."""
    engine = engine_for(model, draft=model, num_blocks=256)
    run(engine, [(WORDS[0], SamplingParams(temperature=0.8, seed=1, max_tokens=91, ignore_eos=True))])
    guesses = guesses_of(engine)
    assert guesses.num_accepted == guesses.num_drafted
    assert engine.figures.num_steps <= 14, "1, then 1 + 8 tokens each, and fewer in the beginning"


@pytest.mark.parametrize("budget", [8, 24])
def test_a_long_prompt_is_drafted_in_pieces(model: Llama, draft: Llama, budget: int) -> None:
    """There are no draft tokens before the draft model has seen the prompt, and no step exceeds its limit."""
    prompt = [each for _ in range(20) for each in WORDS[0]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = engine_for(model, draft=draft, num_blocks=256, max_num_batched_tokens=budget, max_num_seqs=4)
    seen = Seen(engine)
    found = run(engine, [(prompt, params)])
    assert facts(found[0]) == facts(run(engine_for(model, num_blocks=256), [(prompt, params)])[0])
    assert max(work.num_tokens for work in seen.works) <= max(budget, 9)
    assert guesses_of(engine).num_accepted > 0


@pytest.mark.parametrize("vocab_size", [60, 130])
def test_another_number_of_ids_does_no_harm(model: Llama, vocab_size: int) -> None:
    """Tokens that only one of the two models has: a padded vocabulary, say."""
    other = ours(hf_model(vocab_size=vocab_size))
    requests: list[tuple[list[int], Any]] = [
        (list(range(96)), SamplingParams(temperature=3.0, seed=seed, max_tokens=40, ignore_eos=True))
        for seed in range(4)
    ]
    engine = engine_for(model, draft=other, num_blocks=256)
    for one, expected in zip(run(engine, requests), run(engine_for(model, num_blocks=256), requests), strict=True):
        assert facts(one) == facts(expected)
    assert guesses_of(engine).num_drafted > 0


def test_nothing_is_guessed_behind_an_end(model: Llama) -> None:
    """The CPU knows each draft token, so it can stop at an end token."""
    params = SamplingParams(temperature=0, max_tokens=30)
    token_ids = run(engine_for(model), [(WORDS[0], params)])[0].outputs[0].token_ids
    end = token_ids[3]
    engine = engine_for(model, draft=model, on_device=False, eos=frozenset({end}))
    [output] = run(engine, [(WORDS[0], params)])
    assert output.outputs[0].token_ids == token_ids[: token_ids.index(end) + 1]
    assert guesses_of(engine).num_drafted == token_ids.index(end)


def test_many_requests_are_not_drafted(model: Llama, draft: Llama) -> None:
    engine = engine_for(model, draft=draft, num_blocks=256)
    seen = Seen(engine)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    run(engine, [(WORDS[0][i:] + WORDS[0][:i], params) for i in range(MOST_SEQS + 1)])
    assert not seen.works


def test_on_the_device_guesses_are_computed_as_if_they_decoded(model: Llama, draft: Llama) -> None:
    """Draft tokens use the path of decode steps with CUDA graphs, in the model and the draft model."""
    engine = engine_for(model, draft=draft, num_blocks=256, on_device=True)
    seen, drafted = Seen(engine, draft=False), Seen(engine)
    requests = [(WORDS[i], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for i in range(3)]
    run(engine, requests)
    verified = [work for work in seen.works if work.num_decodes]
    assert sum(len(chunk.token_ids) > 1 for work in verified for chunk in work.chunks) > 10
    prompts = [work for work in (*seen.works, *drafted.works) if work.chunks and not work.num_decodes]
    assert len(prompts) <= 6, "the prompts"


# --- the pace ---------------------------------------------------------------------------------------------------------


def play(pace: ModelDraftLength, rate: float, steps: int, rng: random.Random) -> tuple[int, int, float]:
    """Steps with draft tokens that are accepted by chance: draft tokens, tokens, and the time in plain steps."""
    guessed, tokens, time = 0, 0, 0.0
    for _ in range(steps):
        count = pace.count if pace.is_due() else 0
        right = 0
        while right < count and rng.random() < rate:
            right += 1
        time += 1 + (pace.costs.step + count * (pace.costs.each + pace.costs.draft) if count else 0)
        guessed, tokens = guessed + count, tokens + right + 1
        if count:
            pace.update(count, right)
    return guessed, tokens, time


@pytest.mark.parametrize("price", [0.1, 0.4])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_pace_is_near_the_best_that_is_known_beforehand(price: float, rate: float) -> None:
    costs = DraftCosts(0.2, 0.02, price)
    _, tokens, time = play(ModelDraftLength(costs), rate, 3000, random.Random(1))
    speeds = [
        sum(rate**i for i in range(count + 1)) / (1 + (costs.step + count * (costs.each + price) if count else 0))
        for count in range(9)
    ]
    assert tokens / time > 0.93 * max(speeds)


def test_what_cannot_pay_is_not_begun() -> None:
    guessed, tokens, time = play(ModelDraftLength(DraftCosts(0.3, 0.12, 0.6)), 1.0, 100, random.Random(0))
    assert (guessed, tokens, time) == (0, 100, 100)


def test_the_pace_recovers() -> None:
    """A request that becomes easy after its first wrong guesses is guessed for again."""
    pace, rng = ModelDraftLength(DraftCosts(0.2, 0.02, 0.2)), random.Random(2)
    play(pace, 0.0, 12, rng)
    guessed, tokens, time = play(pace, 0.95, 400, rng)
    assert guessed > 400
    assert tokens / time > 1.5
