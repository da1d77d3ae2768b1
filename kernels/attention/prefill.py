"""Causal attention of prompt chunks over the paged KV cache (FlashAttention-2, Dao 2023, over block tables).

A chunk's own K and V are already in the cache. The same call therefore computes a chunk of a long prompt, the rest of a
prompt with a cached beginning, and a recomputation after a preemption. Compute-bound from a few hundred tokens on: 4 *
queries * visible tokens * heads * head_dim FLOPs. Bytes: q and out once, the visible K and V for each tile of queries.

Grid: (heads, tiles of queries over all chunks). The number of tiles depends only on shapes (at most ``tokens / ROWS +
chunks``); each program finds its chunk by counting. Late tiles, which attend to most tokens, start first, in all heads.
Tile: ``ROWS`` queries x ``TILE`` tokens; block ids are looked up per token, so any block size works. Tokens visible to
all queries of a tile need no mask. Only the last tile or two compare positions, and, with a sliding window, the first
visible tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages, next_power_of_2
from minillm.kernels.attention.decode import check_inputs, k_numbers, load_scales, share, v_numbers
from minillm.kernels.attention.int8_prefill import seqs_tile, stage, staged_begin
from minillm.kernels.compat import dot, has_int8_mma, has_large_shared_memory
from minillm.kernels.launch import launched

_LEAST_STAGED = 256  # average tokens of a chunk from which dequantizing first pays


@triton.jit
def find_chunk(cu_seqlens_ptr, number, num_seqs, ROWS: tl.constexpr, SEQS_TILE: tl.constexpr):
    """Return the chunk that query tile ``number`` belongs to, and the tile's index within the chunk.

    Programs that have no tile get chunk ``num_seqs``.
    """
    seqs = tl.arange(0, SEQS_TILE)
    is_seq = seqs < num_seqs
    begins = tl.load(cu_seqlens_ptr + seqs, mask=is_seq, other=0)
    ends = tl.load(cu_seqlens_ptr + seqs + 1, mask=is_seq, other=0)
    tiles = tl.where(is_seq, (ends - begins + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, axis=0)
    chunk = tl.sum((is_seq & (upto <= number)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(seqs < chunk, tiles, 0), axis=0)
    return chunk, number - before


@triton.jit
def load_queries(
    q_ptr, begin, length, context, tile_number, head, q_token_stride, q_head_stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Load the queries of one head in tile ``tile_number`` of a chunk that begins at token ``begin`` of the batch.

    Returns: queries ``[ROWS, DIM_TILE]``; their positions in the batch, and in their sequence, ``[ROWS]``; the mask of
    existing queries and dimensions.
    """
    rows = tile_number * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    mask = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + rows).to(tl.int64)
    q = tl.load(q_ptr + tokens[:, None] * q_token_stride + head * q_head_stride + dims[None, :], mask=mask, other=0.0)
    return q, tokens, context - length + rows, mask


@triton.jit
def _fold_masked(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, seen, end, positions, dims, is_dim,
    slot_stride, scale_log2e, maximum, total, out,
    ROWS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens to the running softmax of queries, masking tokens that a query may not attend to.

    ``seen`` are the positions of the tile's tokens. Returns: the new maximum, sum and outputs.
    """
    valid = seen < end
    if BLOCK_SIZE is None:
        slots = seen.to(tl.int64)
    else:
        blocks = tl.load(table_ptr + seen // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + seen % BLOCK_SIZE
    offsets = slots[:, None] * slot_stride + dims[None, :]
    mask = valid[:, None] & is_dim[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    if k_scales_ptr is not None:
        k = k_numbers(k, q)
    scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale_log2e
    if k_scales_ptr is not None:
        scores *= load_scales(k_scales_ptr, kv_head, blocks, seen, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)[None, :]
    visible = valid[None, :] & (seen[None, :] <= positions[:, None])
    if WINDOW is not None:
        visible = visible & (seen[None, :] > positions[:, None] - WINDOW)
    scores = tl.where(visible, scores, float("-inf"))
    # The maximum is finite once a row has had a visible token (at the latest its own); until then it is not used.
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    correction = tl.exp2(maximum - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * correction + tl.sum(weights, axis=1)
    out = out * correction[:, None]
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    if v_scales_ptr is not None:
        v = v_numbers(v, q)
        scales = load_scales(v_scales_ptr, kv_head, blocks, seen, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
        weights = share(weights, scales, q)
    out = dot(weights.to(v.dtype), v, out)
    return new_maximum, total, out


# Avoids recompiling for tables of another width and chunks at other offsets in the batch.
@launched
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "tables_ptr", "lens_ptr", "capacity"])
def _prefill_attention_kernel(
    out_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr, cu_seqlens_ptr,
    q_token_stride, q_head_stride, table_stride, slot_stride, out_token_stride, out_head_stride, scale_log2e, num_seqs,
    capacity,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SEQS_TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    chunk, tile_number = find_chunk(cu_seqlens_ptr, number, num_seqs, ROWS, SEQS_TILE)
    if chunk >= num_seqs:
        return
    begin = tl.load(cu_seqlens_ptr + chunk)
    length = tl.load(cu_seqlens_ptr + chunk + 1) - begin
    context = tl.load(lens_ptr + chunk)
    if REST or BLOCK_SIZE is None:
        staged = staged_begin(lens_ptr, chunk, num_seqs, SEQS_TILE)
        if (staged + context <= capacity) == REST:
            return
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    q, tokens, positions, row_mask = load_queries(
        q_ptr, begin, length, context, tile_number, head, q_token_stride, q_head_stride, ROWS, HEAD_DIM, DIM_TILE
    )
    kv_head = head // GROUP
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    if BLOCK_SIZE is None:
        k_ptr += staged.to(tl.int64) * slot_stride
        v_ptr += staged.to(tl.int64) * slot_stride
    table_ptr = tables_ptr + chunk.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)
    columns = tl.arange(0, TILE)

    # Tokens that are visible to every query of the tile need no comparison.
    first_position = context - length + tile_number * ROWS
    unmasked_end = (first_position + 1) // TILE * TILE
    unmasked_begin = 0
    if WINDOW is not None:
        seen_begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        unmasked_begin = tl.minimum(tl.cdiv(tl.maximum(first_position + ROWS - WINDOW, 0), TILE) * TILE, unmasked_end)
        for position in tl.range(seen_begin, unmasked_begin, TILE):
            maximum, total, out = _fold_masked(
                q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, position + columns, unmasked_end,
                positions, dims, is_dim, slot_stride, scale_log2e, maximum, total, out,
                ROWS, TILE, HEAD_DIM, BLOCK_SIZE, WINDOW,
            )  # fmt: skip
    for position in tl.range(unmasked_begin, unmasked_end, TILE, num_stages=STAGES):
        seen = position + columns
        if BLOCK_SIZE is None:
            slots = seen.to(tl.int64)
        else:
            blocks = tl.load(table_ptr + seen // BLOCK_SIZE).to(tl.int64)
            slots = blocks * BLOCK_SIZE + seen % BLOCK_SIZE
        offsets = slots[:, None] * slot_stride + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=is_dim[None, :], other=0.0)
        if k_scales_ptr is not None:
            k = k_numbers(k, q)
        scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale_log2e
        if k_scales_ptr is not None:
            scores *= load_scales(k_scales_ptr, kv_head, blocks, seen, None, slot_stride, HEAD_DIM, BLOCK_SIZE)[None, :]
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * correction + tl.sum(weights, axis=1)
        out = out * correction[:, None]
        v = tl.load(v_ptr + offsets, mask=is_dim[None, :], other=0.0)
        if v_scales_ptr is not None:
            v = v_numbers(v, q)
            v_scales = load_scales(v_scales_ptr, kv_head, blocks, seen, None, slot_stride, HEAD_DIM, BLOCK_SIZE)
            weights = share(weights, v_scales, q)
        out = dot(weights.to(v.dtype), v, out)
        maximum = new_maximum
    end = tl.minimum(first_position + ROWS, context)
    for position in tl.range(unmasked_end, end, TILE):
        maximum, total, out = _fold_masked(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, position + columns, end, positions, dims,
            is_dim, slot_stride, scale_log2e, maximum, total, out, ROWS, TILE, HEAD_DIM, BLOCK_SIZE, WINDOW,
        )  # fmt: skip
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = tokens[:, None] * out_token_stride + head * out_head_stride + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(
    q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float, *, capacity: int | None = None
) -> Tensor:
    """Compute `reference.prefill_attention`.

    The requirements are those of `attention.decode.paged_attention`, and so is the ValueError if they are not met.
    ``capacity`` is the maximum number of 8-bit context tokens to dequantize first, by default `capacity_for`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads = pages.lens.shape[0], pages.k.shape[2]
    check_chunks(q, pages, cu_seqlens)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    if capacity is None:
        capacity = capacity_for(q, pages)
    dim_tile = max(16, next_power_of_2(head_dim))

    def launch(pages: Pages, block_size: int | None, *, rest: bool) -> None:
        k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
        rows, tile, stages, warps = _tiling(dim_tile, q.element_size(), num_tokens // num_seqs, k_scales is not None)
        if block_size is None:
            # Triton keeps num_stages stages, but one less if block ids must be looked up first.
            stages = min(stages, 2)
            tile = tile if has_large_shared_memory(q.device) else min(tile, 64)
        _prefill_attention_kernel[(num_heads, num_tokens // rows + num_seqs)](
            out, q, k_cache, v_cache, k_scales, v_scales, tables, lens, cu_seqlens,
            q.stride(0), q.stride(1), tables.stride(0), num_kv_heads * head_dim, out.stride(0), out.stride(1),
            softmax_scale * 1.4426950408889634, num_seqs, capacity,
            GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, DIM_TILE=dim_tile, BLOCK_SIZE=block_size,
            ROWS=rows, TILE=tile, SEQS_TILE=seqs_tile(num_seqs), STAGES=stages,
            WINDOW=window, REST=rest, num_warps=warps,
        )  # fmt: skip

    if capacity:
        k, v = stage(pages, cu_seqlens, q.dtype, capacity)
        launch(pages._replace(k=k, v=v, k_scales=None, v_scales=None), None, rest=False)
    if capacity < num_seqs * pages.tables.shape[1] * pages.k.shape[1]:
        launch(pages, pages.k.shape[1], rest=capacity > 0)
    return out


def check_chunks(q: Tensor, pages: Pages, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless queries, caches, tables and the starts of the chunks fit together."""
    num_seqs = pages.lens.shape[0]
    check_inputs(q, pages, num_seqs)
    if cu_seqlens.shape != (num_seqs + 1,):
        raise ValueError(f"cu_seqlens must have {num_seqs + 1} entries, not {tuple(cu_seqlens.shape)}")


def capacity_for(q: Tensor, pages: Pages) -> int:
    """Return the maximum number of 8-bit context tokens to dequantize before attention, 0 if that is not faster.

    The number depends only on shapes: on the longest context that the block tables can hold, and on the number of
    queries in the step.
    """
    num_seqs = pages.lens.shape[0]
    takes = pages.k_scales is not None and q.element_size() == 2 and has_int8_mma(q.device)
    if not takes or q.shape[0] < _LEAST_STAGED * num_seqs:
        return 0
    longest = pages.tables.shape[1] * pages.k.shape[1]
    return min(num_seqs * longest, max(longest, q.shape[0]))


def _tiling(dim_tile: int, element_size: int, average_chunk: int, in_8_bits: bool) -> tuple[int, int, int, int]:
    """Return (queries per tile, tokens per tile, pipeline stages, warps)."""
    if element_size == 4:  # no tensor cores for full float32: larger tiles overflow the registers
        return 32, 32, 1, 4
    if dim_tile > 128:
        return 64, 32, 2, 4
    if average_chunk < 4096:
        return 64, 64, 2, 4
    # int8 passes through registers on the way to the tensor cores: with more tokens per tile, registers would spill.
    return 128, 64 if in_8_bits else 128, 3, 8
