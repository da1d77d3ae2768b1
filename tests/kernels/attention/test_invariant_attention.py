"""Test batch-invariant attention against float64, and against itself in other tilings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, DTYPES, HEADS, ON_GPU, TOLERANCE, combined, in_float64, make_pool, randn, relative_error
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.attention.invariant import paged_attention, prefill_attention, tile_of

TILE = tile_of(2, 64, DEVICE)
BORDER, LONG = 16 * TILE, 8 * TILE  # where short segments end, and the tokens of the others
WINDOWS = [None, 1, 33, BORDER + 3]


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "heads", "window", "block_size", "in_8_bits"),
    combined(DTYPES, HEADS, WINDOWS, [1, 16, 64], [False, True]),
)
def test_decodes(
    dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, block_size: int, in_8_bits: bool
) -> None:
    """Any split of the contexts gives bitwise the same result. An empty context gives zeros."""
    num_heads, kv_heads, head_dim = heads
    lengths = [1, 0, BORDER + LONG + 19, LONG - 1, BORDER]
    pages = make_pool(lengths, kv_heads, head_dim, dtype, block_size, in_8_bits=in_8_bits)._replace(window=window)
    q = randn(len(lengths), num_heads + 1, head_dim, dtype=dtype)[:, 1:]
    exact = reference.paged_attention(q.double(), in_float64(pages), head_dim**-0.5)
    whole = paged_attention(q, pages, head_dim**-0.5, num_splits=1)
    assert relative_error(whole, exact) < TOLERANCE[dtype]
    some = (7,) if block_size == 1 else (2,)
    for num_splits in (2, 7) if ON_GPU else some:
        assert torch.equal(paged_attention(q, pages, head_dim**-0.5, num_splits=num_splits), whole)


@pytest.mark.parametrize(
    ("dtype", "heads", "window", "in_8_bits"), combined(DTYPES, [(4, 2, 64), (3, 1, 80)], WINDOWS, [False, True])
)
def test_chunks(dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, in_8_bits: bool) -> None:
    num_heads, kv_heads, head_dim = heads
    chunks = [(1, 0), (5, BORDER - 2), (LONG + 9, 0), (1, LONG - 1), (0, 9), (40, 24)]
    lengths = [count + cached for count, cached in chunks]
    pages = make_pool(lengths, kv_heads, head_dim, dtype, 16, in_8_bits=in_8_bits)._replace(window=window)
    counts = [count for count, _ in chunks]
    q = randn(sum(counts), num_heads, head_dim, dtype=dtype)
    exact = reference.prefill_attention(q.double(), in_float64(pages), starts_of(counts), 0.125)
    assert relative_error(prefill_attention(q, pages, starts_of(counts), 0.125), exact) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 80), (5, 5, 96), (4, 2, 256)])
def test_a_decode_has_the_bits_of_any_chunk(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, in_8_bits: bool
) -> None:
    """Only a GPU can show this: the interpreter's matmuls come from a library that depends on shapes."""
    num_heads, kv_heads, head_dim = heads
    lengths = [1, 17, 128, 129, 512, 1023, 1025, 1500, 2100]
    pages = make_pool(lengths, kv_heads, head_dim, dtype, 16, in_8_bits=in_8_bits)._replace(window=window)
    q, starts, scale = randn(sum(lengths), num_heads, head_dim, dtype=dtype), starts_of(lengths), head_dim**-0.5
    whole = prefill_attention(q, pages, starts, scale)
    for back in (0, 1, 16, 63, 64, 300, 511):  # each sequence's query so far from its end
        ends = [max(1, length - back) for length in lengths]
        at = starts[:-1].long() + torch.tensor(ends, device=DEVICE) - 1
        cut = pages._replace(lens=torch.tensor(ends, dtype=torch.int32, device=DEVICE))
        for num_splits in (None, 1, 3, 100):
            assert torch.equal(paged_attention(q[at], cut, scale, num_splits=num_splits), whole[at])
        for row, place in enumerate(at.tolist()):  # and alone
            one = cut._replace(tables=cut.tables[row : row + 1], lens=cut.lens[row : row + 1])
            assert torch.equal(paged_attention(q[place : place + 1], one, scale)[0], whole[place])
    for most in (1, 5, 64, 100, 513):  # the last chunk of so many tokens
        counts = [min(most, length) for length in lengths]
        rows = torch.cat([torch.arange(int(end) - n, int(end)) for end, n in zip(starts[1:], counts, strict=True)])
        assert torch.equal(prefill_attention(q[rows], pages, starts_of(counts), scale), whole[rows])
