"""Test gated matmuls that write the input format of the next matmul, against float64 and 16-bit activations."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, ON_GPU, TOLERANCE, randn, relative_error
from lib.low_bit import LAYOUTS, columns, some
from minillm import kernels
from minillm.kernels import GELU, LinearWeight, LowBit, reference
from minillm.kernels.linear.low_bit.layouts import UNPACKED, expanded, in_fp8

pytest.importorskip("triton")
from minillm.kernels.linear.low_bit import bound as low_bit_bound
from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit import few_tokens as low_bit_matmul
from minillm.kernels.linear.low_bit.bound import scale_of_gated

HALF = torch.float16  # the interpreter cuts bfloat16 off
EPS = 1e-5
WIDTH = 256


@pytest.fixture(autouse=True)
def _kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in {"low_bit_linear": low_bit_linear, "low_bit_bound": low_bit_bound}.items():
        monkeypatch.setattr(kernels, name, module, raising=False)


class Layer(NamedTuple):
    norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight

    @classmethod
    def of(
        cls, gate_up: str = "q4_0", down: str = "q4_0", size: int = 32, out: int = 12, *, dtype: torch.dtype = HALF
    ) -> Layer:
        """A layer of ``size`` columns in between, with biases, its gated product bounded."""
        wide = some(LAYOUTS[gate_up], 2 * size, WIDTH, 1)
        bias, other = randn(2 * size, dtype=dtype) / 10, randn(out, dtype=dtype)
        behind = some(LAYOUTS[down], out, size, 2)
        layer = cls(randn(WIDTH, dtype=dtype), LinearWeight((wide,), bias), LinearWeight((behind,), other))
        layer.gate_up.bound_gated(layer.norm)
        return layer

    def mlp(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return kernels.mlp(x, self.norm, EPS, self.gate_up, self.down, residual)

    def by_16_bits(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same, the gated product rounded to ``x``'s dtype and scaled by its largest number."""
        gate_up = copy(self.gate_up)
        gate_up.gated_scale = None
        return kernels.mlp(x, self.norm, EPS, gate_up, self.down, residual)

    def exact(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        pairs = [
            (expanded(each.parts).double(), None if each.bias is None else each.bias.double())
            for each in (self.gate_up, self.down)
        ]
        wide = None if residual is None else residual.double()
        return reference.mlp(x.double(), self.norm.double(), EPS, pairs[0], pairs[1], wide)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[low_bit_matmul.Float16Activations]:
    """Collect the activations that gated matmuls write for the matmuls after them."""
    seen, write = [], low_bit_linear.gated_to_float16

    def noted(*args: object) -> low_bit_matmul.Float16Activations:
        seen.append(write(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(low_bit_linear, "gated_to_float16", noted)
    return seen


@pytest.mark.parametrize(
    ("tokens", "gate_up", "down", "size"),
    [
        (3, "q4_0", "q4_0", 64),
        (5, "q4_k", "q6_k", 256),
        (9, "q8_0", "q4_0", 96),
        (11, "awq", "awq", 128),
        (16, "q6_k", "q8_0", 32),
        *([(4, "q4_k", "q4_k", 14336), (4, "q4_k", "q6_k", 14336), (16, "q4_k", "q4_k", 18944)] if ON_GPU else []),
    ],
)
def test_both_products_are_those_of_float64(
    tokens: int, gate_up: str, down: str, size: int, handed: list[low_bit_matmul.Float16Activations]
) -> None:
    layer, x, residual = Layer.of(gate_up, down, size), randn(tokens, WIDTH, dtype=HALF), randn(tokens, 12, dtype=HALF)
    exact = layer.exact(x, residual)
    added = residual.clone()
    assert layer.mlp(x, added) is added
    before = layer.by_16_bits(x, residual.clone())
    assert relative_error(added, exact) < max(2e-3, 1.1 * relative_error(before, exact))
    assert len(handed) == 1
    assert layer.gate_up.bias is not None
    got, wide = columns(handed[0]), reference.norm_gated_linear(
        x.double(), layer.norm.double(), EPS, expanded(layer.gate_up.parts).double(), layer.gate_up.bias.double()
    )  # fmt: skip
    assert relative_error(got[:, :size], wide) < 5e-3
    assert got.shape[1] % 2048 == 0
    assert not got[:, size:].any(), "what is behind the last column meets weights, too"


def test_gelu_is_handed_over_as_silu_is(handed: list[low_bit_matmul.Float16Activations]) -> None:
    layer, x = Layer.of("q4_0", "q8_0", 64), randn(3, WIDTH, dtype=HALF)
    layer.gate_up.gate = GELU
    assert layer.gate_up.bias is not None
    assert layer.down.bias is not None
    weight, bias = expanded(layer.gate_up.parts).double(), layer.gate_up.bias.double()
    gated = reference.gelu_mul(reference.norm_linear(x.double(), layer.norm.double(), EPS, weight, bias))
    expected = torch.nn.functional.linear(gated, expanded(layer.down.parts).double(), layer.down.bias.double())
    for got in (layer.mlp(x), layer.by_16_bits(x)):
        assert relative_error(got, expected) < 5e-3
    assert len(handed) == 1


def test_columns_behind_the_last_are_zeros_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding starts inside a turn, and the memory held NaN before."""
    monkeypatch.setattr(
        low_bit_matmul, "allocate_by_eights",
        lambda x, columns: x.new_full((2, low_bit_matmul._turns(columns), 4, 8, 4, 8), torch.nan, dtype=HALF),
    )  # fmt: skip
    for size, tile in ((32, (4, 2, 2, 1)), (160, (1, 1, 2, 1))):
        matrix, norm, x = some(LAYOUTS["q4_0"], 2 * size, 32), randn(32, dtype=HALF), randn(11, 32, dtype=HALF)
        activations, by = low_bit_matmul.convert_to_float16(x * 0), scale_of_gated(matrix, None, norm)
        got = columns(low_bit_matmul.gated_to_float16(activations, matrix, None, by, low_bit_matmul.Tile(*tile)))
        assert got.shape == (11, 2048)
        assert not got.any()


def test_bfloat16(handed: list[low_bit_matmul.Float16Activations]) -> None:
    layer, x = Layer.of(dtype=torch.bfloat16), randn(4, WIDTH, dtype=torch.bfloat16)
    assert relative_error(layer.mlp(x), layer.exact(x)) < TOLERANCE[torch.bfloat16]
    residual = randn(4, 12, dtype=torch.bfloat16)
    exact = layer.exact(x, residual)
    assert relative_error(layer.mlp(x, residual), exact) < TOLERANCE[torch.bfloat16]
    assert len(handed) == 2


@pytest.mark.parametrize("norm", [1e-12, 1e-4, 300.0, 1e15])
def test_weights_of_any_size(norm: float) -> None:
    """Float32 holds the product, so float16 holds it grown."""
    matrix, weight, x = some(LAYOUTS["q4_0"], 128, WIDTH), randn(WIDTH) * norm, randn(5, WIDTH, dtype=HALF)
    scale = scale_of_gated(matrix, None, weight)
    got = columns(low_bit_linear.gated_to_float16(x, matrix, None, (weight, EPS), scale))
    exact = reference.norm_gated_linear(x.double(), weight.double(), EPS, expanded((matrix,)).double())
    assert relative_error(got[:, :64], exact) < 5e-3


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "q8_0", "awq"])
def test_no_input_is_beyond_the_bound(name: str) -> None:
    """The worst input of each row points as the row does; with the norm's weight, in the matrix's order."""
    matrix = some(LAYOUTS[name], 16, WIDTH)
    bias, norm = randn(16) * 3, randn(WIDTH) * 100
    if name == "awq":  # the norm is large where the weights are zeros
        matrix = replace(matrix, order=torch.randperm(WIDTH, dtype=torch.int32).to(DEVICE))
        assert matrix.order is not None
        matrix.scales[:, 0] = 0
        norm[matrix.order[:128]] *= 1e4
    scale = scale_of_gated(matrix, bias, norm)
    weight = expanded((matrix,)).double() * norm.double()
    worst = WIDTH**0.5 * weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-30)
    both = (worst @ weight.T).abs() + bias.abs().double()
    ends = (both[:8, :8].diagonal() * both[8:, 8:].diagonal()).max()  # each of the two by its own worst input
    assert 2**14 <= float(ends * scale.growth) <= 2**15
    assert float(scale.growth.log2()) % 1 == 0
    assert torch.equal(scale.scales, (1 / (64 * scale.growth)).expand(low_bit_linear.MOST_FUSED))
    gate, up = (worst @ weight.T + bias.double()).chunk(2, 1)
    assert float((torch.nn.functional.silu(gate) * up).abs().max() * scale.growth) <= 2**15


def test_the_bound_is_found_by_parts_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, bias, norm = some(LAYOUTS["q4_k"], 46, WIDTH), randn(46), randn(WIDTH)
    whole = scale_of_gated(matrix, bias, norm)
    for rows in (1, 5, 45):
        monkeypatch.setattr(low_bit_bound, "_AT_ONCE", rows * WIDTH)
        assert torch.equal(scale_of_gated(matrix, bias, norm).growth, whole.growth)


def test_each_rank_has_a_bound_of_its_own(handed: list[low_bit_matmul.Float16Activations]) -> None:
    """A rank's bound is that of its rows of gate and up. The partial sums are then added."""
    layer, x, residual = Layer.of("q4_0", "q4_0", 192), randn(4, WIDTH, dtype=HALF), randn(4, 12, dtype=HALF)
    wide, behind = layer.gate_up.parts[0], layer.down.parts[0]
    wide.scales[64:96] *= 32.0  # rows of the gate that the second rank has
    total = torch.zeros(4, 12, dtype=torch.float64, device=DEVICE)
    growths = set()
    for rank, mine in enumerate((slice(0, 64), slice(64, 192))):
        both = torch.cat([torch.arange(start + mine.start, start + mine.stop, device=DEVICE) for start in (0, 192)])
        of_down = LowBit(
            behind.layout, (12, mine.stop - mine.start),
            behind.levels[:, mine.start // 8 : mine.stop // 8].contiguous(), None,
            behind.scales[:, mine.start // 32 : mine.stop // 32].contiguous(),
        )  # fmt: skip
        bias = layer.gate_up.bias
        gate_up = LinearWeight((wide.rows(both),), None if bias is None else bias[both])
        gate_up.bound_gated(layer.norm)
        assert gate_up.gated_scale is not None
        growths.add(float(gate_up.gated_scale.growth))
        down = LinearWeight((of_down,), layer.down.bias if rank == 0 else None)
        part = kernels.mlp(x, layer.norm, EPS, gate_up, down, residual.clone() if rank == 0 else None)
        total += part.double()
    assert len(growths) == len(handed) == 2
    assert relative_error(total, layer.exact(x, residual)) < 5e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_seen(value: float, handed: list[low_bit_matmul.Float16Activations]) -> None:
    layer, x = Layer.of(), randn(5, WIDTH, dtype=HALF)
    x[1, 7] = value
    got = layer.mlp(x)
    assert got[1].isnan().all()
    assert got[[0, 2, 3, 4]].isfinite().all()
    assert len(handed) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_has_no_growth(value: float) -> None:
    layer = Layer.of()
    layer.gate_up.parts[0].scales[3, 2] = value
    layer.gate_up.bound_gated(layer.norm)
    assert layer.gate_up.gated_scale is not None
    assert float(layer.gate_up.gated_scale.growth) == 1
    x = randn(4, WIDTH, dtype=HALF)
    assert not layer.mlp(x).isfinite().any()
    assert not layer.by_16_bits(x).isfinite().any()


def test_weights_of_zero_give_the_bias() -> None:
    layer = Layer.of()
    layer.gate_up.parts[0].scales.zero_()
    gate_up = LinearWeight(layer.gate_up.parts)
    gate_up.bound_gated(layer.norm)
    assert gate_up.gated_scale is not None
    assert float(gate_up.gated_scale.growth) == 1
    got = layer._replace(gate_up=gate_up).mlp(randn(4, WIDTH, dtype=HALF))
    assert layer.down.bias is not None
    assert torch.equal(got, layer.down.bias.expand(4, 12))


def test_what_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are handed over between two matmuls of `low_bit_matmul`, if the second has no column order."""
    layer = Layer.of()
    wide, behind = layer.gate_up.parts[0], layer.down.parts[0]

    def is_handed_over(
        gate_up: LinearWeight = layer.gate_up,
        down: LinearWeight = layer.down,
        tokens: int = 4,
        dtype: torch.dtype = HALF,
    ) -> bool:
        return kernels._writes_next_input(randn(tokens, WIDTH, dtype=dtype), gate_up, down)

    def of(*parts: LowBit) -> LinearWeight:
        return LinearWeight(parts)

    many = 16 if low_bit_linear.dot.takes(randn(17, WIDTH, dtype=HALF), [wide]) else 64
    taken = [tokens for tokens in range(70) if is_handed_over(tokens=tokens)]
    assert taken == list(range(3, many + 1))
    assert not is_handed_over(dtype=torch.float32)
    order = torch.randperm(WIDTH, dtype=torch.int32).to(DEVICE)
    assert is_handed_over(of(replace(wide, order=order)))
    assert not is_handed_over(down=of(replace(behind, order=order[order < 32])))
    unpacked = {8: UNPACKED}
    assert not is_handed_over(of(replace(wide, tiles=unpacked)))
    assert not is_handed_over(down=of(replace(behind, tiles=unpacked)))
    assert is_handed_over(down=of(replace(behind, tiles=unpacked)), tokens=9)
    assert is_handed_over(down=of(behind, some(LAYOUTS["q8_0"], 5, 32)))
    assert not is_handed_over(down=of(in_fp8(randn(12, 32))))
    assert not is_handed_over(down=LinearWeight(randn(12, 32, dtype=HALF)))
    for weights in ((wide, some(LAYOUTS["q8_0"], 64, WIDTH)), (in_fp8(randn(64, WIDTH)),)):
        weight = of(*weights)
        weight.bound_gated(layer.norm)
        assert weight.gated_scale is None
        assert not is_handed_over(weight)
    for weight in (layer.gate_up, layer.down):  # a copy in 16 bits multiplies
        monkeypatch.setattr(weight, "max_low_bit_tokens", 3)
        assert not is_handed_over()
        monkeypatch.setattr(weight, "max_low_bit_tokens", 4)
        assert is_handed_over()


def test_nothing_else_changes(handed: list[low_bit_matmul.Float16Activations]) -> None:
    """A layer that hands nothing over gives bitwise the results of separate matmuls."""
    layer = Layer.of()
    for tokens in (2, 17):
        x, residual = randn(tokens, WIDTH, dtype=HALF), randn(tokens, 12, dtype=HALF)
        assert torch.equal(layer.mlp(x, residual.clone()), layer.by_16_bits(x, residual.clone()))
        assert torch.equal(layer.mlp(x), layer.by_16_bits(x))
    x = randn(3, WIDTH, dtype=HALF)
    gated = kernels.norm_gated_linear(x, layer.norm, EPS, layer.gate_up)
    assert torch.equal(layer.by_16_bits(x), kernels.linear(gated, layer.down))
    assert not handed
