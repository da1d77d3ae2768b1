"""Masks of logits: all implementations against a loop over the bits."""

from __future__ import annotations

import pytest
import torch

from lib.kernels import DEVICE, DTYPES, ON_GPU, randn
from minillm.kernels import cpu, reference

pytest.importorskip("triton")
from minillm.kernels.sampling import masks


@pytest.mark.parametrize("implementation", [reference, masks, *([] if ON_GPU else [cpu])])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [31, 32, 97, 4200 if ON_GPU else 330])
@pytest.mark.parametrize("in_place", [False, True])
def test_only_tokens_whose_bits_are_set_stay(
    implementation: object, dtype: torch.dtype, vocab: int, in_place: bool
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    shape = (3, vocab // 32 + 1)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    places = [2, -1, 0, 2]
    wide = randn(4, vocab + 7, dtype=dtype)
    logits = wide[:, :vocab]  # rows may lie apart
    logits[1, 3], logits[2, 5] = float("nan"), float("-inf")
    logits[0] = torch.where(torch.arange(vocab, device=DEVICE) % 5 == 2, float("nan"), logits[0])
    before, beyond = logits.clone(), wide[:, vocab:].clone()
    out = logits if in_place else torch.full((4, vocab), 7.0, dtype=dtype, device=DEVICE)
    at = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    implementation.mask_logits(logits, at, words.to(DEVICE), out)  # type: ignore[attr-defined]
    expected = before.cpu()
    for row, place in enumerate(places):
        for token_id in range(vocab):
            banned = place >= 0 and not int(words[place, token_id // 32]) >> (token_id % 32) & 1
            if banned and not expected[row, token_id].isnan():
                expected[row, token_id] = float("-inf")
    assert torch.equal(out.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(wide[:, vocab:], beyond), "nothing is written beyond the rows"
