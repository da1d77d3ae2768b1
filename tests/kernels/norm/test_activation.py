"""SwiGLU's activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.kernels import DTYPES, TOLERANCE, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.norm import activation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (0, 8), (2, 1536), (7, 5000)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = randn(shape[0], 2 * shape[1] + 5, dtype=dtype)[:, : 2 * shape[1]]
    assert relative_error(activation.silu_mul(gate_up), reference.silu_mul(gate_up.double())) < TOLERANCE[dtype]


BAD: list[tuple[str, Any]] = [
    ("size", lambda: activation.silu_mul(randn(4, 5))),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
