"""Linear layers in 8 and in 4 bits on a CPU against float64 of the weights as they are stored."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lib.kernels import relative_error
from minillm import kernels
from minillm.kernels import LinearWeight
from minillm.kernels.linear.low_bit.layouts import Layout, LowBit, Scales, dequantize, expanded, random_matrix

SHAPES = [(48, 96), (33, 100), (7, 13), (1, 1), (576, 1536)]
TOLERANCE = 1.2e-2  # 8 bits of the largest of a row, and bfloat16 for a few rows of 4 bits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 40, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_products(shape: tuple[int, int], rows: int, biased: bool) -> None:
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, shape, bias)
    x = torch.randn(rows, shape[1])
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sample = torch.randn(8, shape[1])
    first = kernels.linear(sample, linear)
    assert relative_error(first, sample.double() @ weight.double().T + (0 if bias is None else bias)) < 1e-6
    got = kernels.linear(x, linear)
    assert got.shape == (rows, shape[0])
    assert relative_error(got, expected) < TOLERANCE
    assert relative_error(kernels.linear_add(x, linear, torch.ones(rows, shape[0])), expected + 1) < TOLERANCE


def random_stored(scales: Scales, rows: int, generator: torch.Generator) -> LowBit:
    """Return a matrix of 4 bits and 512 columns, with scales of both signs and some zeros."""
    if scales == "super":
        return random_matrix(Layout(4, "super"), (rows, 512), 0.1, generator)
    matrix = random_matrix(Layout(4, "plain", 8), (rows, 512), 0.1, generator)
    given = torch.randn(rows, 16, generator=generator).mul_(0.02)
    given[rows // 2] = 0
    if scales == "plain":
        return replace(matrix, scales=given.half())
    others = torch.randint(0, 16, (rows, 16), generator=generator) if scales == "zeros" else given * -7.5
    return replace(matrix, layout=Layout(4, scales), scales=torch.stack((given, others), -1).half())


@pytest.mark.parametrize("scales", ["plain", "zeros", "offset", "super"])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [(48,), (37,), (16, 32)])
def test_matrices_of_4_bits(scales: Scales, rows: int, biased: bool, out: tuple[int, ...]) -> None:
    """Up to 16 rows take the products of 4 bits where torch has them: 37 rows of a weight are none of its numbers."""
    generator = torch.Generator().manual_seed(rows)
    stored = tuple(random_stored(scales, each, generator) for each in out)
    total, exact = sum(out), torch.cat([dequantize(each, torch.float64) for each in stored])
    bias = torch.randn(total) if biased else None
    linear = LinearWeight.in_8_bits(lambda: expanded(stored).__getitem__, (total, 512), bias, stored)
    kernels.linear(torch.randn(8, 512), linear)
    x = torch.randn(rows, 512, generator=generator)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    assert relative_error(kernels.linear(x, linear), expected) < TOLERANCE
    assert relative_error(kernels.linear_add(x, linear, torch.ones(rows, total)), expected + 1) < TOLERANCE
    assert (linear.num_bytes < 0.7 * total * 512) == (total % 16 == 0), "4 bits, and two numbers of 16 for 32 weights"


@pytest.mark.parametrize("scales", ["plain", "zeros", "offset", "super"])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 40, 600])
@pytest.mark.parametrize("out", [(16, 32), (80, 192)])
@pytest.mark.parametrize("biased", [False, True])
def test_matrices_of_4_bits_alone(scales: Scales, rows: int, out: tuple[int, int], biased: bool) -> None:
    """The 272 rows of a weight are packed in parts of 256 rows. The first part has rows of both matrices."""
    generator = torch.Generator().manual_seed(rows)
    stored, total = tuple(random_stored(scales, each, generator) for each in out), sum(out)
    exact = torch.cat([dequantize(each, torch.float64) for each in stored])
    bias = torch.randn(total) if biased else None
    linear = LinearWeight.in_4_bits(stored, bias)
    assert linear is not None
    assert (linear.out_features, linear.in_features) == (total, 512)
    assert linear.num_bytes == total * 512 * 5 // 8
    x = torch.randn(rows, 512)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    got = kernels.linear(x, linear)
    assert got.shape == (rows, total)
    assert relative_error(got, expected) < TOLERANCE
    assert relative_error(kernels.linear_add(x, linear, torch.ones(rows, total)), expected + 1) < TOLERANCE


def test_of_4_bits_a_row_that_is_not_a_number_spoils_no_other() -> None:
    linear = LinearWeight.in_4_bits((random_stored("offset", 32, torch.Generator().manual_seed(1)),), None)
    assert linear is not None
    x = torch.randn(40, 512)
    good = kernels.linear(x, linear)
    x[7, 3], x[9] = math.nan, math.inf
    got = kernels.linear(x, linear)
    others = [row for row in range(40) if row not in (7, 9)]
    assert torch.equal(got[others], good[others])
    assert got[7].isnan().all()
    assert not got[9].isfinite().any()


def test_of_4_bits_alone_is_what_torch_can_multiply() -> None:
    generator = torch.Generator().manual_seed(2)
    fits, short = (random_stored("plain", rows, generator) for rows in (32, 21))
    assert LinearWeight.in_4_bits((), None) is None
    assert LinearWeight.in_4_bits((short,), None) is None, "rows in sixteens"
    assert LinearWeight.in_4_bits((fits, random_matrix(Layout(8, "plain"), (32, 512), 0.1, generator)), None) is None
    by_table = random_matrix(Layout(4, "plain", 0, 32, True), (32, 512), 0.1, generator)
    assert LinearWeight.in_4_bits((by_table,), None) is None
    permuted = replace(fits, order=torch.randperm(512, generator=generator))
    assert LinearWeight.in_4_bits((permuted,), None) is None


@pytest.mark.parametrize("layout", [Layout(8, "plain"), Layout(6, "bytes", 32, 16), Layout(4, "plain", 0, 32, True)])
def test_rows_of_a_table_and_the_whole_of_it(layout: Layout) -> None:
    table = random_matrix(layout, (3000, 512), 0.1, torch.Generator().manual_seed(0))
    exact = dequantize(table, torch.float64).float()
    ids = torch.tensor([0, 2999, 7, 7])
    assert torch.allclose(kernels.embedding(ids, table, torch.float32), exact[ids], rtol=1e-6)
    assert torch.allclose(expanded((table, table.rows(slice(5)))), torch.cat((exact, exact[:5])), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_activations_have_14_bits(rows: int) -> None:
    """A large activation takes few digits from the others. The weights are such that 8 bits hold them."""
    weight = torch.randint(-127, 128, (48, 64)).float()
    weight[:, 0] = 127
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, (48, 64), None)
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
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, (96, 240), None)
    kernels.linear(sample, linear)
    x = torch.zeros(2, 240)
    x[:, large] = torch.randn(2, len(large))
    assert relative_error(kernels.linear(x, linear), x.double() @ weight.double().T) < 4e-4


def test_what_is_not_a_number_stays_in_its_row() -> None:
    weight = torch.randn(48, 64)
    weight[7, 3], weight[9, 5] = math.nan, math.inf
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, (48, 64), None)
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
    linear = LinearWeight.in_8_bits(lambda: weight.__getitem__, (48, 64), None)
    kernels.linear(torch.randn(8, 64), linear)
    x = torch.randn(rows, 64)
    got, expected = kernels.linear(x * scale, linear), (x * scale).double() @ weight.double().T
    assert got.isfinite().all()
    assert float((got - expected).abs().max()) <= max(1e-36, TOLERANCE * float(expected.abs().max()))


def test_bytes() -> None:
    linear = LinearWeight.in_8_bits(lambda: torch.randn(96, 240).__getitem__, (96, 240), None)
    assert linear.num_bytes == 96 * (240 + 20 + 2)
    assert (linear.out_features, linear.in_features) == (96, 240)
