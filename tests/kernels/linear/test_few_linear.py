"""Products of a few tokens and small weights, by the matrix unit."""

from __future__ import annotations

import pytest
import torch
from products import assert_products
from shapes import DEVICE, ON_GPU, TOLERANCE, combined, randn, relative_error

from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.linear import few_tokens as few_linear
from minillm.kernels.linear import matvec

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "bias"),
    combined(
        [
            *((tokens, *shape) for tokens in (3, 8) for shape in ((2, 1), (34, 33), (70, 600))),
            *((tokens, *shape) for tokens in (9, 16) for shape in ((34, 33), (22, 1500))),
            *([(n, *shape) for n in (3, 8, 16) for shape in ((960, 576), (3072, 576), (576, 1536))] if ON_GPU else []),
            *([(n, *shape) for n in (5, 16) for shape in ((1600, 960), (5120, 960), (960, 2560))] if ON_GPU else []),
        ],
        [False, True],
    ),
)
def test_a_few_tokens(shape: tuple[int, int, int], bias: bool) -> None:
    tokens, features, columns = shape
    assert few_linear.takes(tokens, torch.empty(features, columns, dtype=BF16, device=DEVICE))
    assert_products(shape, bias, BF16)


def test_small_and_large_inputs_keep_their_digits() -> None:
    """The norm is applied to the result, so what is multiplied may be of any size that bfloat16 has."""
    weight, norm_weight = randn(24, 96, dtype=BF16), randn(96, dtype=BF16)
    for size in (1e-9, 1e9):
        x = (randn(4, 96, dtype=torch.float32) * size).to(BF16)
        exact = reference.norm_linear(x.double(), norm_weight.double(), 1e-30, weight.double(), None)
        assert relative_error(matvec.norm_matvec(x, norm_weight, 1e-30, weight), exact) < TOLERANCE[BF16]


def test_what_no_token_and_no_row_covers_is_neither_read_nor_written() -> None:
    """Behind the tokens, and behind the weight, lies NaN; behind the result nothing changes."""
    kept = torch.full((20, 40), float("nan"), dtype=BF16, device=DEVICE)
    kept[:5] = randn(5, 40, dtype=BF16)
    weights = torch.full((48, 40), float("nan"), dtype=BF16, device=DEVICE)
    weights[:18] = randn(18, 40, dtype=BF16)
    out = torch.ones(20, 18, dtype=BF16, device=DEVICE)
    few_linear.launch(out[:5], kept[:5], weights[:18], None)
    assert relative_error(out[:5], kept[:5].double() @ weights[:18].double().t()) < TOLERANCE[BF16]
    assert (out[5:] == 1).all()


def test_a_token_has_the_same_bits_wherever_it_stands() -> None:
    x, norm_weight, weight = randn(13, 600, dtype=BF16), randn(600, dtype=BF16), randn(40, 600, dtype=BF16)
    rows, order = matvec.norm_matvec(x, norm_weight, 1e-5, weight), torch.randperm(13, device=DEVICE)
    assert torch.equal(matvec.norm_matvec(x[order], norm_weight, 1e-5, weight), rows[order])
    assert torch.equal(matvec.norm_matvec(x[:9], norm_weight, 1e-5, weight), rows[:9])


def test_only_small_weights_are_taken() -> None:
    def takes(tokens: int, features: int, columns: int, dtype: torch.dtype = BF16) -> bool:
        return few_linear.takes(tokens, torch.empty(features, columns, dtype=dtype, device="meta"))

    assert takes(3, 3072, 576)
    assert takes(16, 576, 1536)
    assert not takes(2, 3072, 576), "two tokens go without the matrix unit"
    assert not takes(17, 3072, 576)
    assert not takes(8, 6144, 4096)
    assert not takes(8, 8, 8192), "shared memory has no room for so many columns"
    assert not takes(8, 2048, 2048)
    assert not takes(8, 3072, 576, torch.float16)
    assert not takes(8, 3072, 576, torch.float32)


@pytest.mark.parametrize(("columns", "depths"), [(5, (16, 0)), (16, (16, 0)), (144, (128, 16)), (192, (128, 64))])
def test_columns_as_two_powers_of_two(columns: int, depths: tuple[int, int]) -> None:
    assert few_linear._depths(columns) == depths


def test_every_number_of_columns_has_room() -> None:
    for columns in range(1, 513):
        depth, rest = few_linear._depths(columns)
        assert columns <= depth + rest <= 2 * max(16, columns)
        assert depth & (depth - 1) == rest & (rest - 1) == 0
