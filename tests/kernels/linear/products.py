"""The products of `minillm.kernels.linear.matvec` against the references in float64."""

from __future__ import annotations

import torch
from shapes import TOLERANCE, randn, relative_error

from minillm.kernels import reference
from minillm.kernels.linear import matvec


def assert_products(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    """All four of a random weight; ``shape`` is (tokens, out features, in features)."""
    tokens, features, columns = shape
    x, norm_weight = randn(tokens, columns, dtype=dtype), randn(columns, dtype=dtype)
    weight = randn(features, columns, dtype=dtype) / columns**0.5
    offset = randn(features, dtype=dtype) if bias else None
    residual = randn(tokens, features, dtype=dtype)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.norm_matvec(x, norm_weight, 1e-5, weight, offset), exact) < TOLERANCE[dtype]
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.norm_gated_matvec(x, norm_weight, 1e-5, weight, offset), exact) < TOLERANCE[dtype]
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    out = residual.clone()
    assert matvec.matvec_add(x, weight, offset, out) is out
    assert relative_error(out, exact) < TOLERANCE[dtype]
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.matvec(x, weight, offset), exact) < TOLERANCE[dtype]
