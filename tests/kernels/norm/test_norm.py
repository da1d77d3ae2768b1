"""RMSNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.kernels import DTYPES, ON_GPU, TOLERANCE, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.norm import rms_norm as norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 33), (0, 8), (5, 4096), (2, 8191)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, hidden = shape
    x = randn(rows, hidden + 3, dtype=dtype)[:, :hidden]  # strided rows
    weight = randn(hidden, dtype=dtype)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_error(norm.rms_norm(x, weight, 1e-5), exact) < TOLERANCE[dtype]
    residual = randn(*shape, dtype=dtype)
    exact = reference.norm_add(x.double(), weight.double(), 1e-5, residual.double())
    assert norm.norm_add(x, weight, 1e-5, residual) is residual
    assert relative_error(residual, exact) < TOLERANCE[dtype]


def test_norms_cast_as_llama_does() -> None:
    """Normalising in float32, rounding, then multiplying gives almost every bit of transformers' module."""
    for dtype in (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,):
        x, weight = randn(4, 576, dtype=dtype), randn(576, dtype=dtype)
        variance = x.float().pow(2).mean(-1, keepdim=True)
        expected = (x.float() * torch.rsqrt(variance + 1e-5)).to(dtype) * weight
        got = norm.rms_norm(x, weight, 1e-5)
        # The order of the sum may move the variance by an ulp and with it a rounding here and there.
        assert (got != expected).float().mean() < 0.005


BAD: list[tuple[str, Any]] = [
    ("rows", lambda: norm.rms_norm(randn(4, 4).T, randn(4), 1e-5)),
    ("weight", lambda: norm.rms_norm(randn(4, 4), randn(5), 1e-5)),
    ("residual", lambda: norm.norm_add(randn(4, 4), randn(4), 1e-5, randn(4, 8)[:, :4])),
    ("weight", lambda: norm.rms_norm(randn(4, 4), randn(4, dtype=torch.float16), 1e-5)),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
