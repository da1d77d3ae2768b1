"""Test matrix-vector kernels for one or a few tokens."""

from __future__ import annotations

import pytest
import torch

from lib.kernels import DEVICE, DTYPES, ON_GPU, TOLERANCE, combined, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.linear import matvec


@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    combined(
        [
            *((1, *shape) for shape in ((2, 1), (34, 33), (100, 576), (70, 2100))),
            *((tokens, *shape) for tokens in (2, 3, 4) for shape in ((2, 1), (34, 33))),
            (3, 22, 2100),
            *([(n, *shape) for n in (1, 2, 4) for shape in ((960, 576), (4096, 14336))] if ON_GPU else []),
        ],
        [False, True],
        DTYPES,
    ),
)
def test_matvec(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    """Check all four matmuls with a random weight. ``shape`` is (tokens, out features, in features)."""
    tokens, features, columns = shape
    x, norm_weight = randn(tokens, columns, dtype=dtype), randn(columns, dtype=dtype)
    weight = randn(features, columns, dtype=dtype) / columns**0.5
    offset = randn(features, dtype=dtype) if bias else None
    residual = randn(tokens, features, dtype=dtype)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.product(x, weight, offset, None, (norm_weight, 1e-5)), exact) < TOLERANCE[dtype]
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert (
        relative_error(matvec.product(x, weight, offset, None, (norm_weight, 1e-5), gated=True), exact)
        < TOLERANCE[dtype]
    )
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    out = residual.clone()
    assert matvec.product(x, weight, offset, out, add=True) is out
    assert relative_error(out, exact) < TOLERANCE[dtype]
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.product(x, weight, offset), exact) < TOLERANCE[dtype]


def test_a_matvec_of_a_few_tokens_is_that_of_each() -> None:
    """A sequence's result is bitwise the same in any batch."""
    x, norm_weight = randn(3, 600, dtype=torch.bfloat16), randn(600, dtype=torch.bfloat16)
    weight, residual = randn(22, 600, dtype=torch.bfloat16), randn(3, 22, dtype=torch.bfloat16)
    for padded in (x[:3], torch.cat((x, x[:1]))):
        rows = matvec.product(padded, weight, None, None, (norm_weight, 1e-5))
        assert torch.equal(rows[:3], matvec.product(x, weight, None, None, (norm_weight, 1e-5)))
    turned = matvec.product(x[[2, 0, 1]], weight, None, residual[[2, 0, 1]], add=True)
    assert torch.equal(turned[[1, 2, 0]], matvec.product(x, weight, None, residual.clone(), add=True))


def test_a_matvec_refuses_what_it_would_get_wrong() -> None:
    weight, x = randn(8, 6, dtype=torch.float32), randn(4, 6, dtype=torch.float32)
    for wrong in (
        randn(5, 6),
        randn(2, 7),
        randn(6, 4).t()[:, :6],
        randn(2, 6).bfloat16(),
        randn(2, 12)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"up to \[4, 6\]"):
            matvec.product(wrong.to(DEVICE), weight)
    with pytest.raises(ValueError, match="contiguous"):
        matvec.product(x, weight, None, randn(8, 4).t(), add=True)
    with pytest.raises(ValueError, match="contiguous"):
        matvec.product(x, weight, None, randn(4, 16)[:, :8], (x[0].clone(), 1e-5))


def test_no_tokens_give_an_empty_result() -> None:
    assert matvec.product(randn(0, 6), randn(8, 6)).shape == (0, 8)


def test_a_few_tokens_of_a_large_weight_are_left_to_other_kernels() -> None:
    def most(features: int, columns: int) -> int:
        return matvec.most_tokens(torch.empty(features, columns, device="meta"))

    assert most(128256, 4096) == 1
    assert most(6144, 4096) == 1
    assert most(4096, 4096) == 2
    assert most(2048, 2048) == 2
    assert most(3072, 576) == 4
