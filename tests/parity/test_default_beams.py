"""Beam search on the real default weights, float32, against transformers' ``generate``: 40 cases.

Widths 2, 4, 8, 16, length penalties 0, 0.5, 1, 2, the three ways of early stopping, one or several returned sequences.
All run in ``make parity``, two of them in ``make test``.

transformers runs in float32 as we do; where it disagrees, it is asked again in float64. That happens once (case 15,
width 16): two beams lie so close at one step that its float32 drops the one that its float64, and ours, keep.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, BeamSearchParams

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
NAMES = ("one-token", "code-python", "french", "emoji", "chat-question")
IN_TEST = (7, 34)
NEAR_TIES = (15,)

pytestmark = pytest.mark.weights


def settings() -> list[BeamSearchParams]:
    """Return every width with every length penalty, then all kinds of early stopping at widths 4 and 8."""
    endings: tuple[bool | str, ...] = (False, True, "never")
    turn = itertools.cycle(endings)
    found = [
        BeamSearchParams(beam_width=width, length_penalty=penalty, early_stopping=next(turn), max_tokens=20)
        for width in (2, 4, 8, 16)
        for penalty in (0.0, 0.5, 1.0, 2.0)
    ]
    for number, (width, penalty, ending) in enumerate(itertools.product((4, 8), (0.0, 0.5, 1.0, 2.0), endings)):
        n = (1, 2, width)[number % 3]
        found.append(
            BeamSearchParams(beam_width=width, n=n, length_penalty=penalty, early_stopping=ending, max_tokens=24)
        )
    return found


CASES = settings()


def test_there_are_forty_cases() -> None:
    assert len(CASES) == 40
    assert {case.beam_width for case in CASES} == {2, 4, 8, 16}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in IN_TEST else [pytest.mark.parity]) for n in range(len(CASES))]
)
@torch.no_grad()
def test_the_same_beams_and_scores(llm: LLM, theirs: Any, number: int) -> None:
    params = CASES[number]
    prompt = next(prompt for prompt in PROMPTS if prompt["name"] == NAMES[number % len(NAMES)])
    messages = prompt.get("messages")
    ids = llm.tokenizer.apply_chat_template(messages) if messages else llm.tokenizer.encode(prompt["prompt"])
    beams = llm.beam_search(ids, params)[0].outputs
    tokens = [beam.token_ids for beam in beams]
    sequences, scores = generated(theirs, ids, params, sorted(llm.engine.requests.eos_token_ids))
    if tokens != sequences:
        assert number in NEAR_TIES
        sequences, scores = generated(theirs.double(), ids, params, sorted(llm.engine.requests.eos_token_ids))
        theirs.float()
    assert tokens == sequences
    difference = max(abs((beam.score or 0) - score) for beam, score in zip(beams, scores, strict=True))
    print(f"width {params.beam_width}: largest difference of a score {difference:.1e}")
    assert difference <= 1e-3


def generated(
    theirs: Any, ids: list[int], params: BeamSearchParams, eos: list[int]
) -> tuple[list[list[int]], list[float]]:
    """transformers' beams, without the padding after their ends, and their scores."""
    expected = theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        num_beams=params.beam_width,
        num_return_sequences=params.n or params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos,
        pad_token_id=eos[0],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for sequence in expected.sequences[:, len(ids) :].tolist():
        ends = [i for i, token in enumerate(sequence) if token in eos]
        sequences.append(sequence[: ends[0] + 1] if ends else sequence)
    return sequences, expected.sequences_scores.tolist()
