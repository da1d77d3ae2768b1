"""The most probable tokens of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.kernels import DEVICE, randn
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.sampling import top_k


@pytest.mark.parametrize(
    ("vocab", "count"), [(1, 1), (50, 50), (300, 16), (5000, 7), (6000, 16), (6000, 17), (6000, 200)]
)
def test_top_log_probabilities(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(3, vocab, generator=generator) * 3
    for logits in (normal, normal - 20, normal.round(), normal * 0, torch.where(normal > 0, normal, float("-inf"))):
        logits = logits.to(DEVICE)
        if not bool(torch.isfinite(logits).any(-1).all()):
            continue
        logprobs, ids = top_k.top_log_probabilities(logits, count)
        exact, exact_ids = reference.top_log_probabilities(logits.double(), count)
        finite = torch.isfinite(exact)
        assert torch.equal(ids[finite], exact_ids[finite])
        assert (logprobs[finite] - exact[finite]).abs().max() < 1e-4
    if vocab > 32 * count and count <= 16:  # NaN makes a row's log-probabilities NaN, and its ids are tokens still
        normal[0, vocab // 2] = float("nan")
        logprobs, ids = top_k.top_log_probabilities(normal.to(DEVICE), count)
        assert logprobs[0].isnan().all()
        assert not logprobs[1:].isnan().any()
        assert ((ids >= 0) & (ids < vocab)).all()
    assert top_k.top_log_probabilities(normal[:0].to(DEVICE), count)[0].shape == (0, count)


BAD: list[tuple[str, Any]] = [
    ("count", lambda: top_k.top_log_probabilities(randn(2, 8), 9)),
    ("count", lambda: top_k.top_log_probabilities(randn(2, 800), 0)),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
