"""Test ``prompt_logprobs``, the log-probabilities of a prompt's tokens, against transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.cache_checks import check, check_swap
from lib.engine import engine_for, run
from lib.examples import examples
from lib.models import DEVICE, hf_model, ours
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.requests import Request
from minillm.errors import UsageError
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner import scores

VOCAB = 97
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
PARAMS: list[Any] = [
    SCORE,
    SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0),
    SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=VOCAB - 40, logprobs=2),
    SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=5, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=9),
]
THEIRS: list[Any] = []


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    theirs = hf_model(seed=3, vocab_size=VOCAB, max_position_embeddings=256).to(DEVICE)
    return theirs, ours(theirs)


def expected(theirs: Any, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities ``[tokens - 1, vocab]`` of the next token after each token but the last."""
    with torch.inference_mode():
        return theirs(torch.tensor([prompt], device=DEVICE)).logits[0, :-1].float().log_softmax(-1).cpu()


def compare(theirs: Any, prompt: list[int], params: Any, output: RequestOutput, first: int = 1) -> None:
    assert output.error is None
    found = output.prompt_logprobs
    if params.prompt_logprobs is None:
        assert found is None
        return
    assert found is not None
    assert len(found) == len(prompt)
    assert found[:first] == [None] * min(first, len(prompt))
    for i, row in enumerate(expected(theirs, prompt), 1):
        if i < first:
            continue
        each = found[i]
        assert each is not None
        assert each.token_id == prompt[i]
        assert each.logprob == pytest.approx(row[prompt[i]].item(), abs=1e-4)
        # Rounding may change places with tokens that are as probable within 1e-4.
        assert (row > each.logprob + 1e-4).sum() < each.rank <= (row > each.logprob - 1e-4).sum() + 1
        assert len(each.top) == params.prompt_logprobs
        assert len({token_id for token_id, _ in each.top}) == len(each.top)
        best = row.topk(max(1, len(each.top))).values.tolist()
        assert [value for _, value in each.top] == pytest.approx(best[: len(each.top)], abs=1e-4)
        assert [row[token_id].item() for token_id, _ in each.top] == pytest.approx(best[: len(each.top)], abs=1e-4)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("piece", [1, 5 * VOCAB, 1 << 24])
def test_they_are_those_of_transformers(
    models: tuple[Any, Any], on_device: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score in chunks of a prompt and pieces of a chunk of any size, batched with decoding requests."""
    monkeypatch.setattr(scores, "_PIECE", piece)
    theirs, model = models
    rng = random.Random(1)
    requests = [([rng.randrange(3, VOCAB) for _ in range(n)], params) for params in PARAMS for n in (1, 2, 5, 41, 90)]
    engine = engine_for(model, num_blocks=400, on_device=on_device, max_num_batched_tokens=70)
    for (prompt, params), output in zip(requests, run(engine, requests), strict=True):
        compare(theirs, prompt, params, output)


@pytest.mark.parametrize("on_device", [False, True])
def test_answers_are_those_without_and_a_prompt_alone_has_an_empty_one(
    models: tuple[Any, Any], on_device: bool
) -> None:
    prompt = [5, 60, 9, 9, 7]
    requests = [(prompt, params) for params in PARAMS]
    plain = [(prompt, type(params)(**{**vars(params), "prompt_logprobs": None})) for params in PARAMS[1:]]
    score, *outputs = run(engine_for(models[1], num_blocks=256, on_device=on_device), requests)
    for output, other in zip(outputs, run(engine_for(models[1], num_blocks=256), plain), strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in other.outputs]
    [empty] = score.outputs
    assert (empty.token_ids, empty.text, empty.finish_reason) == ([], "", "length")
    assert score.finished


def test_the_prefix_cache_gives_nothing_that_is_scored_and_keeps_all(models: tuple[Any, Any]) -> None:
    theirs, model = models
    engine = engine_for(model, num_blocks=64, block_size=4)
    prompt = list(range(5, 35))
    for params, cached in ((PARAMS[5], 0), (SCORE, 0), (PARAMS[1], 0), (PARAMS[5], 28)):
        [output] = run(engine, [(prompt, params)])
        assert output.num_cached_tokens == cached
        compare(theirs, prompt, params, output)
    for first in range(1, 32):
        engine.add_request("x", prompt, SCORE, score_from=first)
        while engine.has_work:
            engine.step()
        [output] = engine.take_finished()
        assert output.num_cached_tokens == min(28, (first - 1) // 4 * 4), "token `first` needs the logits before it"
        compare(theirs, prompt, SCORE, output, first)


def test_a_parent_gives_what_is_not_scored(models: tuple[Any, Any]) -> None:
    theirs, model = models
    driver = Driver(engine_for(model, num_blocks=64, block_size=4, prefix_caching=False))
    prompt = list(range(5, 35))
    [(parent, _)] = idle_sequences.hold(driver, [Request(prompt, SCORE, hold=True)])
    for first in (1, 2, 18, 29, 30):
        longer = [*prompt[:29], 70, 71, 72]
        [(child, output)] = idle_sequences.hold(
            driver, [Request(longer, SCORE, parent=parent, hold=True, score_from=first)]
        )
        assert output.num_cached_tokens == min(29, first - 1)
        compare(theirs, longer, SCORE, output, first)
        idle_sequences.release(driver, child)
    idle_sequences.release(driver, parent)
    check(driver.engine.cache)
    assert driver.engine.cache.num_free == 64


def test_a_prompt_as_long_as_the_context_can_be_scored(models: tuple[Any, Any]) -> None:
    """No token of an answer needs a place: neither in the context nor in the pool."""
    theirs, model = models
    prompt = [3 + i % 90 for i in range(64)]
    engine = engine_for(model, num_blocks=16, block_size=4)
    [output] = run(engine, [(prompt, SCORE)])
    compare(theirs, prompt, SCORE, output)
    with pytest.raises(UsageError, match="the prompt has 65 tokens and the context holds 64; shorten the prompt"):
        engine.add_request("a", [*prompt, 5], SCORE)
    with pytest.raises(UsageError, match="holds 64, one of them for the answer"):
        engine.add_request("b", prompt, PARAMS[1])


def test_logits_are_of_the_scored_rows_alone_and_few_at_a_time(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "_PIECE", 5 * VOCAB + 3)
    sizes: list[int] = []
    original = Llama.logits

    def noted(self: Llama, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(len(x))
        return original(self, x, out)

    monkeypatch.setattr(Llama, "logits", noted)
    engine = engine_for(models[1], on_device=False, max_num_batched_tokens=64)
    run(engine, [(list(range(5, 45)), SCORE)])
    assert max(sizes) == 5
    assert sum(sizes) == 39 + 1, "one row for each token but the last, and that one's"


@pytest.mark.parametrize("host_blocks", [0, 60])
@pytest.mark.parametrize("on_device", [False, True])
def test_preemption_changes_none(models: tuple[Any, Any], host_blocks: int, on_device: bool) -> None:
    theirs, model = models
    rng = random.Random(5)
    requests = [([rng.randrange(3, VOCAB) for _ in range(rng.randint(9, 40))], PARAMS[n % 6]) for n in range(24)]
    engine = engine_for(
        model, num_blocks=30, max_num_seqs=8, max_num_batched_tokens=16, host_blocks=host_blocks, on_device=on_device,
        admission="optimistic",
    )  # fmt: skip
    for (prompt, params), output in zip(requests, run(engine, requests), strict=True):
        compare(theirs, prompt, params, output)
    stats = engine.figures.cache_stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in > 0) == (host_blocks > 0)


def test_nan_ends_the_request_alone(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = scores._score_rows

    def broken(logits: torch.Tensor, targets: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
        return original(logits.masked_fill((targets == 13)[:, None], float("nan")), targets, most)

    monkeypatch.setattr(scores, "_score_rows", broken)
    engine = engine_for(models[1])
    fine, failed = run(engine, [([5, 9, 12], SCORE), ([5, 13, 9], SCORE)])
    assert fine.error is None
    assert failed.error is not None
    assert "NaN" in failed.error
    assert engine.cache.num_cached == 0, "nobody may find its blocks"


def test_wrong_values_are_refused() -> None:
    with pytest.raises(UsageError, match="max_tokens must be at least 1; 0 is for prompt_logprobs"):
        SamplingParams(max_tokens=0)
    with pytest.raises(UsageError, match="n must be 1 where max_tokens is 0, not 2"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
    with pytest.raises(UsageError, match="max_tokens must be at least 1 for beams"):
        BeamSearchParams(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(UsageError, match="reasoning_depths need max_tokens of at least 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, max_reasoning_tokens=8, reasoning_depths=[4])


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_mix_in_a_pool_that_is_too_small(data: st.DataObject) -> None:
    """Preempt by swap and by recompute, and abort at any step: log-probabilities and bookkeeping are right."""
    if not THEIRS:
        THEIRS.append(hf_model(seed=3, vocab_size=VOCAB, max_position_embeddings=256).to(DEVICE))
        THEIRS.append(ours(THEIRS[0]))
    theirs, model = THEIRS
    engine = engine_for(
        model, num_blocks=data.draw(st.sampled_from([24, 30])), max_num_seqs=8, admission="optimistic",
        max_num_batched_tokens=data.draw(st.sampled_from([8, 16])), host_blocks=data.draw(st.sampled_from([0, 40])),
        on_device=data.draw(st.booleans()),
    )  # fmt: skip
    prompts = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=30)
    requests = data.draw(st.lists(st.tuples(st.integers(0, 30), prompts, st.sampled_from(PARAMS)), max_size=8))
    aborts = data.draw(st.dictionaries(st.integers(0, 20), st.integers(0, 7), max_size=3))
    whole = {}
    for number, (shared, own, params) in enumerate(requests):
        whole[str(number)] = [*range(40, 40 + shared), *own][:60], params
        engine.add_request(str(number), *whole[str(number)])
    step = 0
    while engine.has_work:
        if step in aborts:
            engine.abort(str(aborts[step]))
        step += 1
        engine.step()
        check(engine.cache)
        check_swap(engine.scheduler.preemption.swap)
        for output in engine.take_finished():
            prompt, params = whole.pop(output.request_id)
            if any(completion.finish_reason != "abort" for completion in output.outputs):
                compare(theirs, prompt, params, output)
    assert not whole
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert (swap := engine.scheduler.preemption.swap).num_free == swap.num_blocks, "host blocks leaked"
