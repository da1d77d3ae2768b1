"""Test attention that writes the input format of the next matmul, against float64 and against 16-bit activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, ON_GPU, TOLERANCE, in_float64, make_pool, randn, relative_error, without_hidden
from lib.low_bit import LAYOUTS, columns, some
from minillm import kernels
from minillm.kernels import LinearWeight, Pages, reference
from minillm.kernels.linear.low_bit.layouts import UNPACKED, expanded, in_fp8

pytest.importorskip("triton")
from minillm.kernels.attention import decode as decode_attention
from minillm.kernels.linear.low_bit import bound as low_bit_bound
from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit import few_tokens as low_bit_matmul
from minillm.kernels.linear.low_bit.bound import scale_of_attended

HALF = torch.float16  # the interpreter cuts bfloat16 off
EPS = 1e-5
HEADS, KV_HEADS, DIM = (32, 8, 128) if ON_GPU else (16, 2, 128)
WIDTH, OUT, HIDDEN = HEADS * DIM, 12, 256


@pytest.fixture(autouse=True)
def _kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"low_bit_linear": low_bit_linear, "low_bit_bound": low_bit_bound, "decode_attention": decode_attention}
    for name, module in modules.items():
        monkeypatch.setattr(kernels, name, module, raising=False)
    if not ON_GPU:
        # Few sequences are cut into parts on a GPU, which has many processors; the reference computes what is not.
        monkeypatch.setattr(decode_attention, "num_splits_for", lambda *args: 3)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[low_bit_matmul.Float16Activations | None]:
    """Collect the activations that attention writes for the matmul after it."""
    seen, write = [], decode_attention.attention_to_float16

    def noted(*args: Any) -> low_bit_matmul.Float16Activations | None:
        seen.append(write(*args))
        return seen[-1]

    monkeypatch.setattr(decode_attention, "attention_to_float16", noted)
    return seen


class Layer(NamedTuple):
    """A layer's q, k, v and o. Cached values are within the bound of its own v."""

    norm: Tensor
    qkv: LinearWeight
    o: LinearWeight

    @classmethod
    def of(cls, name: str = "q4_0", *, dtype: torch.dtype = HALF) -> Layer:
        rows = KV_HEADS * DIM
        # q's rows are not looked at, and only as many as they are counts.
        q = some(LAYOUTS["q4_0"], WIDTH + rows, HIDDEN, 1) if ON_GPU else some(LAYOUTS["q4_0"], WIDTH + rows, 32, 1)
        v = some(LAYOUTS["q8_0"], rows, q.shape[1], 2)
        o = LinearWeight((some(LAYOUTS[name], OUT, WIDTH, 3),), randn(OUT, dtype=dtype))
        layer = cls(randn(q.shape[1], dtype=dtype), LinearWeight((q, v)), o)
        o.bound_attended(layer.qkv, layer.norm)
        return layer

    def add(self, q: Tensor, pages: Pages, residual: Tensor) -> Tensor:
        return kernels.attend_add(q, pages, DIM**-0.5, self.o, residual)

    def by_16_bits(self, q: Tensor, pages: Pages, residual: Tensor) -> Tensor:
        attended = decode_attention.paged_attention(q, pages, DIM**-0.5)
        return kernels.linear_add(attended.flatten(1), self.o, residual)

    def exact(self, q: Tensor, pages: Pages, residual: Tensor) -> Tensor:
        o = expanded(self.o.parts).double(), None if self.o.bias is None else self.o.bias.double()
        return reference.attend_add(q.double(), in_float64(pages), DIM**-0.5, o, residual.double())


def inputs(lengths: list[int], *, dtype: torch.dtype = HALF, window: int | None = None, in_8_bits: bool = False) -> Any:
    pool = make_pool(lengths, KV_HEADS, DIM, dtype, 16, in_8_bits=in_8_bits)._replace(window=window)
    q = randn(len(lengths), HEADS + 2 * KV_HEADS, DIM, dtype=dtype)[:, :HEADS]  # as it lies between k and v
    return q, pool, randn(len(lengths), OUT, dtype=dtype)


@pytest.mark.parametrize(
    ("lengths", "name", "window", "in_8_bits"),
    [
        ([70, 3, 130], "q4_0", None, False),
        ([1, 64, 65, 0, 100, 37, 129, 5, 191], "q6_k", None, False),
        ([40, 150, 180], "q8_0", 130, False),
        ([40, 90, 150, 1], "q4_k", None, True),
        *([([700, 1, 4095, 64] * 4, "q4_k", None, False), ([300] * 5, "q6_k", None, True)] if ON_GPU else []),
    ],
)
def test_the_sum_is_that_of_float64(
    lengths: list[int], name: str, window: int | None, in_8_bits: bool, handed: list[Any]
) -> None:
    q, pool, residual = inputs(lengths, window=window, in_8_bits=in_8_bits)
    layer = Layer.of(name)
    exact = layer.exact(q, pool, residual)
    pages, added = without_hidden(pool), residual.clone()
    assert layer.add(q, pages, added) is added
    before = layer.by_16_bits(q, pages, residual.clone())
    assert relative_error(added, exact) < max(2e-3, 1.1 * relative_error(before, exact))
    assert len(handed) == 1
    wide = reference.paged_attention(q.double(), in_float64(pool), DIM**-0.5).flatten(1)
    assert handed[0] is not None
    assert relative_error(columns(handed[0]), wide) < 2e-3


def test_bfloat16(handed: list[Any]) -> None:
    layer, (q, pool, residual) = Layer.of(dtype=torch.bfloat16), inputs([100, 20, 150], dtype=torch.bfloat16)
    exact = layer.exact(q, pool, residual)
    assert relative_error(layer.add(q, without_hidden(pool), residual), exact) < TOLERANCE[torch.bfloat16]
    assert handed[0] is not None


def test_no_value_is_beyond_the_bound() -> None:
    """The worst input of each of v's rows points as the row does; rows of q and k may be of any size."""
    parts = tuple(some(LAYOUTS[name], 24, HIDDEN, seed) for seed, name in enumerate(("q4_0", "q6_k", "q8_0")))
    parts[2].scales[:12] *= 64  # of the largest rows some are not v's
    bias, norm = randn(72) * 3, randn(HIDDEN) * 100
    weight = torch.cat([expanded((part,)).double() for part in parts]) * norm.double()
    worst = HIDDEN**0.5 * weight.norm(dim=1) + bias.abs().double()
    for num_values in (8, 24, 30, 72):
        scale = scale_of_attended(parts, bias, norm, num_values)
        assert 2**14 <= float(worst[-num_values:].max() * scale.growth) <= 2**15
        assert float(scale.growth.log2()) % 1 == 0
        plain = scale_of_attended(parts, None, norm, num_values)
        assert 2**14 <= float((worst - bias.abs())[-num_values:].max() * plain.growth) <= 2**15
    parts[0].scales[:] = 6e4  # of q and k
    assert torch.equal(
        scale_of_attended(parts, bias, norm, 30).growth, scale_of_attended(parts[1:], bias[24:], norm, 30).growth
    )


def test_the_largest_values_that_there_can_be(handed: list[Any]) -> None:
    """All values are at the bound, and the stored results fit float16."""
    layer, (q, pool, residual) = Layer.of(), inputs([30, 90, 150])
    scale = layer.o.attended_scale
    assert scale is not None
    at_bound = float(2**15 / scale.growth)
    pool = pool._replace(v=torch.full_like(pool.v, at_bound))
    layer.add(q, without_hidden(pool), residual)
    assert handed[0] is not None
    assert relative_error(columns(handed[0]), torch.full((3, WIDTH), at_bound, device=DEVICE)) < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_seen(value: float, handed: list[Any]) -> None:
    layer, (q, pool, residual) = Layer.of(), inputs([30, 90, 150])
    q[1, 3, 7] = value
    got = layer.add(q, without_hidden(pool), residual)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()
    assert handed[0] is not None


def test_what_is_handed_over(handed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer.of()
    seen = low_bit_linear.takes_float16
    part = layer.o.parts[0]
    x = randn(4, WIDTH, dtype=HALF)
    assert [n for n in range(18) if seen(randn(n, WIDTH, dtype=HALF), layer.o.parts)][:14] == list(range(3, 17))
    assert not seen(x.float(), layer.o.parts)
    assert not seen(x, (replace(part, order=torch.randperm(WIDTH, dtype=torch.int32).to(DEVICE)),))
    assert not seen(x, (replace(part, tiles={8: UNPACKED}),))
    for qkv, o in (
        (LinearWeight(randn(WIDTH + 32, 32, dtype=HALF)), LinearWeight((part,))),
        (LinearWeight((in_fp8(randn(WIDTH + 32, 32)),)), LinearWeight((part,))),
        (layer.qkv, LinearWeight(randn(OUT, WIDTH, dtype=HALF))),
        (layer.qkv, LinearWeight((in_fp8(randn(OUT, WIDTH)),))),
    ):
        o.bound_attended(qkv, layer.norm)
        assert o.attended_scale is None
    # Contexts in one part are merged by nobody; nor does a product know where other heads end.
    q, pool, residual = inputs([20, 30, 40])
    pages = without_hidden(pool)
    monkeypatch.setattr(decode_attention, "num_splits_for", lambda *args: 1)
    monkeypatch.setattr(kernels, "paged_attention", lambda *args: decode_attention.paged_attention(*args[:3]))
    expected = layer.by_16_bits(q, pages, residual.clone())
    assert torch.equal(layer.add(q, pages, residual.clone()), expected)
    assert handed == [None]
    monkeypatch.setattr(decode_attention, "num_splits_for", lambda *args: 3)
    few = pages._replace(k=pages.k[:, :, :1].contiguous(), v=pages.v[:, :, :1].contiguous())
    scale = layer.o.attended_scale
    assert scale is not None
    assert decode_attention.attention_to_float16(q[:, :8], few, 0.1, scale) is None
