"""Linear layers, norm and activation on a CPU against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lib.kernels import CPU_TOLERANCE, relative_error
from minillm import kernels
from minillm.kernels import LinearWeight, cpu


@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 33), (0, 8)])
def test_norms_and_activation(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(kernels.rms_norm(x, weight, 1e-5), expected) < CPU_TOLERANCE[dtype]
    gate_up = torch.randn(shape[0], 2 * shape[1]).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(kernels.silu_mul(gate_up), gate * gate.sigmoid() * up) < CPU_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 3])
def test_eps_counts_where_numbers_are_small(rows: int) -> None:
    x, weight = torch.randn(rows, 64) * 1e-3, torch.randn(64)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(kernels.rms_norm(x, weight, 1e-5), expected) < CPU_TOLERANCE[torch.float32]
    assert kernels.rms_norm(x * 0, weight, 1e-5).equal(x * 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [(48, 80), (640, 448)])  # the second is large enough for a layout of its own
def test_linear(dtype: torch.dtype, rows: int, biased: bool, size: tuple[int, int]) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype) if biased else None
    x = torch.randn(rows, size[1]).to(dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    packed = LinearWeight(weight, bias)
    got = kernels.linear(x, packed)
    assert got.shape == (rows, size[0])
    assert relative_error(got, expected) < CPU_TOLERANCE[dtype]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        assert (packed.packed is not None) == (size[0] == 640)


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_with_weights_that_were_published_in_half_precision(rows: int, biased: bool) -> None:
    """The result is as exact as float32, though the weights are kept in float16 where torch can multiply float16."""
    weight, bias = (torch.randn(48, 80) * 0.1).bfloat16().float(), torch.randn(48) if biased else None
    weight[3, 4] = 2.0**-22 * (1 + 2**-7)  # float16 has no room for its last digits, nor does a float32 sum
    x = torch.randn(rows, 80)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = kernels.linear(x, LinearWeight(weight, bias))
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-6
    assert relative_error(kernels.linear_add(x, LinearWeight(weight, bias), torch.ones(rows, 48)), expected + 1) < 1e-6


def published(rows: int, columns: int) -> Tensor:
    """Random weights as bfloat16 holds them."""
    return (torch.randn(rows, columns) * 0.02).bfloat16().float()


def check_each_row(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    """Check that each output is as exact as in float32. Large outputs do not hide another's error."""
    got = kernels.linear(x, LinearWeight(weight.clone(), bias))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for row in range(len(weight)):
        assert relative_error(got[:, row], expected[:, row]) < 1e-6, row


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [2.0**-40, 1e-7, 1e-5, 1e-4, 1e-2, 1e6])
def test_a_part_of_a_fused_matrix_may_be_of_another_size(scale: float, biased: bool) -> None:
    """V is small compared with Q and K, and O large; or one head is small; or one row is untrained."""
    for part in (slice(32, 48), slice(40, 44), slice(7, 8)):
        weight, bias = published(48, 300), torch.randn(48) if biased else None
        weight[part] = (weight[part] * scale).bfloat16().float()
        if bias is not None:
            bias[part] *= scale
        check_each_row(weight, torch.randn(40, 300), bias)


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-2, 1e3])
def test_inputs_may_be_of_several_sizes(scale: float) -> None:
    """A norm's weight makes some columns large, and the next matrix is small in those columns."""
    weight, x = published(48, 300), torch.randn(40, 300)
    weight[:, :100] = (weight[:, :100] * scale).bfloat16().float()
    x[:, :100] /= scale
    check_each_row(weight, x)


def test_which_weights_fit_float16() -> None:
    weight = published(300, 700)
    ones = torch.ones(300)
    for plain in (weight, weight.half().float(), torch.zeros(300, 700)):
        scales = cpu.float16_scales(plain)
        assert scales is not None
        assert torch.equal(scales, ones)
    assert cpu.float16_scales(torch.randn(300, 700) * 0.02) is None, "more digits"
    assert cpu.float16_scales(weight * 1e-4) is None, "more digits"
    scales = cpu.float16_scales(torch.cat((weight, weight * 2.0**-20)))
    assert scales is not None
    assert torch.equal(scales[:300], ones)
    assert ((scales[300:] >= 2**30) & (torch.frexp(scales[300:]).mantissa == 0.5)).all(), "powers of two"
    for wrong in (1e5, float("inf"), float("nan")):
        damaged = weight.clone()
        damaged[299, 699] = wrong
        assert cpu.float16_scales(damaged) is None
