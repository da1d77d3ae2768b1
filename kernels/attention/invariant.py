"""Batch-invariant attention: a query's result is bitwise the same in decoding, in a chunk of any size, and alone.

A context is divided into segments at fixed token positions, and segments into tiles of ``TILE`` tokens. Each segment
has its own running softmax over its tiles in order. The segments' results are then joined in order. Only the assignment
of segments to programs, and the number of queries per program, may depend on the batch. A tile or a segment that a
query does not attend to changes no bit of the query's result: it adds zero weights, and multiplies sums by one.

The sum of the weights is a matmul with ones, so that the tensor cores add them in the same order for any shape of tile.
The compiler must never contract multiplications and additions (``enable_fp_fusion``), because it might do so in one
kernel and not in another.

- ``_decode_kernel``, grid (kv heads, sequences, splits): as in `minillm.kernels.attention.decode`. A split is several
  segments. If there is only one split, its program joins the segments itself, else ``_join_kernel`` does, grid
  (sequences, heads).
- ``_prefill_kernel``, grid (heads, tiles of queries over all chunks): as in `minillm.kernels.attention.prefill`.

Bytes and FLOPs are those of these two modules. With splits, a segment's result is also written and read, 4 bytes for
each value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages, next_power_of_2
from minillm.kernels.attention.decode import check_inputs, k_numbers, load_scales, num_splits_for, share, v_numbers
from minillm.kernels.attention.int8_prefill import seqs_tile
from minillm.kernels.attention.prefill import check_chunks, find_chunk, load_queries
from minillm.kernels.compat import INTERPRETED, dot, has_int8_mma, pdl_options, plain_operand, wait_for_inputs
from minillm.kernels.launch import launched

_COLUMNS = tl.constexpr(16)  # of ones: the minimum of the tensor cores
_JOINED = tl.constexpr(4 if INTERPRETED.value else 32)  # segments to load results of at a time


@triton.jit
def _fold(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, tokens, end, visible, dims, is_dim, slot_stride,
    scale_log2e, maximum, total, out,
    ROWS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens to the running softmax of a segment. Return the new maximum, sum and outputs.

    ``visible`` is the mask ``[queries, tokens]`` of tokens that a query attends to; None means all.
    """
    valid = tokens < end
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
    offsets = slots[:, None] * slot_stride + dims[None, :]
    mask = valid[:, None] & is_dim[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    if k_scales_ptr is not None:
        k, v = plain_operand(k_numbers(k, q)), plain_operand(v_numbers(v, q))
    scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32))
    if k_scales_ptr is not None:
        scores *= load_scales(k_scales_ptr, kv_head, blocks, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2e)
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    correction = tl.exp2(maximum - safe)[:, None]
    zeros = tl.zeros_like(scores)  # tl.fma needs operands of one shape
    weights = tl.exp2(tl.fma(scores, zeros + scale_log2e, zeros - safe[:, None]))
    total = dot(weights.to(v.dtype), tl.full([TILE, _COLUMNS], 1.0, v.dtype), total * correction)
    if v_scales_ptr is not None:
        v_scales = load_scales(v_scales_ptr, kv_head, blocks, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
        weights = share(weights, v_scales, q)
    return new_maximum, total, dot(weights.to(v.dtype), v, out * correction)


@triton.jit
def _weigh(maximum, part_maximum):
    """Return the new maximum after joining a segment, and two factors.

    The first factor rescales the sums and outputs of the earlier segments. The second factor rescales those of the
    joined segment.
    """
    new_maximum = tl.maximum(maximum, part_maximum)
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return new_maximum, tl.exp2(maximum - safe), tl.exp2(part_maximum - safe)


@triton.jit
def _join(maximum, total, out, part_maximum, part_total, part_out):
    """Join the result of the next segment to the result of all earlier segments, for queries ``[rows]``."""
    maximum, factor, part_factor = _weigh(maximum, part_maximum)
    total = total * factor + tl.max(part_total, axis=1) * part_factor  # all columns are equal
    return maximum, total, out * factor[:, None] + part_out * part_factor[:, None]


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM_TILE: tl.constexpr):
    """Return the running softmax of a segment before its first tile: maximum, sum of weights, outputs."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    return maximum, tl.zeros([ROWS, _COLUMNS], tl.float32), tl.zeros([ROWS, DIM_TILE], tl.float32)


@triton.jit
def _divided(out, total):
    return out / tl.where(total > 0, total, 1.0)


# The first eight segments have two tiles, so that a short context has several segments. The others have eight tiles.
@triton.jit
def _segment_of(token, TILE: tl.constexpr):
    """Return the number of the segment that contains ``token``.

    The first 8 segments of a context have two tiles of TILE tokens each. All later segments have eight tiles.
    """
    return tl.where(token < 16 * TILE, token // (2 * TILE), 6 + token // (8 * TILE))


@triton.jit
def _begin_of(segment, TILE: tl.constexpr):
    """Return the first token of a segment."""
    return tl.where(segment < 8, segment * (2 * TILE), (segment - 6) * (8 * TILE))


@triton.jit
def _begins_segment(token, TILE: tl.constexpr):
    return (token % (8 * TILE) == 0) | ((token < 16 * TILE) & (token % (2 * TILE) == 0))


@triton.jit
def _segments_of(context, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return a context's first visible segment, the segment after its last one, and its first visible token.

    See `_segment_of` for the segments.
    """
    seen_begin = 0
    if WINDOW is not None:
        seen_begin = tl.maximum(context - WINDOW, 0)
    return _segment_of(seen_begin, TILE), tl.where(context > 0, _segment_of(context - 1, TILE) + 1, 0), seen_begin


@launched
@triton.jit(do_not_specialize=["num_splits", "table_stride", "num_segments"])
def _decode_kernel(
    out_ptr, parts_ptr, sums_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr,
    q_seq_stride, q_head_stride, table_stride, slot_stride, scale_log2e, num_heads, num_splits, num_segments,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    context = tl.load(lens_ptr + seq)
    first, behind, seen_begin = _segments_of(context, TILE, WINDOW)
    size = tl.cdiv(behind - first, num_splits)
    first += tl.program_id(2) * size
    if PARTIAL and first >= behind:
        return
    start, end = _begin_of(first, TILE), tl.minimum(_begin_of(first + size, TILE), context)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    is_dim, is_row = dims < HEAD_DIM, rows < GROUP
    heads = kv_head * GROUP + rows
    row_mask = is_row[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + seq * q_seq_stride + heads[:, None] * q_head_stride + dims[None, :], mask=row_mask, other=0.0)
    k_ptr, v_ptr = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = tables_ptr + seq * table_stride
    columns = tl.arange(0, TILE)
    maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)
    part_maximum, part_total, part_out = _nothing(ROWS, DIM_TILE)
    for position in tl.range(start, end, TILE, num_stages=STAGES):
        tokens = position + columns
        visible = (tokens >= seen_begin) & (tokens < end)
        part_maximum, part_total, part_out = _fold(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, tokens, end, visible[None, :], dims,
            is_dim, slot_stride, scale_log2e, part_maximum, part_total, part_out, ROWS, TILE, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if _begins_segment(position + TILE, TILE) | (position + TILE >= end):
            if PARTIAL:
                part = (seq * num_segments + _segment_of(position, TILE)) * num_heads + heads
                tl.store(sums_ptr + part * 2, part_maximum, mask=is_row)
                tl.store(sums_ptr + part * 2 + 1, tl.max(part_total, axis=1), mask=is_row)
                tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], part_out, mask=row_mask)
            else:
                maximum, total, out = _join(maximum, total, out, part_maximum, part_total, part_out)
            part_maximum, part_total, part_out = _nothing(ROWS, DIM_TILE)
    if not PARTIAL:
        at = (seq * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + at, _divided(out, total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)


@launched
@triton.jit(do_not_specialize=["num_segments"])
def _join_kernel(
    out_ptr, parts_ptr, sums_ptr, lens_ptr, num_heads, num_segments,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(lens_ptr + seq)
    first, end, _seen_begin = _segments_of(context, TILE, WINDOW)
    dims = tl.arange(0, DIM_TILE)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([DIM_TILE], tl.float32)
    one = tl.arange(0, 1)
    for segment in tl.range(first, end, _JOINED):
        for i in tl.static_range(_JOINED):
            is_there = segment + i + one < end
            part = (seq * num_segments + segment + i) * num_heads + head
            part_maximum = tl.load(sums_ptr + part * 2 + one, mask=is_there, other=float("-inf"))
            part_total = tl.load(sums_ptr + part * 2 + 1 + one, mask=is_there, other=0.0)
            part_out = tl.load(parts_ptr + part * HEAD_DIM + dims, mask=is_there & (dims < HEAD_DIM), other=0.0)
            maximum, factor, part_factor = _weigh(maximum, part_maximum)
            total = total * factor + part_total * part_factor
            out = out * factor + part_out * part_factor
    out = _divided(out, total)
    tl.store(out_ptr + (seq * num_heads + head) * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), dims < HEAD_DIM)


@launched
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "tables_ptr", "lens_ptr"])
def _prefill_kernel(
    out_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr, cu_seqlens_ptr,
    q_token_stride, q_head_stride, table_stride, slot_stride, scale_log2e, num_heads, num_seqs,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SEQS_TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    chunk, tile_number = find_chunk(cu_seqlens_ptr, number, num_seqs, ROWS, SEQS_TILE)
    if chunk >= num_seqs:
        return
    begin = tl.load(cu_seqlens_ptr + chunk)
    length = tl.load(cu_seqlens_ptr + chunk + 1) - begin
    context = tl.load(lens_ptr + chunk)
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    q, tokens, positions, row_mask = load_queries(
        q_ptr, begin, length, context, tile_number, head, q_token_stride, q_head_stride, ROWS, HEAD_DIM, DIM_TILE
    )
    kv_head = head // GROUP
    k_ptr, v_ptr = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = tables_ptr + chunk.to(tl.int64) * table_stride
    columns = tl.arange(0, TILE)
    maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)

    # Tokens that are visible to every query of the tile need no comparison.
    first_position = context - length + tile_number * ROWS
    end = tl.minimum(first_position + ROWS, context)
    start, unmasked_end = 0, (first_position + 1) // TILE * TILE
    if WINDOW is not None:
        start = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        unmasked_end = start
    part_maximum, part_total, part_out = _nothing(ROWS, DIM_TILE)
    for position in tl.range(start, unmasked_end, TILE, num_stages=STAGES):
        part_maximum, part_total, part_out = _fold(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, position + columns, unmasked_end, None,
            dims, is_dim, slot_stride, scale_log2e, part_maximum, part_total, part_out,
            ROWS, TILE, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if _begins_segment(position + TILE, TILE):
            maximum, total, out = _join(maximum, total, out, part_maximum, part_total, part_out)
            part_maximum, part_total, part_out = _nothing(ROWS, DIM_TILE)
    for position in tl.range(unmasked_end, end, TILE):
        seen = position + columns
        visible = (seen < end)[None, :] & (seen[None, :] <= positions[:, None])
        if WINDOW is not None:
            visible = visible & (seen[None, :] > positions[:, None] - WINDOW)
        part_maximum, part_total, part_out = _fold(
            q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, seen, end, visible, dims, is_dim,
            slot_stride, scale_log2e, part_maximum, part_total, part_out, ROWS, TILE, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if _begins_segment(position + TILE, TILE):
            maximum, total, out = _join(maximum, total, out, part_maximum, part_total, part_out)
            part_maximum, part_total, part_out = _nothing(ROWS, DIM_TILE)
    maximum, total, out = _join(maximum, total, out, part_maximum, part_total, part_out)
    at = (tokens * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + at, _divided(out, total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float, *, num_splits: int | None = None) -> Tensor:
    """Compute `reference.paged_attention`, with the requirements of `attention.decode.paged_attention`."""
    num_seqs, num_heads, head_dim = q.shape
    k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
    _, block_size, num_kv_heads, _ = k_cache.shape
    check_inputs(q, pages, num_seqs)
    out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    longest = tables.shape[1] * block_size
    tile = tile_of(q.element_size(), head_dim, q.device)
    num_segments = num_segments_of(longest, tile)
    if num_splits is None:
        most = min(num_segments, num_segments_of(window or longest, tile) + 1)
        num_splits = num_splits_for(num_seqs, num_kv_heads, most, q.device, 1)
    group, is_partial = num_heads // num_kv_heads, num_splits > 1
    dim_tile, pdl = max(16, next_power_of_2(head_dim)), pdl_options(q.device)
    parts, sums = out, out
    if is_partial:
        parts = torch.empty(num_seqs, num_segments, num_heads, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(num_seqs, num_segments, num_heads, 2, dtype=torch.float32, device=q.device)
    _decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        out, parts, sums, q, k_cache, v_cache, k_scales, v_scales, tables, lens,
        q.stride(0), q.stride(1), tables.stride(0), num_kv_heads * head_dim, softmax_scale * 1.4426950408889634,
        num_heads, num_splits, num_segments,
        GROUP=group, ROWS=max(16, next_power_of_2(group)), HEAD_DIM=head_dim, DIM_TILE=dim_tile,
        BLOCK_SIZE=block_size, TILE=tile, WINDOW=window, PARTIAL=is_partial,
        **_decode_options(q.element_size(), dim_tile), enable_fp_fusion=False, **pdl,
    )  # fmt: skip
    if is_partial:
        _join_kernel[(num_seqs, num_heads)](
            out, parts, sums, lens, num_heads, num_segments,
            HEAD_DIM=head_dim, DIM_TILE=dim_tile, TILE=tile, WINDOW=window,
            num_warps=1, enable_fp_fusion=False, **pdl,
        )  # fmt: skip
    return out


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Compute `reference.prefill_attention`, with the requirements of `attention.prefill.prefill_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
    num_seqs, block_size, num_kv_heads = lens.shape[0], k_cache.shape[1], k_cache.shape[2]
    check_chunks(q, pages, cu_seqlens)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    dim_tile = max(16, next_power_of_2(head_dim))
    rows, options = _prefill_options(q.element_size(), dim_tile)
    _prefill_kernel[(num_heads, num_tokens // rows + num_seqs)](
        out, q, k_cache, v_cache, k_scales, v_scales, tables, lens, cu_seqlens,
        q.stride(0), q.stride(1), tables.stride(0), num_kv_heads * head_dim, softmax_scale * 1.4426950408889634,
        num_heads, num_seqs,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, DIM_TILE=dim_tile, BLOCK_SIZE=block_size,
        ROWS=rows, TILE=tile_of(q.element_size(), head_dim, q.device), SEQS_TILE=seqs_tile(num_seqs), WINDOW=window,
        **options, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def tile_of(element_size: int, head_dim: int, device: torch.device) -> int:
    """Return the number of tokens in a tile. It is fixed for each dtype, head size and kind of GPU."""
    if INTERPRETED.value:
        return 16
    row_bytes = max(16, next_power_of_2(head_dim)) * element_size
    tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return tile if has_int8_mma(device) else max(16, tile // 2)


def num_segments_of(tokens: int, tile: int) -> int:
    """Return the number of segments of a context of ``tokens`` tokens: see `_segment_of`."""
    return -(-tokens // (2 * tile)) if tokens <= 16 * tile else 6 - (-tokens // (8 * tile))


def partial_bytes(
    max_num_seqs: int, max_context: int, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int,
    device: torch.device,
) -> int:  # fmt: skip
    """Return the maximum bytes of segment results that decode attention stores, for up to ``max_num_seqs`` sequences.

    Large batches store none, because their contexts are not split.
    """
    segments = num_segments_of(max_context, tile_of(element_size, head_dim, device))
    seqs = [n for n in range(1, max_num_seqs + 1) if num_splits_for(n, num_kv_heads, segments, device, 1) > 1]
    return max(seqs, default=0) * segments * num_heads * (head_dim + 2) * 4


def _decode_options(element_size: int, dim_tile: int) -> dict[str, int]:
    """Return launch options of `_decode_kernel`."""
    if element_size == 4 or dim_tile > 128:
        return {"STAGES": 1, "num_warps": 4}
    return {"STAGES": 2, "num_warps": 4, "maxnreg": 128}  # four programs per multiprocessor


def _prefill_options(element_size: int, dim_tile: int) -> tuple[int, dict[str, int]]:
    """Return the number of queries in a program of `_prefill_kernel`, and its launch options."""
    if INTERPRETED.value:
        return 16, {"STAGES": 1, "num_warps": 4}
    if element_size == 4 or dim_tile > 128:
        return 64, {"STAGES": 1, "num_warps": 8}
    return 64, {"STAGES": 2, "num_warps": 4}
