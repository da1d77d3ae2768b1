"""Test penalties by their definitions, on known logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm.outputs import RequestMetrics
from minillm.params import SamplingParams
from minillm.runner.penalties import needs_processing, process_logits
from minillm.sequence import Sequence, SequenceGroup, Stage

PROMPT, OUTPUT = [5, 5, 9], [7, 7, 8]


def processed(logits: list[float], end_ids: tuple[int, ...] = (), **values: Any) -> list[float]:
    """Logits of the token after `PROMPT` and `OUTPUT`, under these parameters."""
    sequence, params = Sequence(0, PROMPT + OUTPUT, len(PROMPT)), SamplingParams(**values)
    group = SequenceGroup(
        "", params, None, 99, [sequence], RequestMetrics(arrival_time=0.0), Stage.SPLIT, end_ids=end_ids,  # type: ignore[arg-type]
    )  # fmt: skip
    result = torch.tensor([logits])
    if needs_processing(group, sequence):
        process_logits(result, [(group, sequence)])
    return result[0].tolist()


def test_repetition_is_of_prompt_and_answer() -> None:
    logits = [1.0] * 9 + [-1.0] * 3
    expected = [1.0] * 5 + [0.5, 1.0, 0.5, 0.5] + [-2.0, -1.0, -1.0]
    assert processed(logits, repetition_penalty=2.0) == expected


def test_frequency_and_presence_are_of_the_answer_alone() -> None:
    assert processed([1.0] * 10, frequency_penalty=0.25) == [1.0] * 7 + [0.5, 0.75, 1.0]
    assert processed([1.0] * 10, presence_penalty=0.25) == [1.0] * 7 + [0.75, 0.75, 1.0]


@pytest.mark.parametrize(("min_tokens", "barred"), [(3, False), (4, True)])
def test_end_tokens_are_barred_until_so_many_are_there(min_tokens: int, barred: bool) -> None:
    expected = float("-inf") if barred else 1.0
    assert processed([1.0] * 10, end_ids=(2,), min_tokens=min_tokens)[2] == expected
