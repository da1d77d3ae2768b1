"""Linear layers in 8 and in 4 bits on a CPU against float64 of the weights as they are stored."""

from __future__ import annotations

import math

import pytest
import torch
from shapes import relative_error
from torch import Tensor

from minillm import kernels
from minillm.kernels import LinearWeight, cpu

SHAPES = [(48, 96), (33, 100), (7, 13), (1, 1), (576, 1536)]
TOLERANCE = 1.2e-2  # 8 bits of the largest of a row, and bfloat16 for one row of 4 bits


def stored(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels of 4 bits, scales of both signs and some of zero, offsets; and the weights in float64."""
    levels = torch.randint(0, 16, (rows, columns), dtype=torch.int8)
    scales, offsets = torch.randn(2, rows, columns // group) * 0.02
    scales[rows // 2] = 0
    offsets -= 8 * scales
    exact = levels.double().view(rows, -1, group) * scales.double()[..., None] + offsets.double()[..., None]
    return levels, scales, offsets, exact.view(rows, columns)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 40, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_products(shape: tuple[int, int], rows: int, biased: bool) -> None:
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    linear = LinearWeight.in_8_bits(lambda: weight, shape, bias)
    x = torch.randn(rows, shape[1])
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sample = torch.randn(8, shape[1])
    first = kernels.linear(sample, linear)
    assert relative_error(first, sample.double() @ weight.double().T + (0 if bias is None else bias)) < 1e-6
    got = kernels.linear(x, linear)
    assert got.shape == (rows, shape[0])
    assert relative_error(got, expected) < TOLERANCE
    assert relative_error(kernels.linear_add(x, linear, torch.ones(rows, shape[0])), expected + 1) < TOLERANCE


@pytest.mark.parametrize("group", [16, 32, 64, 192])
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [48, 37])
def test_4_bits_with_offsets(group: int, rows: int, biased: bool, out: int) -> None:
    levels, scales, offsets, exact = stored(out, 192, group)
    bias = torch.randn(out) if biased else None
    packed = cpu.packed_low_bit(levels, scales, offsets, bias, 4)
    assert packed is not None
    packed.apply(torch.randn(8, 192))
    x = torch.randn(rows, 192)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    assert relative_error(packed.apply(x), expected) < TOLERANCE
    assert packed.add_to is not None
    assert relative_error(packed.add_to(torch.ones(rows, out), x), expected + 1) < TOLERANCE


@pytest.mark.parametrize("least", [-128, -8])
def test_levels_without_offsets(least: int) -> None:
    levels = torch.randint(least, -least, (32, 64), dtype=torch.int8)
    scales = torch.rand(32, 2) - 0.5
    packed = cpu.packed_low_bit(levels, scales, None, None, 4 if least == -8 else 8)
    assert packed is not None
    packed.apply(torch.randn(8, 64))
    exact = (levels.double().view(32, 2, 32) * scales.double()[..., None]).view(32, 64)
    for rows in (1, 3):
        x = torch.randn(rows, 64)
        assert relative_error(packed.apply(x), x.double() @ exact.T) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_activations_have_14_bits(rows: int) -> None:
    """A large activation takes few digits from the others. The weights are such that 8 bits hold them."""
    weight = torch.randint(-127, 128, (48, 64)).float()
    weight[:, 0] = 127
    linear = LinearWeight.in_8_bits(lambda: weight, (48, 64), None)
    kernels.linear(torch.randn(8, 64), linear)
    x = torch.randn(rows, 64)
    x[:, 5] = 100
    weight_without = weight.double()
    got = kernels.linear(x, linear).double() - 100 * weight_without[:, 5]
    weight_without[:, 5] = 0
    assert relative_error(got, x.double() @ weight_without.T) < 5e-3


def test_columns_whose_activations_are_large_have_16_bits() -> None:
    weight, sample = torch.randn(96, 240), torch.randn(8, 240)
    large = torch.arange(0, 240, 24)
    sample[:, large] *= 1000
    linear = LinearWeight.in_8_bits(lambda: weight, (96, 240), None)
    kernels.linear(sample, linear)
    x = torch.zeros(2, 240)
    x[:, large] = torch.randn(2, len(large))
    assert relative_error(kernels.linear(x, linear), x.double() @ weight.double().T) < 4e-4


def test_what_is_not_a_number_stays_in_its_row() -> None:
    weight = torch.randn(48, 64)
    weight[7, 3], weight[9, 5] = math.nan, math.inf
    linear = LinearWeight.in_8_bits(lambda: weight, (48, 64), None)
    kernels.linear(torch.randn(8, 64), linear)
    x = torch.randn(5, 64)
    good = kernels.linear(x, linear)
    assert good.isnan().any(0).nonzero().flatten().tolist() == [7, 9]
    for wrong in (math.nan, math.inf, -math.inf):
        damaged = x.clone()
        damaged[2, 17] = wrong
        got = kernels.linear(damaged, linear)
        assert got[2].isnan().all()
        assert kernels.linear(damaged[2:3], linear).isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(got[others].nan_to_num(), good[others].nan_to_num())


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e30])
@pytest.mark.parametrize("rows", [1, 2])
def test_activations_of_any_size(scale: float, rows: int) -> None:
    weight = torch.randn(48, 64)
    linear = LinearWeight.in_8_bits(lambda: weight, (48, 64), None)
    kernels.linear(torch.randn(8, 64), linear)
    x = torch.randn(rows, 64)
    got, expected = kernels.linear(x * scale, linear), (x * scale).double() @ weight.double().T
    assert got.isfinite().all()
    assert float((got - expected).abs().max()) <= max(1e-36, TOLERANCE * float(expected.abs().max()))


def test_bytes() -> None:
    linear = LinearWeight.in_8_bits(lambda: torch.randn(96, 240), (96, 240), None)
    assert linear.num_bytes == 96 * (240 + 20 + 2)
    assert (linear.out_features, linear.in_features) == (96, 240)
