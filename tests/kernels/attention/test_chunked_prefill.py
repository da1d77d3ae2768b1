"""Causal attention of chunks over block tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.kernels import (
    DEVICE,
    DTYPES,
    HEADS,
    ON_GPU,
    TOLERANCE,
    combined,
    drawn,
    dtypes,
    in_float64,
    long,
    make_pool,
    randn,
    relative_error,
)
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.attention.prefill import _prefill_attention_kernel, prefill_attention


def check_prefill(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    chunks: list[tuple[int, int]],
    *,
    seed: int = 2,
    window: int | None = None,
    in_8_bits: bool = False,
    capacity: int | None = None,
) -> None:
    """Compare with the reference; ``chunks`` lists (tokens of the chunk, tokens cached before it)."""
    num_heads, kv_heads, head_dim = heads
    lengths = [count + cached if count else cached for count, cached in chunks]
    pool = make_pool(lengths, kv_heads, head_dim, dtype, block_size, seed=seed, in_8_bits=in_8_bits)
    pool = pool._replace(window=window)
    counts = [count for count, _ in chunks]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q = randn(sum(counts), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    exact = reference.prefill_attention(q.double(), in_float64(pool), starts, head_dim**-0.5)
    out = prefill_attention(q, pool, starts, head_dim**-0.5, capacity=capacity)
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "heads", "in_8_bits"), combined(DTYPES, HEADS, [False, True]))
def test_prefill_attention_of_mixed_chunks(dtype: torch.dtype, heads: tuple[int, int, int], in_8_bits: bool) -> None:
    chunks = [(1, 0), (5, 0), (16, 24), (0, 9), (66, 1), (1, 40)]
    chunks += [(1000, 0), (130, 3000), (4095, 0)] if ON_GPU else []
    for block_size in (1, 4, 16, 256) if ON_GPU else (16,):
        check_prefill(dtype, heads, block_size, chunks, in_8_bits=in_8_bits)


@pytest.mark.parametrize(("dtype", "window", "in_8_bits"), combined(DTYPES, [1, 2, 31, 32, 33, 64, 150], [False, True]))
def test_prefill_attention_in_a_window(dtype: torch.dtype, window: int, in_8_bits: bool) -> None:
    """Windows and chunks around the tiles: 32 queries and 32 tokens in float32, 64 of both in 16 bits."""
    chunks = [(5, 0), (64, 97), (0, 9), (150, 0), (1, 140), (33, 63)]
    chunks += [(1000, 0), (130, 3000), (4100, 100)] if ON_GPU else []
    check_prefill(dtype, (4, 2, 64), 16, chunks, window=window, in_8_bits=in_8_bits)
    if ON_GPU:
        check_prefill(dtype, (4, 2, 128), 16, chunks, window=20 * window, in_8_bits=in_8_bits)


@pytest.mark.parametrize(
    ("dtype", "window", "capacity"),
    combined([torch.bfloat16, torch.float16], [None, 1, 33], [1, 45, 46, 150, 500]),
)
def test_prefill_attention_of_contexts_that_are_unpacked_as_far_as_there_is_room(
    dtype: torch.dtype, window: int | None, capacity: int
) -> None:
    chunks = [(5, 0), (16, 24), (0, 9), (66, 1), (1, 40)]  # 45 tokens of context before the third chunk
    heads = (6, 2, 80) if window is None else (4, 2, 64)
    check_prefill(dtype, heads, 4, chunks, window=window, in_8_bits=True, capacity=capacity)


def test_tokens_in_front_of_every_window_are_not_read() -> None:
    pool = make_pool([200], 2, 64, torch.float32, 16)._replace(window=40)
    k, v = pool.k.clone(), pool.v.clone()
    for block in pool.tables[0, :6].tolist():  # tokens 0 to 95; the first query stands at 160 and sees from 121
        k[block], v[block] = float("nan"), float("nan")
    q, starts = randn(40, 4, 64), torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    exact = reference.prefill_attention(q.double(), in_float64(pool), starts, 0.1)
    got = prefill_attention(q, pool._replace(k=k, v=v), starts, 0.1)
    assert relative_error(got, exact) < TOLERANCE[torch.float32]


@drawn
@given(
    dtype=dtypes,
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([1, 2, 8, 16, 64, 256]),
    chunks=st.lists(st.tuples(st.integers(0, long // 2), st.integers(0, long // 2)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    window=st.none() | st.integers(1, long),
    in_8_bits=st.booleans(),
)
def test_prefill_attention(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    chunks: list[tuple[int, int]],
    seed: int,
    window: int | None,
    in_8_bits: bool,
) -> None:
    if sum(count for count, _ in chunks):
        check_prefill(dtype, heads, block_size, chunks, seed=seed, window=window, in_8_bits=in_8_bits)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the interpreter compiles nothing")
def test_tables_of_another_width_and_chunks_behind_decodes_need_no_second_kernel() -> None:
    q, starts = randn(4, 8, 64), torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    kernels = _prefill_attention_kernel.jit.device_caches[torch.cuda.current_device()][0]
    counts = []
    for width, first in ((16, 0), (17, 0), (1, 0), (16, 1), (17, 1)):
        pool = make_pool([5, 5], 2, 64, torch.float32, 16)
        tables = pool.tables[:, :1].repeat(1, width)[first : first + 1]
        prefill_attention(q, pool._replace(tables=tables, lens=pool.lens[first : first + 1]), starts, 0.1)
        counts.append(len(kernels))
    assert len(set(counts)) == 1
