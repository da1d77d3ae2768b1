"""Test lane kernels for attention over an 8-bit cache: instructions, matmuls, and values that they must ignore."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.kernels import (
    DEVICE,
    ON_GPU,
    TOLERANCE,
    combined,
    forked_tables,
    in_float64,
    make_pool,
    randn,
    relative_error,
    rounded,
    shape_of,
)
from minillm.kernels import Pages, reference
from minillm.kernels.attention.plan import FREE, WorkList, plan_attention

pytest.importorskip("triton")
import triton
import triton.language as tl

from minillm.kernels.attention import int8_decode as attention_lanes
from minillm.kernels.attention import int8_shared as prefix_lanes
from minillm.kernels.attention.decode import paged_attention
from minillm.kernels.attention.int8_decode import attend_group, load_group
from minillm.kernels.attention.int8_prefill import stage
from minillm.kernels.attention.prefill import prefill_attention
from minillm.kernels.attention.shared import prefix_attention
from minillm.kernels.lanes import (
    bytes_at,
    int8_pair_to_bf16x2,
    int8_to_bf16x4,
    int8_to_f16x4,
    logarithm,
    mma,
    of_eights,
    power,
    reciprocal,
    transpose4x4_bytes,
    transpose8x8,
    two_digits,
)

Attend = Callable[[Tensor, Pages], Tensor]
WARPS = 2
LANES = 32 * WARPS


@triton.jit
def _instructions_kernel(out_ptr, words_ptr, LANES: tl.constexpr, WARPS: tl.constexpr):
    lanes = tl.arange(0, LANES)
    a, b = tl.load(words_ptr + lanes), tl.load(words_ptr + LANES + lanes)
    c, d = tl.load(words_ptr + 2 * LANES + lanes), tl.load(words_ptr + 3 * LANES + lanes)
    e, f = tl.load(words_ptr + 4 * LANES + lanes), tl.load(words_ptr + 5 * LANES + lanes)
    signed = mma((a, b), (c, d), (e, f), (a, b, c, d), False, WARPS)
    unsigned = mma((a, b), (c, d), (e, f), (a, b, c, d), True, WARPS)
    number = transpose4x4_bytes(a, b, c, d)
    high, low = int8_to_f16x4(a)
    pairs = (
        int8_pair_to_bf16x2(a, b, 0),
        int8_pair_to_bf16x2(a, b, 1),
        int8_pair_to_bf16x2(a, b, 2),
        int8_pair_to_bf16x2(a, b, 3),
    )
    place = lanes % 2
    shared = tl.load(words_ptr + lanes // 8 * 8)  # the same in eight lanes
    others = (
        transpose8x8(a, WARPS), two_digits(a & 0xFFFF, b & 0xFFFF), bytes_at(a, b, c, d, place),
        of_eights(shared, WARPS), high, low,
    )  # fmt: skip
    results = signed + unsigned + number + others + pairs + int8_to_bf16x4(a)
    for i in tl.static_range(len(results)):
        tl.store(out_ptr + i * LANES + lanes, results[i])


def as_bytes(words: Tensor) -> Tensor:
    """The four bytes of each word, with their signs, the lowest first."""
    return words.contiguous().view(torch.int8).view(*words.shape, 4)


def test_instructions_do_what_their_manual_says() -> None:
    """Lane 4r + t has of a row r what NVIDIA's manual of PTX says: bytes 4t to 4t + 3."""
    words = torch.randint(-(1 << 31), 1 << 31, (6, LANES)).int()
    words[0] &= 0x7FFFFFFF  # what `of_eights` moves is compared as whole numbers
    out = torch.zeros(24, LANES, dtype=torch.int32, device=DEVICE)
    _instructions_kernel[(1,)](out, words.to(DEVICE), LANES=LANES, WARPS=WARPS, num_warps=WARPS)
    got = list(out.cpu())
    a, b, c, d = words[:4]
    by_lane = [as_bytes(each).view(WARPS, 8, 16) for each in words]  # [warp, row, 16 bytes]
    upper, lower = (torch.cat(by_lane[i : i + 2], 2).long() for i in (0, 2))
    column = torch.cat(by_lane[4:], 2).long()
    for results, numbers in ((got[:4], column), (got[4:8], column & 255)):
        for i, rows in enumerate((upper, lower)):
            sums = (rows @ numbers.mT).view(LANES, 2) + words[2 * i : 2 * i + 2].T
            expected = (sums + (1 << 31)) % (1 << 32) - (1 << 31)  # what does not fit wraps around
            assert torch.equal(torch.stack(results[2 * i : 2 * i + 2], 1).long(), expected)
    matrix = torch.stack([as_bytes(each) for each in (a, b, c, d)], 1)  # [lane, word, byte]
    assert torch.equal(torch.stack([as_bytes(each) for each in got[8:12]], 1), matrix.mT)
    turned, digits, picked, eights, first, second = got[12:18]
    pairs = a.view(torch.int16).view(WARPS, 8, 8)
    assert torch.equal(turned.view(torch.int16).view(WARPS, 8, 8), pairs.mT)
    order = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])  # (word, byte)
    assert torch.equal(as_bytes(digits), matrix[:, order[:, 0], order[:, 1]])
    assert torch.equal(as_bytes(picked), matrix[torch.arange(LANES), :, torch.arange(LANES) % 2])
    lanes = torch.arange(LANES)
    assert torch.equal(eights, a[lanes // 32 * 32 + lanes % 4 * 8])
    found = torch.stack((first, second), 1).view(torch.float16)
    assert torch.equal(found, as_bytes(a).half().view(LANES, 4))
    found = torch.stack(got[18:22], 1).view(torch.bfloat16)
    assert torch.equal(found, (matrix[:, :2].mT * 2.0**-13).bfloat16().reshape(LANES, 8))
    found = torch.stack(got[22:24], 1).view(torch.bfloat16)
    assert torch.equal(found, (as_bytes(a) * 2.0**-13).bfloat16().view(LANES, 4))


@triton.jit
def _power_kernel(out_ptr, x_ptr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(out_ptr + lanes, power(tl.load(x_ptr + lanes)))


def test_a_power_of_two_that_is_no_normal_number_may_be_zero() -> None:
    x = torch.cat((torch.linspace(-150, 20, LANES - 3), torch.tensor([float("-inf"), 0.0, float("nan")]))).to(DEVICE)
    out = torch.zeros_like(x)
    _power_kernel[(1,)](out, x, LANES=LANES, num_warps=WARPS)
    assert out[-3] == 0
    assert out[-2] == 1
    assert out[-1].isnan()
    exact = torch.exp2(x[:-3].double())
    tiny = torch.finfo(torch.float32).tiny
    assert bool(((out[:-3] - exact).abs() <= 1e-6 * exact + tiny).all())


@triton.jit
def _inverse_kernel(out_ptr, x_ptr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    x = tl.load(x_ptr + lanes)
    tl.store(out_ptr + lanes, reciprocal(x))
    tl.store(out_ptr + LANES + lanes, logarithm(x))


def test_inverses_and_logarithms_of_normal_numbers() -> None:
    x = torch.cat((torch.logspace(-37, 37, LANES - 1), torch.tensor([float("nan")]))).to(DEVICE)
    out = torch.zeros(2, LANES, device=DEVICE)
    _inverse_kernel[(1,)](out, x, LANES=LANES, num_warps=WARPS)
    assert bool(out[:, -1].isnan().all())
    exact = x[:-1].double()
    assert bool(((out[0, :-1] * exact - 1).abs() < 1e-6).all())
    assert bool(((out[1, :-1] - exact.log2()).abs() < 1e-6 + 1e-6 * exact.log2().abs()).all())


@triton.jit
def _group_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, q_stride, out_stride, scale, start,
    end, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    first = kv_head * GROUP
    queries = load_group(q_ptr + first * q_stride, q_stride, GROUP, HEAD_DIM, WARPS)
    attend_group(
        out_ptr + first * out_stride, lse_ptr + first, queries, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
        out_stride, scale * 1.4426950408889634, kv_head, start, end, q_ptr.dtype.element_ty, GROUP, HEAD_DIM,
        BLOCK_SIZE, KV_HEADS, WARPS,
    )  # fmt: skip


def attend(q: Tensor, pages: Pages, start: int, end: int, warps: int) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps, base 2, over tokens of the first table, both in float32: nothing is rounded at last."""
    num_heads, head_dim = q.shape
    out = torch.zeros(num_heads, head_dim, device=DEVICE)
    lse = torch.zeros(num_heads, device=DEVICE)
    kv_heads = pages.k.shape[2]
    _group_kernel[(kv_heads,)](
        out, lse, q, pages.k.view(torch.int32), pages.v.view(torch.int32), pages.k_scales, pages.v_scales,
        pages.tables, q.stride(0), out.stride(0), head_dim**-0.5, start, end, GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim, BLOCK_SIZE=pages.k.shape[1], KV_HEADS=kv_heads, WARPS=warps, num_warps=warps,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_scores_and_weighted_sums_are_exact_but_for_16_bits_of_the_largest(head_dim: int, group: int) -> None:
    """One token: its score, and its V. Several: weights of whole numbers, from tokens that begin anywhere."""
    dtype = (torch.bfloat16, torch.float16)[group % 2]
    pages = make_pool([77], 2, head_dim, dtype, 8, seed=group, in_8_bits=True)
    exact_pages = in_float64(pages)
    k, v = (cache[pages.tables[0].long()].flatten(0, 1).double() for cache in (pages.k, pages.v))
    assert exact_pages.k_scales is not None
    assert exact_pages.v_scales is not None
    k_scales, v_scales = (
        scales[pages.tables[0].long()].transpose(1, 2).flatten(0, 1)
        for scales in (exact_pages.k_scales, exact_pages.v_scales)
    )
    k, v = (each.repeat_interleave(group, 1) for each in (k * k_scales[..., None], v * v_scales[..., None]))
    q = randn(2 * group + 1, head_dim, dtype=dtype)[1:]  # rows of their own, at an odd place
    for start, end, warps in ((44, 45, 1), (0, 32, 1), (5, 77, 2)):
        scores = torch.einsum("hd,thd->ht", q.double(), k[start:end]) * head_dim**-0.5
        exact = torch.einsum("ht,thd->hd", scores.softmax(1), v[start:end])
        out, lse = attend(q, pages, start, end, warps)
        assert relative_error(out, exact) < 1e-4
        assert float((lse.double() - scores.logsumexp(1) * 1.4426950408889634).abs().max()) < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-38, 0.0])
def test_a_query_that_is_not_finite_spoils_its_own_head_only(value: float) -> None:
    pages = make_pool([40], 1, 64, torch.bfloat16, 8, in_8_bits=True)
    q = randn(4, 64, dtype=torch.bfloat16)
    sound = attend(q, pages, 0, 40, 1)
    if value < 1:
        q[2] = value  # so small that all tokens weigh the same
    else:
        q[2, 9] = value
    spoilt = attend(q, pages, 0, 40, 1)
    for good, got in zip(sound, spoilt, strict=True):
        assert torch.equal(got[[0, 1, 3]], good[[0, 1, 3]])
        assert bool(got[2].isnan().all()) == (not value < 1)


# --- what must not reach a result -------------------------------------------------------------------------------------


def attention_of(pages: Pages, heads: tuple[int, int, int]) -> dict[str, Attend]:
    """Decode attention, and over a tree: lanes read 8 bits in both."""
    shape, block_size = shape_of(*heads, torch.bfloat16, processors=1, in_8_bits=True), pages.k.shape[1]
    rows, lens = pages.tables.tolist(), pages.lens.tolist()
    rows = [row[: -(-length // block_size)] for row, length in zip(rows, lens, strict=True)]
    plan = plan_attention(rows, lens, block_size, shape, len(rows), FREE)
    assert plan is not None, "this batch shares nothing"
    work = WorkList.allocate(len(rows), shape, DEVICE).fill(plan)
    return {
        "decode": lambda q, pages: paged_attention(q, pages, 0.1, num_splits=1),
        "prefix": lambda q, pages: prefix_attention(q, pages, 0.1, work),
    }


def shared_pool(head_dim: int, block_size: int) -> Pages:
    """Return the pool of two sequences that share the first one's first 16 tokens."""
    pages = make_pool([29, 21], 2, head_dim, torch.bfloat16, block_size, in_8_bits=True)
    tables = pages.tables.clone()
    tables[1, : 16 // block_size] = tables[0, : 16 // block_size]
    return pages._replace(tables=tables)


@pytest.mark.parametrize(("name", "head_dim"), [("k_scales", 64), ("v_scales", 128 if ON_GPU else 64)])
def test_a_scale_that_is_nan_spoils_the_sequences_that_have_its_token(name: str, head_dim: int) -> None:
    pages = shared_pool(head_dim, 4)
    q = randn(2, 2, head_dim, dtype=torch.bfloat16)
    assert attention_lanes.takes(q, pages)
    assert prefix_lanes.takes(q, pages)
    for how, attend in attention_of(pages, (2, 2, head_dim)).items():
        sound = attend(q, pages)
        for token, spoilt in ((13, [0, 1]), (17, [1])):  # of the second sequence
            scales = getattr(pages, name).clone()
            scales[pages.tables[1, token // 4], 1, token % 4] = float("nan")
            got = attend(q, pages._replace(**{name: scales}))
            assert got[spoilt, 1].isnan().all(), how  # in the second head
            got[spoilt, 1] = sound[spoilt, 1]
            assert torch.equal(got, sound), how


@pytest.mark.parametrize("block_size", [1, 16])
def test_slots_that_no_sequence_owns_change_nothing(block_size: int) -> None:
    """Unused slots may hold any bytes and scales. So may block 0, which lanes past the end can read."""
    pages = shared_pool(64, block_size)
    free = torch.ones(pages.k.shape[:2], dtype=torch.bool, device=DEVICE)
    for table, length in zip(pages.tables.tolist(), pages.lens.tolist(), strict=True):
        for token in range(length):
            free[table[token // block_size], token % block_size] = False
    order = torch.arange(free.numel(), device=DEVICE).view_as(free)
    q = randn(2, 2, 64, dtype=torch.bfloat16)
    for how, attend in attention_of(pages, (2, 2, 64)).items():
        results = []
        for numbers, factors in (((0,), (0.0,)), ((-128, -1, 127), (float("nan"), float("inf"), float("-inf")))):
            for name in ("k", "v"):
                cache, scales = getattr(pages, name), getattr(pages, f"{name}_scales").transpose(1, 2)
                for at, (number, factor) in enumerate(zip(numbers, factors, strict=True)):
                    chosen = free & (order % len(numbers) == at)  # each kind in its part of the slots
                    cache[chosen], scales[chosen] = number, factor
            results.append(attend(q, pages))
        assert torch.equal(*results), how
        assert not results[0].isnan().any()


# --- shared blocks ----------------------------------------------------------------------------------------------------


def pool_of(tables: list[list[int]], lens: list[int], block_size: int, kv_heads: int, head_dim: int) -> Pages:
    """Random numbers for what the tables hold."""
    blocks = max(block for table in tables for block in table) + 1
    cache = randn(2, blocks, block_size, kv_heads, head_dim)
    width = max(map(len, tables)) + 1
    padded = [table + [10**6] * (width - len(table)) for table in tables]
    return rounded(
        Pages(
            cache[0],
            cache[1],
            torch.tensor(padded, dtype=torch.int32, device=DEVICE),
            torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        )
    )


def check_tree(
    tables: list[list[int]], lens: list[int], block_size: int, heads: tuple[int, int, int], dtype: torch.dtype,
    processors: int = 1, k_growth: float | Tensor = 1.0, v_growth: float | Tensor = 1.0, at_a_time: int = 1,
) -> None:  # fmt: skip
    pages = pool_of(tables, lens, block_size, *heads[1:])
    assert pages.k_scales is not None
    assert pages.v_scales is not None
    pages = pages._replace(k_scales=pages.k_scales * k_growth, v_scales=pages.v_scales * v_growth)
    shape = shape_of(*heads, dtype, processors, in_8_bits=True)
    plan = plan_attention(tables, lens, block_size, shape, len(tables), FREE)
    assert plan is not None
    in_use = max(1, processors // at_a_time)  # by two on half of the multiprocessors
    plan = replace(plan, counts=[plan.counts[0], in_use, at_a_time, plan.counts[3]])
    work = WorkList.allocate(len(tables), shape, DEVICE).fill(plan)
    q, scale = randn(len(tables), heads[0], heads[2], dtype=dtype), heads[2] ** -0.5
    assert prefix_lanes.takes(q, pages)
    exact = reference.paged_attention(q.double(), in_float64(pages), scale)
    # Weights are in bfloat16 there, whatever the queries are.
    assert relative_error(prefix_attention(q, pages, scale, work), exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "shared"),  # shared tokens: of one tile or of several, the last of them not full
    combined([64, 128], [1, 2, 16, 256 if ON_GPU else 64], [1, 200]),
)
def test_nodes_in_8_bits_of_any_length(head_dim: int, block_size: int, shared: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[block_size % 3 % 2]
    common = list(range(-(-shared // block_size)))
    own = [iter(range(1000 * i, 1000 * i + 999)) for i in (1, 2, 3)]
    lens = [len(common) * block_size + tail for tail in (1, 3, block_size + 2)]
    tables = [
        common + [next(fresh) for _ in range(-(-length // block_size) - len(common))]
        for fresh, length in zip(own, lens, strict=True)
    ]
    numbers = {block: i for i, block in enumerate(sorted({block for table in tables for block in table}))}
    tables = [[numbers[block] for block in table] for table in tables]
    check_tree(tables, lens, block_size, (4, 2, head_dim) if shared == 1 else (3, 1, head_dim), dtype)


@pytest.mark.parametrize("at_a_time", [1, 2])
@pytest.mark.parametrize(
    ("processors", "num_seqs"), [(132, 30), (2, 30)] if ON_GPU else [(8, 4), (2, 5)]
)  # the second: few multiprocessors, whose programs take several items
def test_trees_in_8_bits(processors: int, num_seqs: int, at_a_time: int) -> None:
    tables, lens = forked_tables(num_seqs, 4, 2000 if ON_GPU else 40, random.Random(3))
    check_tree(tables, lens, 4, (6, 2, 64), torch.float16, processors, at_a_time=at_a_time)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("v_growth", [1e4, 1e-20])
def test_values_of_any_size_are_weighed(head_dim: int, v_growth: float) -> None:
    """V up to a million, or near zero: weights hold its scales."""
    tables = [[*range(20), 20 + i] for i in range(3)]
    check_tree(tables, [83, 81, 84], 4, (4, 2, head_dim), torch.bfloat16, v_growth=v_growth)


@pytest.mark.parametrize("sizes", [(1.0, 1e4), (1e4, 1.0), (1.0, 300.0), (300.0, 1.0)])
def test_tiles_outweigh_others_however_far(sizes: tuple[float, float]) -> None:
    """Weights, which V's scales are part of, overflow where K grows by 300: then all is computed again."""
    tables = [[*range(20), 20 + i] for i in range(3)]
    growth = torch.where(torch.arange(23, device=DEVICE) < 16, *sizes)[:, None, None]  # from the second tile on
    k_growth, v_growth = (growth, 1.0) if 300.0 in sizes else (1.0, growth)
    check_tree(tables, [83, 81, 84], 4, (4, 2, 64), torch.bfloat16, k_growth=k_growth, v_growth=v_growth)


# --- contexts that a prompt unpacks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [29, 30, 31, 39, 40, 41])
def test_a_context_is_unpacked_if_it_ends_in_the_scratch_and_read_as_it_is_if_not(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of 30, 50 and 10 tokens: each is read from the one place that has it. The other holds NaN."""
    lengths = [30, 50, 10]
    pages = make_pool(lengths, 2, 64, torch.bfloat16, 4, in_8_bits=True)
    assert pages.k_scales is not None
    assert pages.v_scales is not None
    starts = torch.tensor([0, 5, 9, 12], dtype=torch.int32, device=DEVICE)
    q = randn(12, 4, 64, dtype=torch.bfloat16)
    exact = reference.prefill_attention(q.double(), in_float64(pages), starts, 0.1)
    is_unpacked = [begin + length <= capacity for begin, length in zip((0, 30, 80), lengths, strict=True)]
    assert sum(is_unpacked) == (capacity >= 30)
    new_empty = Tensor.new_empty

    def empty_and_nan(self: Tensor, *sizes: int, **options: Any) -> Tensor:
        made = new_empty(self, *sizes, **options)
        return made.fill_(float("nan")) if made.dtype == q.dtype else made

    monkeypatch.setattr(Tensor, "new_empty", empty_and_nan)
    k, v = stage(pages, starts, q.dtype, capacity)
    for got, levels, scales in ((k, pages.k, pages.k_scales), (v, pages.v, pages.v_scales)):
        table = pages.tables[0].long()
        numbers = (levels[table].float() * scales[table].transpose(1, 2)[..., None]).flatten(0, 1)[:30]
        if is_unpacked[0]:
            torch.testing.assert_close(got[:30].float(), numbers, rtol=2**-7, atol=0)
        assert got[30 * is_unpacked[0] :].isnan().all()

    def stage_and_forget(pages: Pages, *rest: Any) -> tuple[Tensor, Tensor]:
        """Dequantize, then spoil the 8-bit scales, so that a later read of them shows."""
        unpacked = stage(pages, *rest)
        for scales in (pages.k_scales, pages.v_scales):
            assert scales is not None
            if is_unpacked[0]:
                scales[pages.tables[0, :8].long()] = float("nan")
        return unpacked

    monkeypatch.setattr("minillm.kernels.attention.prefill.stage", stage_and_forget)
    assert relative_error(prefill_attention(q, pages, starts, 0.1, capacity=capacity), exact) < TOLERANCE[q.dtype]
