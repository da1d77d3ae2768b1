"""Test quantization: no worse than plain rounding, exact for numbers on a grid, and NaN only in its own group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.kernels.linear.low_bit import rounding
from minillm.kernels.linear.low_bit.layouts import Layout, dequantize, in_eight_bits
from minillm.kernels.linear.low_bit.rounding import rounded


def plainly(weight: Tensor, bits: int) -> Tensor:
    """Quantize each group with levels from its smallest to its largest number."""
    groups = weight.double().view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return (((groups - low) / step).round() * step + low).view_as(weight)


def loss(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).square().sum())


@pytest.mark.parametrize(("bits", "part"), [(4, 0.93), (8, 1.01)])
def test_the_search_gains(bits: int, part: float) -> None:
    weight = torch.randn(70, 576, generator=torch.Generator().manual_seed(0)) * 0.03
    matrix = rounded(weight, bits)
    assert matrix.layout == Layout(bits, "offset")
    assert matrix.shape == (70, 576)
    assert matrix.nbytes * 8 == 70 * 576 * (bits + 1)
    assert loss(dequantize(matrix), weight) < part * loss(plainly(weight, bits), weight)
    if bits == 8:
        assert loss(dequantize(matrix), weight) < 0.9 * loss(dequantize(in_eight_bits(weight)), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_grid_is_kept(bits: int) -> None:
    levels = torch.randint(0, 16, (9, 64), generator=torch.Generator().manual_seed(1))
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = levels * 2.0**-6 - 2.0**-4
    assert torch.allclose(dequantize(rounded(weight, bits)), weight, rtol=0, atol=2.0**-13)


def test_parts_are_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 64)
    whole = dequantize(rounded(weight, 4))
    monkeypatch.setattr(rounding, "_AT_ONCE", 3 * 64)
    assert torch.equal(dequantize(rounded(weight, 4)), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_group_only(value: float) -> None:
    weight = torch.randn(3, 96)
    weight[1, 40] = value
    found = dequantize(rounded(weight, 4)).isfinite()
    assert not found[1, 32:64].any()
    found[1, 32:64] = True
    assert found.all()


def test_groups_of_one_number_are_exact() -> None:
    weight = torch.full((2, 64), 0.25)
    weight[1] = 0.0
    assert torch.equal(dequantize(rounded(weight, 4)), weight)
