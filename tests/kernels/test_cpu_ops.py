"""The CPU versions against the reference in float64, over odd shapes, shuffled tables and pools full of NaN."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import HostPlan, LinearWeight, cpu, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZE = 4  # block size of most pools here


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def make_pool(lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, order: str):
    """K and V pools whose unused slots hold NaN, and tables over their blocks."""
    rng = random.Random(len(lengths) * 7 + block_size)
    widths = [-(-length // block_size) for length in lengths]
    num_blocks = sum(widths) + 3
    blocks = list(range(num_blocks))
    if order == "shuffled":
        rng.shuffle(blocks)
    generator = torch.Generator().manual_seed(sum(lengths))
    pools = []
    for _ in range(2):
        pool = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
        pools.append(pool)
    tables = torch.randint(0, num_blocks, (len(lengths), max([*widths, 1]) + 2), dtype=torch.int32)
    start = 0
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        own = blocks[start : start + width]
        start += width
        tables[row, :width] = torch.tensor(own, dtype=torch.int32)
        for pool in pools:
            for position in range(length):
                values = torch.randn(kv_heads, head_dim, generator=generator)
                pool[own[position // block_size], position % block_size] = values.to(dtype)
    return pools[0], pools[1], tables


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (9, 3, 64), (8, 8, 80), (6, 1, 96)])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_paged_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, order: str) -> None:
    for block_size in (1, 4, 16):
        lengths = [1, block_size, block_size + 1, 0, 3 * block_size - 1, 37]
        k, v, tables = make_pool(lengths, kv_heads, head_dim, dtype, block_size, order)
        q = torch.randn(len(lengths), heads + 2, head_dim).to(dtype)[:, 1:-1]  # not contiguous
        context_lens = torch.tensor(lengths, dtype=torch.int32)
        expected = reference.paged_attention(q.double(), k.double(), v.double(), tables, context_lens, 0.3)
        got = kernels.paged_attention(q, k, v, tables, context_lens, 0.3)
        assert got.dtype == dtype
        assert relative_error(got, expected) < TOLERANCE[dtype]
        assert not got[3].any(), "an empty context gives zeros"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (9, 3, 64), (6, 1, 96)])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_prefill_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, order: str) -> None:
    chunks = [1, 5, 16, 0, 7, 33]
    lengths = [1, 5, 40, 9, 8, 34]  # cached tokens included
    k, v, tables = make_pool(lengths, kv_heads, head_dim, dtype, SIZE, order)
    q = torch.randn(sum(chunks), heads + 2, head_dim).to(dtype)[:, 1:-1]
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    arguments = (tables, context_lens, cu_seqlens, 0.3)
    expected = reference.prefill_attention(q.double(), k.double(), v.double(), *arguments)
    assert relative_error(kernels.prefill_attention(q, k, v, *arguments), expected) < TOLERANCE[dtype]


def test_the_reference_attends_like_plain_softmax() -> None:
    """The specification itself, against one query written out by hand."""
    k, v, tables = make_pool([11], 2, 32, torch.float64, SIZE, "shuffled")
    q = torch.randn(1, 4, 32, dtype=torch.float64)
    out = reference.paged_attention(q, k, v, tables, torch.tensor([11]), 0.5)
    for head in range(4):
        keys = torch.stack([k[tables[0, i // SIZE], i % SIZE, head // 2] for i in range(11)])
        values = torch.stack([v[tables[0, i // SIZE], i % SIZE, head // 2] for i in range(11)])
        weights = (keys @ q[0, head] * 0.5).exp()
        torch.testing.assert_close(out[0, head], weights @ values / weights.sum())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotary_write_kv(dtype: torch.dtype, rotary_dim: int) -> None:
    tokens, heads, kv_heads, dim = 7, 6, 2, 64
    packed = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    angles = torch.randn(tokens, rotary_dim // 2)
    slots = torch.tensor([9, -1, 3, 4, -1, 0, 11])
    pools = [torch.full((3, SIZE, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    q, k, v = packed.clone().split((heads, kv_heads, kv_heads), dim=1)
    kernels.rotary_write_kv(q, k, v, angles.cos(), angles.sin(), pools[0], pools[1], slots)
    for head in range(heads):
        for token in range(tokens):
            x = packed[token, head].double()
            pairs = torch.complex(x[: rotary_dim // 2], x[rotary_dim // 2 : rotary_dim])
            turned = pairs * torch.polar(torch.ones_like(angles[token]).double(), angles[token].double())
            expected = torch.cat((turned.real, turned.imag, x[rotary_dim:]))
            assert relative_error(q[token, head], expected) < TOLERANCE[dtype]
    written = pools[0].flatten(0, 1), pools[1].flatten(0, 1)
    expected_k = reference.rotary(packed[:, heads : heads + kv_heads].double(), angles.cos(), angles.sin())
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert relative_error(written[0][slot], expected_k[token]) < TOLERANCE[dtype]
            assert torch.equal(written[1][slot], packed[token, heads + kv_heads :])
    assert written[0][[1, 2, 5, 6, 7, 8, 10]].isnan().all(), "padding and other slots stay as they were"
    assert torch.equal(k, packed[:, heads : heads + kv_heads]), "k itself is left as it was"


@pytest.mark.parametrize("planned", [True, False])
def test_rotary_write_kv_without_padding_takes_the_fast_way_to_the_same_result(planned: bool) -> None:
    packed = torch.randn(5, 8, 64)
    angles = torch.randn(5, 32)
    turn, slots = (angles.cos(), angles.sin()), torch.tensor([9, 2, 3, 4, 0])
    no_decodes = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    results = []
    for fast in (True, False):
        pools = [torch.zeros(3, SIZE, 2, 64) for _ in range(2)]
        q, k, v = packed.clone().split((4, 2, 2), dim=1)
        if fast:
            plan = cpu.plan_step(*turn, slots, *no_decodes, pools[0], 4) if planned else None
            cpu.rotary_write_kv(q, k, v, *turn, pools[0], pools[1], slots, plan)
        else:
            reference.rotary_write_kv(q, k, v, *turn, pools[0], pools[1], slots)
        results.append((q, *pools))
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 33), (0, 8)])
def test_norms_and_activation(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(kernels.rms_norm(x, weight, 1e-5), expected) < TOLERANCE[dtype]
    gate_up = torch.randn(shape[0], 2 * shape[1]).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(kernels.silu_mul(gate_up), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, bias = torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype) if biased else None
    x = torch.randn(rows, 80).to(dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = kernels.linear(x, LinearWeight(weight, bias))
    assert got.shape == (rows, 48)
    assert relative_error(got, expected) < TOLERANCE[dtype]


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


@pytest.mark.parametrize(
    ("lengths", "together"),
    [([9], False), ([1, 37, 16], False), ([5, 40, 17, 33, 1], False), ([20, 40], True), ([33, 17, 40, 25, 40], True)],
)
@pytest.mark.parametrize("heads", [3, 6, 9, 12])
def test_a_plan_serves_every_layer_of_its_step(lengths: list[int], together: bool, heads: int) -> None:
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    plan = None
    for _ in range(3):
        k, v, tables = make_pool(lengths, 3, 32, torch.float32, SIZE, "shuffled")
        plan = plan or _plan([0] * len(lengths), tables, context_lens, k, heads)
        assert isinstance(plan.decodes, cpu.Together) == together
        q = torch.randn(len(lengths), heads, 32)
        expected = reference.paged_attention(q.double(), k.double(), v.double(), tables, context_lens, 0.3)
        assert relative_error(kernels.paged_attention(q, k, v, tables, context_lens, 0.3, plan), expected) < 1e-5


def test_a_plan_knows_padding() -> None:
    k, _, tables = make_pool([5], 3, 32, torch.float32, SIZE, "in order")
    lens = torch.tensor([5], dtype=torch.int32)
    assert _plan([4, -1], tables, lens, k, 4).padded
    assert not _plan([4, 0], tables, lens, k, 4).padded


def _plan(slots: list[int], tables: Tensor, lens: Tensor, k: Tensor, heads: int) -> HostPlan:
    angles = torch.randn(len(slots), 4)
    return cpu.plan_step(angles.cos(), angles.sin(), torch.tensor(slots), tables, lens, k, heads)


def test_block_copy_moves_every_layer_and_nothing_else() -> None:
    pool = torch.randn(3, 2, 6, SIZE, 2, 8)
    before = pool.clone()
    kernels.block_copy(pool, torch.tensor([[0, 3], [0, 5], [2, 1]]))
    for source, destination in ((0, 3), (0, 5), (2, 1), (0, 0), (2, 2), (4, 4)):
        assert torch.equal(pool[:, :, destination], before[:, :, source])
