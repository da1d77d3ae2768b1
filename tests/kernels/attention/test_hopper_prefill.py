"""Test Hopper's kernel for causal attention of chunks: compile it anywhere, and run it on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.kernels import DEVICE, TOLERANCE, drawn, in_float64, make_pool, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.attention import hopper_prefill
from minillm.kernels.compat import has_wgmma

on_hopper = pytest.mark.skipif(not (DEVICE.type == "cuda" and has_wgmma(DEVICE)), reason="needs a GPU of 9.0")


def check_prefill(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    chunks: list[tuple[int, int]],
    window: int | None = None,
) -> None:
    """Compare with the reference; ``chunks`` lists (tokens of the chunk, tokens cached before it)."""
    num_heads, kv_heads, head_dim = heads
    lengths = [count + cached for count, cached in chunks]
    pool = make_pool(lengths, kv_heads, head_dim, dtype, block_size, seed=2)._replace(window=window)
    counts = torch.tensor([0, *[count for count, _ in chunks]])
    starts = counts.cumsum(0).to(DEVICE, torch.int32)
    q = randn(int(counts.sum()), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    exact = reference.prefill_attention(q.double(), in_float64(pool), starts, head_dim**-0.5)
    out = hopper_prefill.prefill_attention(q, pool, starts, head_dim**-0.5)
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.slow
def test_it_compiles_without_a_gpu(compiling: Callable[..., str]) -> None:
    """Compile for 9.0 with a window, which uses every loop. A few registers may spill outside the loops."""
    stack, shared, products = map(int, compiling(Path(__file__).with_name("compile_hopper.py")).split())
    assert stack <= 64  # bytes
    assert shared <= 227 * 1024
    assert products == 2 * 64  # of each consumer: 8 for the first scores, 16 for each of three loops, 8 for the last V


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("dtype", "heads", "block_size"),
    [
        (torch.bfloat16, (32, 8, 128), 16),
        (torch.float16, (9, 3, 64), 32),
        (torch.bfloat16, (4, 4, 64), 128),
        (torch.float16, (5, 1, 128), 256),
    ],
)
def test_mixed_chunks(dtype: torch.dtype, heads: tuple[int, int, int], block_size: int) -> None:
    check_prefill(dtype, heads, block_size, [(5, 0), (128, 0), (16, 24), (0, 9), (266, 1), (1, 40), (1000, 0)])
    check_prefill(dtype, heads, block_size, [(130, 3000), (3000, 0)])
    check_prefill(dtype, heads, block_size, [(20, 0)])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", [1, 64, 127, 128, 129, 1000])
def test_windows(window: int) -> None:
    chunks = [(5, 0), (64, 97), (0, 9), (150, 0), (1, 140), (33, 63), (1000, 0), (130, 3000)]
    check_prefill(torch.bfloat16, (9, 3, 64), 16, chunks, window)


@pytest.mark.gpu
@on_hopper
@drawn
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 700)), min_size=1, max_size=40),
    st.sampled_from([16, 64]),
    st.sampled_from([None, 100]),
)
def test_any_chunks(chunks: list[tuple[int, int]], block_size: int, window: int | None) -> None:
    if any(count for count, _ in chunks):
        check_prefill(torch.bfloat16, (4, 2, 128), block_size, chunks, window)


@pytest.mark.gpu
@on_hopper
def test_the_same_bits_again() -> None:
    """A race between the producer and the consumers would show as other bits now and then."""
    pool = make_pool([4000, 300], 8, 128, torch.bfloat16, 16, seed=3)
    starts = torch.tensor([0, 2000, 2300], device=DEVICE, dtype=torch.int32)
    q = randn(2300, 32, 128, dtype=torch.bfloat16)
    results = [hopper_prefill.prefill_attention(q, pool, starts, 128**-0.5) for _ in range(200)]
    assert all(torch.equal(out, results[0]) for out in results[1:])
