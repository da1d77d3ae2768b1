"""Beam search: cases, prompts, and the sequences and scores of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lib.models import DEVICE, hf_model, ours
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams

EOS = 2


def beam_models() -> tuple[Any, Any]:
    """Return a transformers model, and a model of ours with the same weights."""
    theirs = hf_model(seed=3, vocab_size=97, max_position_embeddings=256).to(DEVICE)
    # End-of-sequence must come up now and then, or the end of searches is not tested.
    with torch.no_grad():
        theirs.lm_head.weight[EOS] *= 1.5
    return theirs, ours(theirs)


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def expected(
    theirs: Any, prompt: list[int], params: BeamSearchParams, eos: list[int], *, use_cache: bool = True
) -> tuple[list[list[int]], list]:
    result = theirs.generate(
        torch.tensor([prompt], device=DEVICE),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=DEVICE),
        num_beams=params.beam_width,
        num_return_sequences=params.n or params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        eos_token_id=eos or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [sequence[len(prompt) :].tolist() for sequence in result.sequences]
    return [strip(sequence, eos) for sequence in sequences], result.sequences_scores.tolist()


def strip(tokens: list[int], eos: list[int]) -> list[int]:
    """Remove the padding after the end."""
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def assert_same(output: RequestOutput, sequences: list[list[int]], scores: list[float]) -> None:
    assert [completion.token_ids for completion in output.outputs] == sequences
    assert [completion.score for completion in output.outputs] == pytest.approx(scores, abs=1e-3)


ENDINGS: list[tuple[int, float, bool | str]] = [
    (2, 1.0, False),
    (2, 0.0, True),
    (3, 2.0, "never"),
    (4, 1.0, True),
    (4, 0.5, "never"),
    (4, -1.0, False),
    (4, -0.5, "never"),
    (8, 1.0, False),
    (8, 0.0, "never"),
    (16, 1.0, True),
    (16, 2.0, False),
]

CASES = [
    BeamSearchParams(beam_width=width, length_penalty=penalty, early_stopping=early, max_tokens=12)
    for width, penalty, early in ENDINGS
] + [
    BeamSearchParams(beam_width=4, n=2, max_tokens=9, repetition_penalty=1.3),
    BeamSearchParams(beam_width=3, max_tokens=14, min_tokens=6, length_penalty=0.5),
    BeamSearchParams(beam_width=4, max_tokens=16, no_repeat_ngram_size=2),
    BeamSearchParams(beam_width=4, max_tokens=1),
]
