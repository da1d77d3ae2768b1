"""Products of some tokens and a small weight, with the norm, the gate or the addition in one kernel."""

from __future__ import annotations

import pytest
import torch
from shapes import DEVICE, ON_GPU, TOLERANCE, randn, relative_error

from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels import small_matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "features", "columns"),
    [
        (1, 2, 1),
        (5, 34, 33),
        (17, 20, 128),
        (33, 50, 260),
        (64, 16, 129),
        *([(n, *shape) for n in (5, 8, 31, 32, 48, 64) for shape in ((960, 576), (576, 1536))] if ON_GPU else []),
    ],
)
def test_small_products(dtype: torch.dtype, bias: bool, tokens: int, features: int, columns: int) -> None:
    x, norm_weight = randn(tokens, columns, dtype=dtype), randn(columns, dtype=dtype)
    weight = randn(features, columns, dtype=dtype) / columns**0.5
    offset = randn(features, dtype=dtype) if bias else None
    residual = randn(tokens, features, dtype=dtype)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(small_matmul.norm_matmul(x, norm_weight, 1e-5, weight, offset), exact) < TOLERANCE[dtype]
    given = torch.empty(tokens, features, dtype=dtype, device=DEVICE)
    assert small_matmul.norm_matmul(x, norm_weight, 1e-5, weight, offset, given) is given
    assert relative_error(given, exact) < TOLERANCE[dtype]
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    gated = small_matmul.norm_gated_matmul(x, norm_weight, 1e-5, weight, offset)
    assert relative_error(gated, exact) < TOLERANCE[dtype]
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    out = residual.clone()
    assert small_matmul.matmul_add(x, weight, offset, out) is out
    assert relative_error(out, exact) < TOLERANCE[dtype]


def test_a_token_is_computed_alike_beside_any_others() -> None:
    """Equal to the bit while as many tokens make a tile."""
    x, norm_weight = randn(16, 300, dtype=torch.bfloat16), randn(300, dtype=torch.bfloat16)
    weight = randn(22, 300, dtype=torch.bfloat16)
    whole = small_matmul.norm_matmul(x, norm_weight, 1e-5, weight)
    for first, last in ((0, 5), (3, 9), (10, 16)):
        part = small_matmul.norm_matmul(x[first:last].contiguous(), norm_weight, 1e-5, weight)
        assert torch.equal(part, whole[first:last])


def test_what_would_come_out_wrong_is_refused() -> None:
    weight = randn(8, 6, dtype=torch.bfloat16)
    for wrong in (randn(65, 6).bfloat16(), randn(2, 7).bfloat16(), randn(2, 12).bfloat16()[:, ::2]):
        with pytest.raises(ValueError, match=r"up to \[64, 6\]"):
            small_matmul.matmul_add(wrong, weight, None, randn(wrong.shape[0], 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="of one dtype"):
        small_matmul.matmul_add(randn(2, 6), weight, None, randn(2, 8))
    with pytest.raises(ValueError, match="contiguous"):
        small_matmul.matmul_add(randn(2, 6).bfloat16(), weight, None, randn(8, 2).bfloat16().t())
    assert small_matmul.matmul_add(weight[:0], weight, None, weight.new_empty(0, 8)).shape == (0, 8)


def test_large_weights_and_many_tokens_are_left_to_cublas() -> None:
    def takes(tokens: int, features: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(tokens, columns, dtype=dtype, device="meta")
        return small_matmul.takes(x, torch.empty(features, columns, dtype=dtype, device="meta"))

    assert takes(32, 3072, 576)
    assert takes(64, 576, 1536)
    assert not takes(65, 576, 576)
    assert not takes(32, 49152, 576)
    assert not takes(8, 576, 576, torch.float32)
