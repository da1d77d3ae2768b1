"""Dequantize contexts of an 8-bit cache to 16 bits, for attention that reads each value many times.

In a chunk of a prompt, every query reads a token's K and V. Dequantizing K and V for every tile of queries takes longer
than the matmuls, so they are dequantized once, to a scratch buffer. Bytes: 1 in and 2 out for each value, and the
scales.

Grid: (tiles of a context's rows, sequences, K and V). The scratch buffer stores contexts one after another in the order
of sequences. A context that does not fit is left out. The attention kernel evaluates the same condition, and reads that
context from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages, cdiv, next_power_of_2
from minillm.kernels.launch import launched

_ROWS = 64  # per program: tokens times kv heads
_LARGEST_TILE = tl.constexpr(128)  # maximum tokens that attention reads at a time


@triton.jit
def staged_begin(lens_ptr, seq, num_seqs, SEQS_TILE: tl.constexpr):
    """Return the index in the scratch buffer of the first token of sequence ``seq``."""
    seqs = tl.arange(0, SEQS_TILE)
    return tl.sum(tl.load(lens_ptr + seqs, mask=(seqs < num_seqs) & (seqs < seq), other=0), 0)


@launched
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "tables_ptr", "lens_ptr", "capacity"])
def _stage_kernel(
    k_out_ptr, v_out_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr, cu_seqlens_ptr,
    table_stride, num_seqs, capacity,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, SEQS_TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    context = tl.load(lens_ptr + seq)
    first = tl.program_id(0) * ROWS
    if first >= context * KV_HEADS:
        return
    if WINDOW is not None:  # attention reads at most one tile before the first query's window
        chunk = tl.load(cu_seqlens_ptr + seq + 1) - tl.load(cu_seqlens_ptr + seq)
        if (first + ROWS) // KV_HEADS < context - chunk - WINDOW - _LARGEST_TILE:
            return
    begin = staged_begin(lens_ptr, seq, num_seqs, SEQS_TILE)
    if begin + context > capacity:
        return
    rows = first + tl.arange(0, ROWS)
    tokens, heads = rows // KV_HEADS, rows % KV_HEADS
    is_row = tokens < context
    blocks = tl.load(tables_ptr + seq.to(tl.int64) * table_stride + tokens // BLOCK_SIZE, mask=is_row, other=0)
    blocks = blocks.to(tl.int64)
    dims = tl.arange(0, DIM_TILE)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    at = (((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
    scales_at = (blocks * KV_HEADS + heads) * BLOCK_SIZE + tokens % BLOCK_SIZE
    out_at = ((begin.to(tl.int64) * KV_HEADS + rows) * HEAD_DIM)[:, None] + dims[None, :]
    if tl.program_id(2) == 0:
        scales = tl.load(k_scales_ptr + scales_at, mask=is_row, other=0.0)
        numbers = tl.load(k_cache_ptr + at, mask=mask, other=0).to(tl.float32) * scales[:, None]
        tl.store(k_out_ptr + out_at, numbers.to(k_out_ptr.dtype.element_ty), mask=mask)
    else:
        scales = tl.load(v_scales_ptr + scales_at, mask=is_row, other=0.0)
        numbers = tl.load(v_cache_ptr + at, mask=mask, other=0).to(tl.float32) * scales[:, None]
        tl.store(v_out_ptr + out_at, numbers.to(v_out_ptr.dtype.element_ty), mask=mask)


def stage(pages: Pages, cu_seqlens: Tensor, dtype: torch.dtype, capacity: int) -> tuple[Tensor, Tensor]:
    """Dequantize the contexts of an 8-bit cache into scratch tensors, one context after another.

    With a sliding window, slots of tokens that no query attends to may stay uninitialized.

    Args:
        cu_seqlens: as in `reference.prefill_attention`.
        dtype: the dtype of the results.
        capacity: maximum number of tokens. Tokens beyond it are not dequantized.

    Returns:
        K and V, each ``[capacity, kv_heads, head_dim]``.
    """
    k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_seqs = lens.shape[0]
    k, v = (k_cache.new_empty(capacity, num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
    longest = min(capacity, tables.shape[1] * block_size)
    _stage_kernel[(cdiv(longest * num_kv_heads, _ROWS), num_seqs, 2)](
        k, v, k_cache, v_cache, k_scales, v_scales, tables, lens, cu_seqlens, tables.stride(0), num_seqs, capacity,
        KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, DIM_TILE=next_power_of_2(head_dim), BLOCK_SIZE=block_size,
        ROWS=_ROWS, SEQS_TILE=seqs_tile(num_seqs), WINDOW=window, num_warps=4,
    )  # fmt: skip
    return k, v


def seqs_tile(num_seqs: int) -> int:
    """Return the tile size for loading all sequences' lengths at once: a power of two, at least 256."""
    return max(256, next_power_of_2(num_seqs))
