"""The activations of gated MLPs."""

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
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activation(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = randn(shape[0], 2 * shape[1] + 5, dtype=dtype)[:, : 2 * shape[1]]
    expected = getattr(reference, name)(gate_up.double())
    assert relative_error(getattr(activation, name)(gate_up), expected) < TOLERANCE[dtype]


BAD: list[tuple[str, Any]] = [
    ("size", lambda: activation.silu_mul(randn(4, 5))),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
