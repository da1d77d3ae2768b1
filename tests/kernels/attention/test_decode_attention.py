"""Decode attention over block tables."""

from __future__ import annotations

from typing import Any

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
    without_hidden,
)
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.attention.decode import num_splits_for, paged_attention
from minillm.kernels.attention.prefill import prefill_attention


def check_decode(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    lengths: list[int],
    *,
    splits: int | None = None,
    seed: int = 1,
    window: int | None = None,
    in_8_bits: bool = False,
) -> None:
    num_heads, kv_heads, head_dim = heads
    pool = make_pool(lengths, kv_heads, head_dim, dtype, block_size, seed=seed, in_8_bits=in_8_bits)
    pool = pool._replace(window=window)
    q = randn(len(lengths), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]  # not contiguous
    scale = head_dim**-0.5
    exact = reference.paged_attention(q.double(), in_float64(pool), scale)
    out = paged_attention(q, without_hidden(pool), scale, num_splits=splits)
    assert relative_error(out, exact) < TOLERANCE[dtype]
    assert not out[pool.lens == 0].any(), "an empty context gives zeros"


@pytest.mark.parametrize(("dtype", "heads", "in_8_bits"), combined(DTYPES, HEADS, [False, True]))
def test_paged_attention_at_the_edges_of_blocks(
    dtype: torch.dtype, heads: tuple[int, int, int], in_8_bits: bool
) -> None:
    for block_size in (1, 4, 16, 256) if ON_GPU else (1, 16):
        lengths = [1, block_size, block_size + 1, 0, 2 * block_size - 1, 37]
        lengths += [4095] if ON_GPU else []
        check_decode(dtype, heads, block_size, lengths, in_8_bits=in_8_bits)


@pytest.mark.parametrize(("dtype", "window", "in_8_bits"), combined(DTYPES, [1, 16, 33], [False, True]))
def test_paged_attention_in_a_window(dtype: torch.dtype, window: int, in_8_bits: bool) -> None:
    lengths = [1, window, window + 1, 0, 2 * window - 1, 70]
    lengths += [4095] if ON_GPU else []
    for splits in (1, 3):
        check_decode(dtype, (4, 2, 64), 16, lengths, splits=splits, window=window, in_8_bits=in_8_bits)
    if ON_GPU:
        check_decode(dtype, (32, 8, 128), 16, lengths, window=30 * window, in_8_bits=in_8_bits)


@drawn
@given(
    dtype=dtypes,
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    lengths=st.lists(st.integers(0, long), min_size=1, max_size=5),
    splits=st.sampled_from([None, 1, 2, 3, 7, 16]),
    seed=st.integers(0, 99),
    window=st.none() | st.integers(1, long),
    in_8_bits=st.booleans(),
)
def test_paged_attention(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    lengths: list[int],
    splits: int | None,
    seed: int,
    window: int | None,
    in_8_bits: bool,
) -> None:
    check_decode(
        dtype, heads, block_size, lengths, splits=splits, seed=seed, window=window, in_8_bits=in_8_bits
    )  # fmt: skip


def test_tables_that_several_sequences_share() -> None:
    pool = make_pool([23, 23, 23], 2, 64, torch.float32, 4)
    shared = pool.tables.clone()
    shared[1, :5], shared[2, :3] = shared[0, :5], shared[0, :3]
    q = randn(3, 4, 64)
    pool = pool._replace(tables=shared)
    exact = reference.paged_attention(q.double(), in_float64(pool), 0.1)
    assert relative_error(paged_attention(q, pool, 0.1), exact) < 1e-5


def test_an_empty_batch_launches_nothing() -> None:
    pool = make_pool([4], 2, 64, torch.float32, 4)
    pool = pool._replace(tables=pool.tables[:0], lens=pool.lens[:0])
    q = randn(0, 4, 64)
    assert paged_attention(q, pool, 0.1).shape == (0, 4, 64)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert prefill_attention(q, pool, starts, 0.1).shape == (0, 4, 64)


def test_splits_follow_from_shapes_alone() -> None:
    for seqs in (1, 8, 64, 256):
        for kv_heads in (1, 8, 32):
            splits = num_splits_for(seqs, kv_heads, 8192, DEVICE)
            assert 1 <= splits <= 128
    assert num_splits_for(1, 1, 64, DEVICE) == 1


@pytest.mark.parametrize(("dtype", "heads"), combined(DTYPES, [(9, 3, 64), (4, 1, 128), (8, 2, 128)]))
def test_parts_without_tokens_change_nothing(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """A wider table adds empty parts. Only the order of the sums may change."""
    num_heads, kv_heads, head_dim = heads
    for lengths in ([500], [130, 257, 512, 1]):
        pool = make_pool(lengths, kv_heads, head_dim, dtype, 16, seed=3)
        wide = torch.zeros(len(lengths), 256, dtype=torch.int32, device=DEVICE)
        wide[:, : pool.tables.shape[1]] = pool.tables
        q = randn(len(lengths), num_heads, head_dim, dtype=dtype)
        results = [paged_attention(q, pool._replace(tables=wide[:, :width]), 0.1) for width in (32, 64, 256)]
        assert all(relative_error(result, results[0].double()) < TOLERANCE[dtype] for result in results)


def test_attention_refuses_what_does_not_fit() -> None:
    pool = make_pool([5, 6], 2, 64, torch.float32, 4)
    q = randn(2, 4, 64)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("does not fit", {"q": randn(2, 3, 64)}),
        ("does not fit", {"q": randn(2, 4, 32)}),
        ("does not fit", {"q": randn(2, 4, 64, dtype=torch.float16)}),
        ("power of two", {"k": randn(4, 3, 2, 64), "v": randn(4, 3, 2, 64)}),
        ("contiguous", {"k": pool.k.transpose(0, 1)}),
        ("int32", {"tables": pool.tables.long()}),
        ("rows", {"lens": pool.lens[:1]}),
        ("one token", {"window": 0}),
        ("needs scales", {"k": pool.k.to(torch.int8)}),
        ("needs scales", {"v_scales": torch.zeros(7, 2, 4)}),
        ("float32", {"k": pool.k.to(torch.int8), "k_scales": randn(7, 4, 2)}),
        ("float32", {"k": pool.k.to(torch.int8), "k_scales": randn(7, 2, 4).half()}),
    ]
    for said, changes in wrong:
        with pytest.raises(ValueError, match=said):
            paged_attention(changes.pop("q", q), pool._replace(**changes), 0.1)
