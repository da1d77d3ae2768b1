"""``bad_words``: runs of tokens that are never generated, against transformers' ``bad_words_ids``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model, ours
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import BeamSearchParams, SamplingParams


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    theirs = hf_model(seed=3, vocab_size=97, max_position_embeddings=256).to(DEVICE)
    return theirs, ours(theirs)


def greedy(theirs: Any, prompt: list[int], bad: list[list[int]]) -> list[int]:
    ids = theirs.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0,
        bad_words_ids=bad or None,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("on_device", [False, True])
def test_greedy_tokens_are_those_of_transformers(models: tuple[Any, Any], on_device: bool) -> None:
    """Runs of one to three tokens, taken from the text generated without a ban, and one that the prompt begins."""
    theirs, model = models
    rng = random.Random(2)
    requests: list[tuple[list[int], Any]] = []
    unbanned = []
    for _ in range(8):
        # Two tokens or more: some versions of transformers ignore banned runs longer than the prompt.
        prompt = [rng.randrange(3, 97) for _ in range(rng.randint(2, 9))]
        plain = greedy(theirs, prompt, [])
        bad = [plain[at : at + length] for length in (1, 2, 3) for at in [rng.randrange(17)]]
        bad.append([prompt[-1], plain[0]])
        requests.append((prompt, SamplingParams(temperature=0, max_tokens=20, bad_words=bad)))
        unbanned.append(plain)
    outputs = run(engine_for(model, num_blocks=256, on_device=on_device), requests)
    for (prompt, params), plain, output in zip(requests, unbanned, outputs, strict=True):
        bad = [list(word) for word in params.bad_words]
        assert output.outputs[0].token_ids == greedy(theirs, prompt, bad)
        assert output.outputs[0].token_ids != plain


def test_beams_never_say_them(models: tuple[Any, Any]) -> None:
    theirs, model = models
    prompt = [5, 9, 60]
    [plain] = run(engine_for(model, num_blocks=256), [(prompt, BeamSearchParams(beam_width=4, max_tokens=12))])
    bad = [plain.outputs[0].token_ids[3:5], plain.outputs[1].token_ids[:1]]
    params = BeamSearchParams(beam_width=4, max_tokens=12, bad_words=bad)
    [output] = run(engine_for(model, num_blocks=256), [(prompt, params)])
    result = theirs.generate(
        torch.tensor([prompt], device=DEVICE), num_beams=4, num_return_sequences=4, max_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0, bad_words_ids=bad,
    )  # fmt: skip
    assert [beam.token_ids for beam in output.outputs] == [each[len(prompt) :].tolist() for each in result]


def test_text_is_banned_at_the_start_of_a_line_and_within_one(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = llm.generate("hello", params)[0].text
    word = text[5:7].strip() or text[7:9].strip()
    ids = llm.tokenizer.encode(word, add_special_tokens=False)
    banned = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[word])
    said = llm.generate("hello", banned)[0].outputs[0].token_ids
    assert all(said[i : i + len(ids)] != ids for i in range(len(said)))
    beams = BeamSearchParams(beam_width=3, max_tokens=12, bad_words=[word])
    for beam in llm.beam_search("hello", beams)[0].outputs:
        assert all(beam.token_ids[i : i + len(ids)] != ids for i in range(12))


@pytest.mark.parametrize("word", ["\n", " ", "\n\n", " \t"])
def test_white_space_is_banned_as_it_stands(tiny_model: Path, word: str) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64)
    ids = llm.tokenizer.encode(word, add_special_tokens=False)
    params = SamplingParams(max_tokens=20, temperature=0, bad_words=[word], logit_bias=dict.fromkeys(ids, 50.0))
    tokens = llm.generate(["one"], params)[0].outputs[0].token_ids
    assert len(tokens) == 20
    assert not any(tokens[at : at + len(ids)] == ids for at in range(20))


def test_ids_beyond_the_vocabulary_and_text_without_a_tokenizer_are_refused(models: tuple[Any, Any]) -> None:
    engine = engine_for(models[1])
    with pytest.raises(UsageError, match="bad_words: token id 97 is not below the vocabulary's size 97"):
        engine.add_request("a", [5], SamplingParams(bad_words=[[5, 97]]))
    with pytest.raises(UsageError, match="bad_words: this model has no tokenizer"):
        engine.add_request("b", [5], SamplingParams(bad_words=["x"]))
    for params in (SamplingParams(stop="x"), BeamSearchParams(stop="x")):
        with pytest.raises(UsageError, match="stop: this model has no tokenizer; give stop_token_ids"):
            engine.add_request("c", [5], params)


def test_more_beams_than_allowed_tokens_give_no_impossible_beam(models: tuple[Any, Any]) -> None:
    """Three tokens are allowed at each step: the first beams are three, and none has a probability of zero."""
    bad = [[token_id] for token_id in range(97) if token_id not in (5, 6, 7)]
    params = BeamSearchParams(beam_width=8, max_tokens=4, min_tokens=3, bad_words=bad)
    [output] = run(engine_for(models[1], num_blocks=256, eos=frozenset([2])), [([9, 10], params)])
    assert len(output.outputs) == 8
    assert all(beam.score is not None and beam.score > float("-inf") for beam in output.outputs)
    assert all(set(beam.token_ids) <= {5, 6, 7} and len(beam.token_ids) == 4 for beam in output.outputs)
    short = BeamSearchParams(beam_width=8, max_tokens=1, bad_words=bad)
    [output] = run(engine_for(models[1], num_blocks=256), [([9, 10], short)])
    assert {tuple(beam.token_ids) for beam in output.outputs} == {(5,), (6,), (7,)}
