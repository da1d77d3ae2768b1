"""Masks of logits against a loop over their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib.models import DEVICE
from minillm.runner.masks import Masks


@pytest.mark.parametrize("vocab", [31, 32, 33, 640, 1000])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [0, 2], []])
def test_only_allowed_tokens_of_masked_rows_stay(vocab: int, rows: list[int]) -> None:
    rng = np.random.default_rng(vocab)
    words = rng.integers(0, 1 << 32, (len(rows), vocab // 32 + 1), dtype=np.uint32)
    before = torch.randn(3, vocab)
    before[:, 0] = float("nan")  # stays, for the sampler to find
    logits = before.to(DEVICE)
    Masks(rows, torch.from_numpy(words.view(np.int32)), []).apply(logits)
    expected = before.clone()
    for number, row in enumerate(rows):
        for token_id in range(vocab):
            if token_id and not int(words[number, token_id // 32]) >> (token_id % 32) & 1:
                expected[row, token_id] = float("-inf")
    assert torch.equal(logits.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
