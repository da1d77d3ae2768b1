"""Linear layers, norm and activation on a CPU against float64."""

from __future__ import annotations

import pytest
import torch
from shapes import CPU_TOLERANCE, relative_error

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, bias = torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype) if biased else None
    x = torch.randn(rows, 80).to(dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = kernels.linear(x, LinearWeight(weight, bias))
    assert got.shape == (rows, 48)
    assert relative_error(got, expected) < CPU_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_with_weights_that_were_published_in_half_precision(rows: int, biased: bool) -> None:
    """As exact as float32, though the weights are kept in float16 where torch can multiply those."""
    weight, bias = (torch.randn(48, 80) * 0.1).bfloat16().float(), torch.randn(48) if biased else None
    weight[3, 4] = 2.0**-22 * (1 + 2**-7)  # float16 has no room for its last digits, nor does a float32 sum
    x = torch.randn(rows, 80)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = kernels.linear(x, LinearWeight(weight, bias))
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-6
    assert relative_error(kernels.linear_add(x, LinearWeight(weight, bias), torch.ones(rows, 48)), expected + 1) < 1e-6


def test_which_weights_fit_float16() -> None:
    published = (torch.randn(300, 700) * 0.02).bfloat16().float()
    assert cpu.fits_float16(published)
    assert cpu.fits_float16(published.half().float())
    assert not cpu.fits_float16(torch.randn(300, 700) * 0.02), "more digits"
    assert not cpu.fits_float16(published * 1e-4), "all of them so small that float16 cuts digits off"
    for wrong in (1e5, float("inf"), float("nan")):
        damaged = published.clone()
        damaged[299, 699] = wrong
        assert not cpu.fits_float16(damaged)
