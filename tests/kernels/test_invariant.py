"""Test the batch-invariant ops with all kinds of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, TOLERANCE, randn, relative_error
from minillm.kernels import LinearWeight, LowBit

pytest.importorskip("triton")
from minillm.kernels import deterministic as invariant
from minillm.kernels.deterministic import OPS
from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit.layouts import FP8, Layout, expanded, random_matrix

EPS = 1e-5
PARTS = {
    "16 bits": None,
    "4 bits": [Layout(4, "super")],
    "4, 4 and 6 bits": [Layout(4, "super"), Layout(4, "plain"), Layout(6, "bytes", zero=32, group=16)],
    "8 bits": [Layout(8, "plain")],
    "FP8": [FP8],
}


def weight_of(kind: str, rows: int, columns: int) -> tuple[LinearWeight, Tensor]:
    """A weight and its numbers in float64."""
    layouts, generator = PARTS[kind], torch.Generator(device=DEVICE).manual_seed(0)
    bias = randn(rows, dtype=torch.bfloat16)
    if layouts is None:
        matrix = randn(rows, columns, dtype=torch.bfloat16)
        return LinearWeight(matrix, bias), matrix.double()
    sizes = [rows // len(layouts)] * len(layouts)
    parts: tuple[LowBit, ...] = tuple(
        random_matrix(layout, (size, columns), 0.02, generator) for layout, size in zip(layouts, sizes, strict=True)
    )
    return LinearWeight(parts, bias), expanded(parts).double()


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()


@pytest.mark.parametrize("kind", PARTS)
def test_ops_are_those_of_any_weight(kind: str) -> None:
    x, norm = randn(5, 256, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16)
    residual = randn(5, 96, dtype=torch.bfloat16)
    weight, exact = weight_of(kind, 96, 256)
    assert weight.bias is not None
    bias = weight.bias.double()
    plain, behind = x.double() @ exact.T + bias, normed(x, norm) @ exact.T + bias
    gate, up = behind.chunk(2, 1)
    down, exact_down = weight_of("16 bits", 32, 48)
    assert down.bias is not None
    gated = gate * gate.sigmoid() * up
    after = gated @ exact_down.T + down.bias.double()
    for got, expected in (
        (OPS.linear(x, weight), plain),
        (OPS.norm_linear(x, norm, EPS, weight), behind),
        (OPS.norm_linear(x, norm, EPS, weight, x.new_empty(5, 96)), behind),
        (invariant.norm_gated_linear(x, norm, EPS, weight), gated),
        (OPS.mlp(x, norm, EPS, weight, down, residual[:, :32].clone()), after + residual[:, :32].double()),
        (OPS.mlp(x, norm, EPS, weight, down, None), after),
        (OPS.linear_add(x, weight, residual.clone()), plain + residual.double()),
    ):
        assert relative_error(got, expected) < 2 * TOLERANCE[torch.bfloat16]
    assert OPS.linear(x[:0], weight).shape == (0, 96)


@pytest.mark.parametrize("rows_at_a_time", [5, 32, 96])
def test_weights_are_unpacked_a_part_of_the_rows_at_a_time(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, (weight, _) = randn(3, 256, dtype=torch.bfloat16), weight_of("FP8", 96, 256)
    whole = OPS.linear(x, weight)
    monkeypatch.setattr(low_bit_linear, "_UNPACKED", rows_at_a_time * 256)
    assert torch.equal(OPS.linear(x, weight), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1536, 768), (4608, 4096), (960, 14336)])
@pytest.mark.parametrize("kind", PARTS)
def test_a_token_has_the_same_bits_among_any_others(kind: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    x, norm = randn(700, columns, dtype=torch.bfloat16), randn(columns, dtype=torch.bfloat16)
    residual = randn(700, rows, dtype=torch.bfloat16)
    weight, _ = weight_of(kind, rows, columns)

    def everything(part: slice) -> list[Tensor]:
        return [
            OPS.norm_linear(x[part], norm, EPS, weight),
            invariant.norm_gated_linear(x[part], norm, EPS, weight),
            OPS.linear_add(x[part], weight, residual[part].clone()),
        ]

    alone = [torch.cat(each) for each in zip(*(everything(slice(i, i + 1)) for i in range(40)), strict=True)]
    for tokens in (2, 8, 9, 17, 33, 64, 65, 128, 129, 256, 257, 513, 700):
        for got, expected in zip(everything(slice(0, tokens)), alone, strict=True):
            count = min(tokens, 40)
            assert torch.equal(got[:count], expected[:count]), (tokens, kind)
