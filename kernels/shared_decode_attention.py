"""Decode attention for sequences that share blocks: what neighbours in the batch share is read once for all of them.

Samples of one prompt, beams, requests behind one system prompt: their block tables begin with the same block ids. The
plain kernel (`decode_attention`) reads such a block once for each sequence. Here a program takes the queries of several
neighbouring sequences as the rows of one tile, in two phases (ChunkAttention, Ye et al. 2024):

1. over the blocks that all of them begin with: one tile of K and V for all rows;
2. over each sequence's own blocks: the rows of the others are masked.

What is shared is found by the program itself, from the block tables: it compares them until two differ. So sharing may
change from step to step under the same CUDA graph, and the host only decides whether it is worth it. Where nothing is
shared the result is the same and the time is not: a program then walks through its sequences one after another.

Grid: (kv heads, groups of SEQS sequences, splits). Tile: ROWS = SEQS x query heads of a kv head, padded to 16, times
TILE tokens. Every split takes its part of the shared blocks and of each sequence's own. Bytes: per group the shared
blocks once, and each sequence's own.

Reference: `kernels.reference.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compat import dot, pdl_options, wait_for_inputs
from kernels.decode_attention import check_inputs, merge_splits, num_splits_for, tiling

# 16 to 128 were measured: more rows read less, and leave fewer programs that wait longer for each other's bytes. Only
# from 8k shared tokens on 64 are better, by a seventh.
_ROWS = 16
_TABLE_TILE = 128  # block ids of each sequence that are compared at a time


@triton.jit
def _shared_tokens(
    tables_ptr, lens_ptr, base, num_seqs, table_stride,
    BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr, TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """How many tokens in full blocks all sequences of a group begin with; empty ones (padding) do not count."""
    members = base + tl.arange(0, SEQS)
    lens = tl.load(lens_ptr + members, mask=members < num_seqs, other=0)
    living = lens > 0
    common = tl.min(tl.where(living, lens, 1 << 30), axis=0) // BLOCK_SIZE
    lead_ptr = tables_ptr + base * table_stride
    if tl.load(lens_ptr + base) == 0:
        common = 0
    start = 0
    while start < common:
        columns = start + tl.arange(0, TABLE_TILE)
        inside = columns < common
        lead = tl.load(lead_ptr + columns, mask=inside, other=0)
        mask = living[:, None] & inside[None, :]
        each = tl.load(tables_ptr + members[:, None] * table_stride + columns[None, :], mask=mask, other=0)
        differs = tl.max((mask & (each != lead[None, :])).to(tl.int32), axis=0) > 0
        common = tl.minimum(common, tl.min(tl.where(differs, columns, 1 << 30), axis=0))
        start += TABLE_TILE
    return common * BLOCK_SIZE


@triton.jit
def _attend_masked(
    q, k_ptr, v_ptr, table_ptr, begin, end, visible, dims, is_dim, slot_stride, scale_log2e, maximum, total, out,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold tokens ``begin … end - 1`` of one block table into the running softmax of the rows that are ``visible``."""
    columns = tl.arange(0, TILE)
    for position in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = position + columns
        valid = tokens < end
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offsets = (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE)[:, None] * slot_stride + dims[None, :]
        mask = valid[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale_log2e
        scores = tl.where(visible[:, None] & valid[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # of rows that have seen no token yet
        correction = tl.exp2(maximum - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        total = total * correction + tl.sum(weights, axis=1)
        out = dot(weights.to(v.dtype), v, out * correction[:, None])
        maximum = new_maximum
    return maximum, total, out


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def _shared_attention_kernel(
    out_ptr, lse_ptr,
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, lens_ptr,
    q_seq_stride, q_head_stride, table_stride, slot_stride,
    out_seq_stride, out_head_stride, out_split_stride, lse_seq_stride, lse_split_stride,
    scale_log2e, num_seqs, num_splits,
    GROUP: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TABLE_TILE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * SEQS
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    seqs = base + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows // GROUP < SEQS) & (seqs < num_seqs)
    contexts = tl.load(lens_ptr + seqs, mask=is_row, other=0)
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    row_mask = is_row[:, None] & is_dim[None, :]
    q_offsets = seqs[:, None] * q_seq_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)

    shared = _shared_tokens(tables_ptr, lens_ptr, base, num_seqs, table_stride, BLOCK_SIZE, SEQS, TABLE_TILE)
    part = tl.cdiv(tl.cdiv(shared, num_splits), TILE) * TILE
    begin = tl.minimum(split * part, shared)
    maximum, total, out = _attend_masked(
        q, k_ptr, v_ptr, tables_ptr + base * table_stride, begin, tl.minimum(begin + part, shared), contexts > 0,
        dims, is_dim, slot_stride, scale_log2e, maximum, total, out, BLOCK_SIZE, ROWS, TILE, STAGES,
    )  # fmt: skip
    for member in range(SEQS):
        seq = base + member
        context = tl.load(lens_ptr + seq, mask=seq < num_seqs, other=0)
        part = tl.cdiv(tl.cdiv(tl.maximum(context - shared, 0), num_splits), TILE) * TILE
        begin = tl.minimum(shared + split * part, context)
        maximum, total, out = _attend_masked(
            q, k_ptr, v_ptr, tables_ptr + seq * table_stride, begin, tl.minimum(begin + part, context), seqs == seq,
            dims, is_dim, slot_stride, scale_log2e, maximum, total, out, BLOCK_SIZE, ROWS, TILE, STAGES,
        )  # fmt: skip
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = seqs[:, None] * out_seq_stride + heads[:, None] * out_head_stride + split * out_split_stride
    tl.store(out_ptr + out_offsets + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=row_mask)
    lse = (maximum + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453  # back to base e
    tl.store(lse_ptr + seqs * lse_seq_stride + split * lse_split_stride + heads, lse, mask=is_row)


def shared_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    *,
    rows: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`decode_attention.paged_attention`, for a batch whose neighbours share blocks.

    Args:
        rows: of a tile, a power of two from 16 on: the more, the more sequences read a shared block together.
        num_splits: parts of each context.

    Raises:
        ValueError: wrong shape or layout.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    check_inputs(q, k_cache, v_cache, block_tables, context_lens, num_seqs)
    out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    group = num_heads // num_kv_heads
    rows = max(_ROWS, triton.next_power_of_2(group)) if rows is None else rows
    # A power of two, for the members of a group are a tile's lanes.
    seqs = min(1 << (rows // group).bit_length() - 1, triton.next_power_of_2(num_seqs))
    groups = triton.cdiv(num_seqs, seqs)
    if num_splits is None:
        num_splits = num_splits_for(groups, num_kv_heads, block_tables.shape[1] * block_size, q.device)
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    tile, _, warps = tiling(dim_tile, q.element_size())
    if q.element_size() == 4:
        tile = min(tile, 32)  # full float32 has no matrix unit: small tiles, or registers overflow
    partial = torch.empty(num_seqs, num_splits, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_seqs, num_splits, num_heads, dtype=torch.float32, device=q.device)
    target = partial if num_splits > 1 else out[:, None]
    _shared_attention_kernel[(num_kv_heads, groups, num_splits)](
        target, lse,
        q, k_cache, v_cache, block_tables, context_lens,
        q.stride(0), q.stride(1), block_tables.stride(0), num_kv_heads * head_dim,
        target.stride(0), target.stride(2), target.stride(1), lse.stride(0), lse.stride(1),
        softmax_scale * 1.4426950408889634, num_seqs, num_splits,
        GROUP=group, SEQS=seqs, ROWS=rows, HEAD_DIM=head_dim, DIM_TILE=dim_tile,
        BLOCK_SIZE=block_size, TILE=tile, TABLE_TILE=_TABLE_TILE, STAGES=2,
        num_warps=warps, **pdl_options(q.device),
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(out, lse, partial, lse, context_lens, tile, all_written=True, write_lse=False)
    return out
