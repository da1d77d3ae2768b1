"""`LLM.score` and `LLM.perplexity`, against transformers on the same weights."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.cache_checks import check
from lib.models import write_sentencepiece_model
from minillm import LLM, SamplingParams
from minillm.errors import MinillmError, UsageError
from minillm.scoring import Score, _windows

TEXT = "the cat sat on the mat, and the hat was on the cat; nobody knows why. "


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", dtype="float32", block_size=4, num_blocks=256, max_model_len=160)


@pytest.fixture(autouse=True)
def balanced(llm: LLM) -> Any:
    yield
    check(llm.engine.cache)
    assert llm.cache_stats().free_blocks == llm.cache_stats().num_blocks, "blocks leaked"
    assert not llm.engine.requests.groups
    assert not llm.engine.requests.finished


def logprobs(theirs: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first."""
    with torch.inference_mode():
        rows = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [rows[i - 1, ids[i]].item() for i in range(1, len(ids))]


def test_prompts_are_scored_as_by_transformers(llm: LLM, theirs: Any) -> None:
    prompts: list[Any] = ["hello world", TEXT, [5, 600, 7, 7], "a", [5]]
    scores = llm.score(prompts, top=2)
    assert [type(score) for score in scores] == [Score] * 5
    for prompt, score in zip(prompts, scores, strict=True):
        ids = llm.token_ids(prompt)
        expected = logprobs(theirs, ids)
        assert score.token_ids == ids
        assert [token.token_id for token in score.tokens] == ids[1:]
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.total == pytest.approx(sum(expected), abs=1e-3)
        assert all(len(token.top) == 2 for token in score.tokens)
        if expected:
            assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert math.isnan(scores[4].perplexity)
    assert scores[4].total == 0


def test_continuations_are_scored_behind_their_prompt_and_share_its_blocks(llm: LLM, theirs: Any) -> None:
    llm.reset_prefix_cache()
    prompt = TEXT
    continuations: list[Any] = [" yes", " no", " perhaps it was the dog", [7]]
    before = llm.engine.cache.num_hit_tokens
    scores = llm.score(prompt, continuations)
    ids = llm.token_ids(prompt)
    for continuation, score in zip(continuations, scores, strict=True):
        more = [7] if continuation == [7] else llm.tokenizer.encode(continuation, add_special_tokens=False)
        assert score.token_ids == ids + more
        assert score.logprobs == pytest.approx(logprobs(theirs, ids + more)[len(ids) - 1 :], abs=1e-4)
    shared = (len(ids) - 1) // 4 * 4
    assert llm.engine.cache.num_hit_tokens - before == 3 * shared, "the first computes the prompt, the others find it"
    pairs = llm.score([TEXT, "hello"], [" yes", " world"])
    assert pairs[0].total == pytest.approx(scores[0].total, abs=1e-4)
    assert [score.total for score in llm.score("hello", [" world"])] == pytest.approx([pairs[1].total], abs=1e-4)


@pytest.mark.parametrize("stride", [None, 1, 37, 80, 159])
@pytest.mark.parametrize("count", [2, 160, 161, 401])
def test_perplexity_is_that_of_a_sliding_window(llm: LLM, theirs: Any, stride: int | None, count: int) -> None:
    """Compute it as in the documentation of transformers, one window after another."""
    rng = random.Random(count)
    ids = [rng.randrange(3, 640) for _ in range(count)]
    if stride == 1:
        del ids[190:]
    total, done = 0.0, 1
    for first in range(0, len(ids), stride or 80):
        end = min(first + 160, len(ids))
        total += sum(logprobs(theirs, ids[first:end])[-(end - done) :])
        done = end
        if end == len(ids):
            break
    assert llm.perplexity(ids, stride=stride) == pytest.approx(math.exp(-total / (len(ids) - 1)), rel=1e-4)


def test_a_text_may_be_longer_than_the_context(llm: LLM) -> None:
    text = TEXT * 40
    ids = llm.tokenizer.encode(text)
    assert len(ids) > 3 * 160
    assert llm.perplexity(text) == pytest.approx(llm.perplexity(ids), rel=1e-6)
    with pytest.raises(UsageError, match="the prompt has"):
        llm.score(text)


@given(count=st.integers(0, 60), size=st.integers(2, 20), data=st.data())
def test_windows_score_every_token_once(count: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, size - 1))
    scored: list[int] = []
    for number, (first, begin, end) in enumerate(_windows(count, size, stride)):
        assert first == number * stride
        assert first < begin < end <= min(first + size, count)
        assert begin - first >= (size - stride if number else 1), "so many tokens stand before each"
        scored += range(begin, end)
    assert scored == list(range(1, count))


def test_what_is_wrong_is_said_in_a_line(llm: LLM) -> None:
    for stride in (0, 160, -1, 1.5, True):
        with pytest.raises(UsageError, match=r"stride must be from 1 to 159 \(max_model_len - 1\)"):
            llm.perplexity(TEXT, stride=stride)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least two tokens, and the text has 1"):
        llm.perplexity([5])
    with pytest.raises(UsageError, match="token id 640 in the prompt"):
        llm.perplexity([5, 640])
    with pytest.raises(UsageError, match="prompt 1: the prompt is empty"):
        llm.score([[5], []])
    with pytest.raises(UsageError, match="continuation 1 is empty"):
        llm.score("hello", [" a", ""])
    with pytest.raises(UsageError, match="2 continuations for 3 prompts"):
        llm.score(["a", "b", "c"], ["x", "y"])
    with pytest.raises(UsageError, match="top must be from 0 to 64, not 65"):
        llm.score("hello", top=65)
    with llm.branch("hello") as branch, pytest.raises(UsageError, match=r"use LLM\.score"):
        branch.sample(SamplingParams(prompt_logprobs=0))


def test_a_score_that_fails_raises_and_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.runner import scores

    monkeypatch.setattr(scores, "_score_rows", lambda logits, *rest: (logits[:, 0] * float("nan"), logits[:, 0]))
    llm.reset_prefix_cache()
    with pytest.raises(MinillmError, match="prompt 0: the model produced NaN"):
        llm.score(["hello there", "hello you"])


@pytest.mark.weights
def test_a_true_sentence_is_the_more_probable_one() -> None:
    llm = LLM("smollm2-135m", device="cpu", num_blocks=256)
    cities = llm.score("The capital of France is", [" Paris", " Berlin", " potato"])
    assert [city.total for city in cities] == sorted((city.total for city in cities), reverse=True)
    assert cities[0].tokens[0].rank <= 3
    assert llm.perplexity("The sun rises in the east and sets in the west.") < 30


def test_a_continuation_of_sentencepiece_text_has_no_second_space(tmp_path: Path) -> None:
    llm = LLM(str(write_sentencepiece_model(tmp_path)), device="cpu", num_blocks=64)
    bare = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bare.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    [score] = llm.score("the quick", [" brown"])
    assert score.token_ids == llm.token_ids("the quick") + bare.encode(" brown", add_special_tokens=False).ids
    [whole] = llm.score([score.token_ids])
    assert score.logprobs == pytest.approx(whole.logprobs[-len(score.logprobs) :], abs=1e-4)
    assert llm.score([[1]], ["the quick"])[0].token_ids == llm.token_ids("the quick"), "after BOS a text begins"
