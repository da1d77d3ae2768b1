"""Test FP8 matrices: quantization, and matmuls against float64 with the dequantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lib.kernels import DEVICE, DTYPES, ON_GPU, TOLERANCE, randn, relative_error
from minillm.kernels import GELU, reference
from minillm.kernels.linear.low_bit.layouts import (
    FP8,
    Layout,
    LowBit,
    concatenated,
    dequantize,
    in_fp8,
    padded,
    random_matrix,
)

pytest.importorskip("triton")
from minillm.kernels.linear import fp8 as fp8_linear
from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit import unpack as low_bit_unpack

E4M3 = torch.float8_e4m3fn
SHAPES = [(6, 32), (34, 2100), (18, 4800), *([(4096, 14336), (28672, 4096)] if ON_GPU else [])]
TOKENS = (1, 2, 3, 20, 300) if ON_GPU else (1, 2, 3)


def every_number() -> Tensor:
    """Return all 256 numbers of the format, including both NaN."""
    return torch.arange(256, dtype=torch.uint8, device=DEVICE).view(E4M3)


def some(out: int, width: int) -> LowBit:
    """Random bits without NaN; random scales of both signs, some of them zero."""
    bits = torch.randint(0, 127, (out, width), device=DEVICE) + 128 * torch.randint(0, 2, (out, width), device=DEVICE)
    scales = (torch.rand(out, 1, device=DEVICE) - 0.5) * (torch.rand(out, 1, device=DEVICE) > 0.1)
    return LowBit(FP8, (out, width), bits.to(torch.uint8).view(E4M3), None, scales / 100)


def exact_products(
    x: Tensor, matrix: LowBit, bias: Tensor | None, norm: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, wide = dequantize(matrix, torch.float64), None if bias is None else bias.double()
    of_norm = (x.double(), norm.double(), 1e-5, weight, wide)
    added = residual.double() + functional.linear(x.double(), weight, wide)
    return reference.norm_linear(*of_norm), reference.norm_gated_linear(*of_norm), added


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_are_those_of_the_unpacked_weights(dtype: torch.dtype, shape: tuple[int, int], tokens: int) -> None:
    matrix, (out, width) = some(*shape), shape
    x, norm, residual = (randn(*size, dtype=dtype) for size in ((tokens, width), (width,), (tokens, out)))
    rounds = tokens > fp8_linear.MOST_FUSED and fp8_linear.takes(x, matrix)  # x, too
    tolerance = 5e-2 if rounds else 2 * TOLERANCE[dtype]
    for bias in (None, randn(out, dtype=dtype)):
        plain, gated, added = exact_products(x, matrix, bias, norm, residual)
        assert relative_error(low_bit_linear.product(x, (matrix,), bias, None, (norm, 1e-5)), plain) < tolerance
        assert (
            relative_error(low_bit_linear.product(x, (matrix,), bias, None, (norm, 1e-5), gated=True), gated)
            < 2 * tolerance
        )
        got = residual.clone()
        assert low_bit_linear.product(x, (matrix,), bias, got, add=True) is got
        assert relative_error(got, added) < tolerance
        into = torch.empty(tokens, out, dtype=dtype, device=DEVICE)
        assert low_bit_linear.product(x, (matrix,), bias, into, (norm, 1e-5)) is into
        assert relative_error(into, plain) < tolerance


@pytest.mark.parametrize("tokens", [3, 17])
def test_products_on_the_matrix_unit(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """FP8 matmuls round their activations. torch's CPU matmul replaces the GPU's.

    With 17 tokens, the matmul itself applies the scales, as it does with many tokens.
    """
    monkeypatch.setattr(fp8_linear, "has_fp8", lambda device: True)
    monkeypatch.setattr(fp8_linear, "_SCALED_INSIDE", 17)
    matrix, x, norm = some(48, 160), *(randn(*size, dtype=torch.bfloat16) for size in ((tokens, 160), (160,)))
    assert fp8_linear.takes(x, matrix)
    assert not fp8_linear.takes(x.half(), matrix)
    assert not fp8_linear.takes(x, some(40, 160))
    rounded = [dequantize(in_fp8(each)) for each in (x.float(), reference.rms_norm(x.double(), norm.double(), 1e-5))]
    residual, bias = randn(tokens, 48).bfloat16(), randn(48).bfloat16()
    _, _, added = exact_products(rounded[0], matrix, bias, norm, residual)
    plain = functional.linear(rounded[1].double(), dequantize(matrix, torch.float64), bias.double())
    assert low_bit_linear.product(x[:0], (matrix,), bias, None, (norm, 1e-5)).shape == (0, 48)
    into = torch.empty(tokens, 48, dtype=x.dtype, device=DEVICE)
    for out in (None, into):
        got = low_bit_linear.product(x, (matrix,), bias, out, (norm, 1e-5))
        assert relative_error(got, plain) < 1e-2
    assert relative_error(into, plain) < 1e-2
    got = low_bit_linear.product(x, (matrix,), bias, None, (norm, 1e-5), gated=True)
    assert relative_error(got, reference.silu_mul(plain)) < 2e-2
    got = low_bit_linear.product(x, (matrix,), bias, None, (norm, 1e-5), gated=GELU)
    assert relative_error(got, reference.gelu_mul(plain)) < 2e-2
    assert relative_error(low_bit_linear.product(x, (matrix,), bias, residual, add=True), added) < 1e-2


@pytest.mark.parametrize("gate", [True, GELU])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [3, 17, *([1030] if ON_GPU else [])])
def test_a_gated_layer_rounds_its_input_and_its_gated_values(
    monkeypatch: pytest.MonkeyPatch, tokens: int, with_bias: bool, gate: int
) -> None:
    """The layer has two matmuls, and nothing between them is written in 16 bits. See `fp8_linear.mlp`."""
    monkeypatch.setattr(fp8_linear, "has_fp8", lambda device: True)
    gate_up, down = some(96, 160), some(32, 48)
    x, norm, residual = (randn(*size, dtype=torch.bfloat16) for size in ((tokens, 160), (160,), (tokens, 32)))
    biases = (randn(96).bfloat16(), randn(32).bfloat16()) if with_bias else (None, None)
    wide = [None if each is None else each.double() for each in biases]
    assert low_bit_linear.is_fp8_mlp(x, (gate_up,), (down,))
    assert not low_bit_linear.is_fp8_mlp(x[:2], (gate_up,), (down,))
    assert not low_bit_linear.is_fp8_mlp(x, (gate_up, gate_up), (down,))
    assert not low_bit_linear.is_fp8_mlp(x, (gate_up,), ())
    rounded = dequantize(in_fp8(reference.rms_norm(x.double(), norm.double(), 1e-5))).double()
    both = functional.linear(rounded, dequantize(gate_up, torch.float64), wide[0])
    gated = dequantize(in_fp8((reference.gelu_mul if gate == GELU else reference.silu_mul)(both))).double()
    plain = functional.linear(gated, dequantize(down, torch.float64), wide[1])
    into = residual.clone()
    for given, expected in ((None, plain), (into, residual.double() + plain)):
        got = fp8_linear.mlp(x, (norm, 1e-5), gate_up, biases[0], down, biases[1], given, gate)
        assert got.shape == (tokens, 32)
        assert relative_error(got, expected) < (3e-2 if gate == GELU else 2e-2)  # a level of FP8 may differ by one
    assert got is into


def test_every_number_is_widened_exactly() -> None:
    levels, scales = every_number().repeat(3, 1), torch.tensor([[1.0], [-0.5], [0.0]], device=DEVICE)
    matrix = LowBit(FP8, (3, 256), levels, None, scales)
    exact = levels.float() * scales
    for found in (dequantize(matrix), low_bit_unpack.dequantize(matrix, torch.empty(3, 256, device=DEVICE))):
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.nan_to_num(), exact.nan_to_num())
        assert int(found.isnan().sum()) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_unpacked(dtype: torch.dtype) -> None:
    matrix, index = some(9, 2100), torch.tensor([8, 0, 0, 5], device=DEVICE)
    exact = dequantize(matrix, torch.float64)
    assert relative_error(low_bit_linear.embedding(index, matrix, dtype), exact[index]) < TOLERANCE[dtype]
    found = low_bit_unpack.dequantize(matrix, torch.empty(9, 2100, dtype=dtype, device=DEVICE))
    assert relative_error(found, exact) < TOLERANCE[dtype]
    assert torch.equal(dequantize(matrix.rows(index)), dequantize(matrix)[index])
    assert torch.equal(dequantize(matrix.rows(slice(2, 4))), dequantize(matrix)[2:4])


def test_matrices_below_each_other() -> None:
    matrices = [some(rows, 48) for rows in (5, 3)]
    (whole,) = concatenated(list(matrices))
    assert torch.equal(dequantize(whole), torch.cat([dequantize(each) for each in matrices]))
    longer = padded(whole, 16)
    assert longer.shape == (16, 48)
    assert torch.equal(dequantize(longer)[:8], dequantize(whole))
    assert not dequantize(longer)[8:].any()


@pytest.mark.parametrize("tokens", [1, 3])
def test_beside_another_layout_it_is_unpacked(tokens: int) -> None:
    words = random_matrix(Layout(8, "plain"), (7, 64), 0.02, torch.Generator(DEVICE).manual_seed(0))
    parts, x = (some(5, 64), words), randn(tokens, 64)
    weight = torch.cat([dequantize(part, torch.float64) for part in parts])
    assert relative_error(low_bit_linear.product(x, parts, None, None, None), x.double() @ weight.t()) < 1e-4


@pytest.mark.parametrize("size", [1e-38, 1e-6, 1.0, 1e30])
def test_rounding_keeps_three_bits_of_each_number(size: float) -> None:
    weight = randn(20, 96, dtype=torch.float32) * size
    weight[3] = 0.0
    matrix = in_fp8(weight)
    assert matrix.nbytes == 20 * 96 + 4 * 20
    largest = weight.abs().amax(1, keepdim=True)
    error = (dequantize(matrix, torch.float64) - weight.double()).abs()
    assert bool((error <= torch.maximum(weight.abs() / 15.9, largest * 2**-18)).all())
    assert not dequantize(matrix)[3].any()
    assert torch.allclose(dequantize(matrix).abs().amax(1, keepdim=True), largest, rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_spoils_its_row_only(value: float) -> None:
    weight = randn(3, 32)
    weight[1, 7] = value
    found = dequantize(in_fp8(weight)).isfinite()
    assert not found[1, 7]
    assert found[[0, 2]].all()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("width", [16, 600])
def test_tokens_are_rounded_each_by_its_largest_number(width: int, with_norm: bool) -> None:
    x, weight = randn(5, width), randn(width)
    x *= torch.tensor([1e-20, 1e-3, 1.0, 1e4, 0.0], device=DEVICE)[:, None]
    norm = (weight, 1e-5) if with_norm else None
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5) if with_norm else x.double()
    levels, scales = fp8_linear.quantize(x, norm)
    assert (levels.dtype, levels.shape, scales.shape) == (E4M3, (5, width), (5, 1))
    found = levels.double() * scales.double()
    for row, expected in zip(found[:4], exact[:4], strict=True):
        assert relative_error(row, expected) < 4e-2
        assert float((row - expected).abs().amax()) <= float(expected.abs().amax()) / 15
    assert not found[4].any()
    assert int((levels.float().abs().amax(1) == 448).sum()) == 4


def test_numbers_between_two_of_the_format_go_to_the_nearer() -> None:
    """Round as torch does. A 448 in each row makes the scale 1."""
    grid = every_number()[:127].float()
    x = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, grid[:-1] + torch.diff(grid) * torch.rand(126, device=DEVICE)))
    x = torch.stack((x, -x))
    levels, scales = fp8_linear.quantize(x, None)
    assert torch.equal(scales, torch.ones(2, 1, device=DEVICE))
    assert torch.equal(levels.float(), x.to(E4M3).float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_no_number_stays_so(value: float) -> None:
    x = randn(3, 64)
    x[1, 7] = value
    levels, scales = fp8_linear.quantize(x, None)
    sums = (levels.float() * scales).sum(1)
    assert bool(sums[1].isnan())
    assert sums[[0, 2]].isfinite().all()
    for tokens in (x[:2], x):
        got = low_bit_linear.product(tokens, (some(16, 64),), None, None, None)
        assert not got[1].isfinite().any()
        assert got[0].isfinite().all()


def test_a_weight_that_is_nan_spoils_its_row_only() -> None:
    matrix = some(16, 64)
    matrix.levels.view(torch.uint8)[2, 5] = 0xFF
    for tokens in (1, 5):
        got = low_bit_linear.product(randn(tokens, 64), (matrix,), None, None, None)
        assert got[:, 2].isnan().all()
        assert got[:, [0, 1, *range(3, 16)]].isfinite().all()


def test_random_matrices_look_like_weights() -> None:
    weights = dequantize(random_matrix(FP8, (64, 2048), 0.02, torch.Generator(DEVICE).manual_seed(0)))
    assert abs(float(weights.mean())) < 1e-3
    assert 0.018 < float(weights.std()) < 0.022
