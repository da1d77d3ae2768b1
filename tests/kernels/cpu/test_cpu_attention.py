"""Attention and rotary embedding on a CPU against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from lib.kernels import CPU_TOLERANCE, in_float64, make_pool, relative_error, without_hidden
from minillm import kernels
from minillm.kernels import HeadNorms, HostPlan, LayerCache, Pages, RotaryInputs, cpu, reference

SIZE = 4  # block size of most pools here
CPU = torch.device("cpu")


def pool_on_cpu(
    lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, order: str, in_8_bits: bool
) -> Pages:
    options = {"seed": sum(lengths), "shuffled": order == "shuffled", "device": CPU, "in_8_bits": in_8_bits}
    return make_pool(lengths, kv_heads, head_dim, dtype, block_size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (9, 3, 64), (8, 8, 80), (6, 1, 96)])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("window", [None, 1, 3, 16, 40])
def test_paged_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, order: str, window: int | None, in_8_bits: bool
) -> None:
    for block_size in (1, 4, 16):
        lengths = [1, block_size, block_size + 1, 0, 3 * block_size - 1, 37]
        pool = pool_on_cpu(lengths, kv_heads, head_dim, dtype, block_size, order, in_8_bits)._replace(window=window)
        q = torch.randn(len(lengths), heads + 2, head_dim).to(dtype)[:, 1:-1]  # not contiguous
        expected = reference.paged_attention(q.double(), in_float64(pool), 0.3)
        got = kernels.paged_attention(q, without_hidden(pool), 0.3)
        assert got.dtype == dtype
        assert relative_error(got, expected) < CPU_TOLERANCE[dtype]
        assert not got[3].any(), "an empty context gives zeros"


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 32), (9, 3, 64), (6, 1, 96)])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("window", [None, 1, 3, 16, 33, 34, 40])
def test_prefill_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, order: str, window: int | None, in_8_bits: bool
) -> None:
    chunks = [1, 5, 16, 0, 7, 33]
    lengths = [1, 5, 40, 9, 8, 34]  # cached tokens included
    pool = pool_on_cpu(lengths, kv_heads, head_dim, dtype, SIZE, order, in_8_bits)._replace(window=window)
    q = torch.randn(sum(chunks), heads + 2, head_dim).to(dtype)[:, 1:-1]
    cu_seqlens = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    expected = reference.prefill_attention(q.double(), in_float64(pool), cu_seqlens, 0.3)
    assert relative_error(kernels.prefill_attention(q, pool, cu_seqlens, 0.3), expected) < CPU_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotary_write_kv(dtype: torch.dtype, rotary_dim: int) -> None:
    tokens, heads, kv_heads, dim = 7, 6, 2, 64
    packed = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    angles = torch.randn(tokens, rotary_dim // 2)
    slots = torch.tensor([9, -1, 3, 4, -1, 0, 11])
    pools = [torch.full((3, SIZE, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    q, k, v = packed.clone().split((heads, kv_heads, kv_heads), dim=1)
    kernels.rotary_write_kv(q, k, v, RotaryInputs(angles.cos(), angles.sin(), slots), LayerCache(pools[0], pools[1]))
    for head in range(heads):
        for token in range(tokens):
            x = packed[token, head].double()
            pairs = torch.complex(x[: rotary_dim // 2], x[rotary_dim // 2 : rotary_dim])
            turned = pairs * torch.polar(torch.ones_like(angles[token]).double(), angles[token].double())
            expected = torch.cat((turned.real, turned.imag, x[rotary_dim:]))
            assert relative_error(q[token, head], expected) < CPU_TOLERANCE[dtype]
    written = pools[0].flatten(0, 1), pools[1].flatten(0, 1)
    expected_k = reference.rotary(packed[:, heads : heads + kv_heads].double(), angles.cos(), angles.sin())
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert relative_error(written[0][slot], expected_k[token]) < CPU_TOLERANCE[dtype]
            assert torch.equal(written[1][slot], packed[token, heads + kv_heads :])
    assert written[0][[1, 2, 5, 6, 7, 8, 10]].isnan().all(), "padding and other slots stay as they were"
    assert torch.equal(k, packed[:, heads : heads + kv_heads]), "k itself is left as it was"


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("normed", ["before", "after", ""])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotary_write_kv_without_padding_takes_the_fast_way_to_the_same_result(
    planned: bool, normed: str, tokens: int
) -> None:
    packed = torch.randn(tokens, 8, 64)
    angles = torch.randn(tokens, 32)
    rope = RotaryInputs(angles.cos(), angles.sin(), torch.tensor([9, 2, 3, 4, 0])[:tokens])
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-5, normed == "after") if normed else None
    results = []
    for fast in (True, False):
        pools = [torch.zeros(3, SIZE, 2, 64) for _ in range(2)]
        q, k, v = packed.clone().split((4, 2, 2), dim=1)
        if fast:
            no_decodes = Pages(
                pools[0], pools[1], torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
            )
            plan = cpu.plan_step(rope, no_decodes, 4) if planned else None
            cpu.rotary_write_kv(q, k, v, rope, LayerCache(pools[0], pools[1]), norms, plan)
        else:
            reference.rotary_write_kv(q, k, v, rope, LayerCache(pools[0], pools[1]), norms)
        results.append((q, *pools))
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_rounded_as_the_reference_rounds_them(dtype: torch.dtype, padded: bool) -> None:
    """Bit for bit what `quantize_rows` makes of the rows of a cache of q's dtype, on the fast way and the other."""
    packed, angles = torch.randn(5, 8, 64).to(dtype), torch.randn(5, 32)
    packed[2, 5], packed[3, 6, 1] = 0, float("nan")
    slots = torch.tensor([9, 2, 3, 4, -1 if padded else 0])
    plain = LayerCache(*(torch.zeros(3, SIZE, 2, 64, dtype=dtype) for _ in "kv"))
    levels = [torch.full((3, SIZE, 2, 64), 99, dtype=torch.int8) for _ in "kv"]
    narrow = LayerCache(*levels, *(torch.full((3, 2, SIZE), 99.0) for _ in "kv"))
    for cache in (plain, narrow):
        q, k, v = packed.clone().split((4, 2, 2), dim=1)
        kernels.rotary_write_kv(q, k, v, RotaryInputs(angles.cos(), angles.sin(), slots), cache)
    written = slots[slots >= 0]
    others = [slot for slot in range(3 * SIZE) if slot not in written.tolist()]
    for rows, got, factors in ((plain.k, narrow.k, narrow.k_scales), (plain.v, narrow.v, narrow.v_scales)):
        assert factors is not None
        flat = factors.transpose(1, 2).flatten(0, 1)
        expected, scales = reference.quantize_rows(rows.flatten(0, 1)[written])
        assert torch.equal(got.flatten(0, 1)[written], expected)
        torch.testing.assert_close(flat[written], scales, atol=0, rtol=0, equal_nan=True)
        assert (got.flatten(0, 1)[others] == 99).all()
        assert (flat[others] == 99).all()


@pytest.mark.parametrize(
    ("lengths", "together"),
    [([9], False), ([1, 37, 16], False), ([5, 40, 17, 33, 1], False), ([20, 40], True), ([33, 17, 40, 25, 40], True)],
)
@pytest.mark.parametrize("heads", [3, 6, 9, 12])
@pytest.mark.parametrize("window", [None, 39])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_plan_serves_every_layer_of_its_step(
    lengths: list[int], together: bool, heads: int, window: int | None, in_8_bits: bool
) -> None:
    plan = None
    for _ in range(3):
        pool = pool_on_cpu(lengths, 3, 32, torch.float32, SIZE, "shuffled", in_8_bits)._replace(window=window)
        plan = plan or _plan([0] * len(lengths), pool, heads)
        assert isinstance(plan.decodes, cpu.PaddedDecodes) == together
        q = torch.randn(len(lengths), heads, 32)
        expected = reference.paged_attention(q.double(), in_float64(pool), 0.3)
        assert relative_error(kernels.paged_attention(q, without_hidden(pool), 0.3, plan), expected) < 1e-5


def test_a_plan_knows_padding() -> None:
    pool = pool_on_cpu([5], 3, 32, torch.float32, SIZE, "in order", in_8_bits=False)
    assert _plan([4, -1], pool, 4).padded
    assert not _plan([4, 0], pool, 4).padded


def _plan(slots: list[int], pool: Pages, heads: int) -> HostPlan:
    angles = torch.randn(len(slots), 4)
    return cpu.plan_step(RotaryInputs(angles.cos(), angles.sin(), torch.tensor(slots)), pool, heads)
