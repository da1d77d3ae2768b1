"""Decode attention over a paged KV cache: one query per sequence (PagedAttention, Kwon et al. 2023).

Bytes: contexts * kv_heads * head_dim * 2 elements, each read once, with little arithmetic per byte. The kernel is
memory-bound, and must keep enough loads in flight.

Grid: (kv heads, sequences, splits). A program takes the query heads of one kv head as the rows of one tile (padded to
16 for the tensor cores). It iterates over its part of the context, ``TILE`` tokens at a time, with a running softmax
(Milakov & Gimelshein 2018). It looks up the block id of *each token* of a tile, so the tile does not depend on the
block size. Splits (Flash-Decoding, Dao et al. 2023) fill the GPU when there are few sequences; a second kernel merges
the results of the parts. The number of splits depends only on shapes, so that a launch can be captured in a CUDA graph;
a program with an empty part ends at once. With a sliding window, only the end of a longer context is read.

An 8-bit cache is read as integers, which the queries' dtype represents exactly for the tensor cores. K's scales
multiply the scores, and V's scales multiply the softmax weights.

Block ids are widened to 64 bits before multiplication. Threads past the end of a context read nothing: unused slots may
hold NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages, check_scales, next_power_of_2
from minillm.kernels.attention import int8_decode as attention_lanes
from minillm.kernels.attention.int8_decode import TOKENS, attend_group, load_group
from minillm.kernels.attention.plan import most_parts
from minillm.kernels.compat import INTERPRETED, dot, num_multiprocessors, pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit import few_tokens
from minillm.kernels.linear.low_bit.few_tokens import FixedScale, Float16Activations, by_eights


@triton.jit
def load_scales(
    scales_ptr, kv_head, blocks, tokens, valid, slot_stride, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Load the scales of a tile's tokens in one head of an 8-bit cache.

    ``blocks`` are the tokens' block ids, int64. Tokens that are not ``valid`` get scale 0; None means that all are.
    """
    at = blocks * (slot_stride // HEAD_DIM * BLOCK_SIZE) + (kv_head * BLOCK_SIZE + tokens % BLOCK_SIZE)
    if valid is None:
        scales = tl.load(scales_ptr + at)
    else:
        scales = tl.load(scales_ptr + at, mask=valid, other=0.0)
    return scales


@triton.jit
def k_numbers(levels, q):
    """Convert int8 values of the cache to q's dtype, which represents them exactly."""
    if INTERPRETED:
        levels = levels.to(tl.float32)
    return levels.to(q.dtype)


@triton.jit
def v_numbers(levels, q):
    """Convert like `k_numbers`. float16 values are also divided by 64: see `share`."""
    numbers = k_numbers(levels, q)
    if q.dtype == tl.float16:
        numbers = (numbers * 0.015625).to(tl.float16)
    return numbers


@triton.jit
def share(weights, scales, q):
    """Multiply softmax weights by V's scales, as an operand of the matmul with `v_numbers`.

    In float16 the products are also multiplied by 64, which undoes the division in `v_numbers`. This keeps the digits
    of small values of V, and large values do not overflow.
    """
    if q.dtype == tl.float16:
        scales = scales * 64
    return weights * scales[None, :]


@triton.jit
def attend_tile(
    q, k_ptr, v_ptr, k_scales, v_scales, slots, valid, dims, is_dim, slot_stride, scale_log2e, maximum, total, out,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of tokens to the running softmax of ``q [rows, dims]``. Return the new maximum, sum and output.

    ``k_scales`` and ``v_scales`` are the tokens' scales in an 8-bit cache, else None.
    """
    mask = valid[:, None] & is_dim[None, :]
    offsets = slots[:, None] * slot_stride + dims[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    if k_scales is not None:
        k = k_numbers(k, q)
        v = v_numbers(v, q)
    scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale_log2e
    if k_scales is not None:
        scores = scores * k_scales[None, :]
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    correction = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    total = total * correction + tl.sum(weights, axis=1)
    out = out * correction[:, None]
    if v_scales is not None:
        weights = share(weights, v_scales, q)
    out = dot(weights.to(v.dtype), v, out)
    return new_maximum, total, out


@triton.jit
def _part(context, split, num_splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first token of part ``split`` of the visible context, and the token after the part's last token."""
    seen = context
    if WINDOW is not None:
        seen = tl.minimum(context, WINDOW)
    size = tl.cdiv(tl.cdiv(seen, num_splits), TILE) * TILE
    start = context - seen + split * size
    return start, tl.minimum(start + size, context)


@launched
@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _paged_attention_kernel(
    out_ptr, lse_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr,
    q_seq_stride, q_head_stride, table_stride, slot_stride,
    out_seq_stride, out_head_stride, out_split_stride, lse_seq_stride, lse_split_stride, scale_log2e, num_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + seq)
    start, end = _part(context, split, num_splits, TILE, WINDOW)
    if start >= context and split > 0:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    row_mask = is_row[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + seq * q_seq_stride + heads[:, None] * q_head_stride + dims[None, :], mask=row_mask, other=0.0)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = tables_ptr + seq * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)
    columns = tl.arange(0, TILE)
    for position in tl.range(start, end, TILE, num_stages=STAGES):
        tokens = position + columns
        valid = tokens < end
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
        k_scales, v_scales = None, None
        if k_scales_ptr is not None:
            k_scales = load_scales(k_scales_ptr, kv_head, blocks, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
            v_scales = load_scales(v_scales_ptr, kv_head, blocks, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
        maximum, total, out = attend_tile(
            q, k_ptr, v_ptr, k_scales, v_scales, slots, valid, dims, is_dim, slot_stride, scale_log2e,
            maximum, total, out, ROWS, TILE,
        )  # fmt: skip
    divisor = tl.where(total > 0, total, 1.0)  # an empty context gives zero, and a log-sum-exp of -inf
    out = out / divisor[:, None]
    out_offsets = seq * out_seq_stride + heads[:, None] * out_head_stride + split * out_split_stride + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    if PARTIAL:
        at = seq * lse_seq_stride + split * lse_split_stride + heads
        tl.store(lse_ptr + at, maximum + tl.log2(divisor), mask=is_row)  # base 2


@launched
@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _lanes_attention_kernel(
    out_ptr, lse_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, lens_ptr,
    q_seq_stride, q_head_stride, table_stride,
    out_seq_stride, out_head_stride, out_split_stride, lse_seq_stride, lse_split_stride, scale_log2e, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute the same as `_paged_attention_kernel` for an 8-bit cache, with the lane kernel of `int8_decode`."""
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    queries = load_group(
        q_ptr + seq * q_seq_stride + kv_head * GROUP * q_head_stride, q_head_stride, GROUP, HEAD_DIM, WARPS
    )
    context = tl.load(lens_ptr + seq)
    start, end = _part(context, split, num_splits, TILE, WINDOW)
    if start >= context and split > 0:
        return
    out_ptr += seq * out_seq_stride + kv_head * GROUP * out_head_stride + split * out_split_stride
    lse_ptr += seq * lse_seq_stride + split * lse_split_stride + kv_head * GROUP
    attend_group(
        out_ptr, lse_ptr if PARTIAL else None, queries, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr,
        tables_ptr + seq * table_stride, out_head_stride, scale_log2e, kv_head, start, end,
        q_ptr.dtype.element_ty, GROUP, HEAD_DIM, BLOCK_SIZE, KV_HEADS, WARPS,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    out_ptr, growth_ptr, partial_ptr, lse_ptr, lens_ptr, num_turns, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr, SPLITS_TILE: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one head of a sequence, weighted by their share of the softmax.

    Grid: (sequences, heads). If ``growth_ptr`` is given, the output becomes the input of a low-bit matmul. It is then
    multiplied by the growth (see `FixedScale`), and stored in the order of `Float16Activations.x`, by eights of tokens.
    In that order, a token has ``num_turns`` runs of 128 columns.
    """
    wait_for_inputs(PDL)
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(lens_ptr + seq)
    if WINDOW is not None:
        context = tl.minimum(context, WINDOW)
    part = tl.cdiv(tl.cdiv(context, num_splits), TILE) * TILE
    splits = tl.arange(0, SPLITS_TILE)
    # Splits without a token wrote nothing, except for the first one.
    written = (splits < num_splits) & ((splits * part < context) | (splits == 0))
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    row = seq * num_splits * num_heads + splits * num_heads + head
    lse = tl.load(lse_ptr + row, mask=written, other=float("-inf"))
    maximum = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weights, axis=0)
    partial = tl.load(
        partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=written[:, None] & is_dim[None, :], other=0.0
    )
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    column = head * HEAD_DIM + dims
    if growth_ptr is None:
        at = out_ptr + seq * num_heads * HEAD_DIM + column
    else:
        out *= tl.load(growth_ptr)
        at = out_ptr + by_eights(seq // 8, seq % 8, column // 8, column % 8, num_turns)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def num_splits_for(num_seqs: int, num_kv_heads: int, max_context: int, device: torch.device, least: int = 64) -> int:
    """Return the number of parts into which to split each context, so that there are enough programs to fill the GPU.

    The number depends only on shapes. A context of ``max_context`` tokens gets parts of about ``least`` tokens or more.
    The number is a power of two, because each padded number has its own variant of `_merge_splits_kernel`.
    """
    processors = num_multiprocessors(device) if device.type == "cuda" else 4
    most = max(1, min(most_parts(num_seqs, num_kv_heads, processors), -(-max_context // least)))
    return 1 << (most.bit_length() - 1)


class _Parts(NamedTuple):
    """Partial results of attention, one for each part of a context, before they are merged."""

    numbers: Tensor  # [sequences, parts, heads, head_dim] float32
    lse: Tensor  # [sequences, parts, heads] float32
    tile: int  # the length of each part is a multiple of this number of tokens


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float, *, num_splits: int | None = None) -> Tensor:
    """Compute `reference.paged_attention`. Contexts are split into ``num_splits`` parts, by default `num_splits_for`.

    ``q`` may have any strides except the last, K and V are contiguous, block_size is a power of two up to 256. Raises
    ValueError for a wrong shape or layout.
    """
    check_inputs(q, pages, q.shape[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    num_splits = _num_splits(q, pages) if num_splits is None else num_splits
    if num_splits == 1:
        _attend(q, pages, softmax_scale, out)
    else:
        _merge(_attend_parts(q, pages, softmax_scale, num_splits), pages, out, None)
    return out


def attention_to_float16(q: Tensor, pages: Pages, softmax_scale: float, by: FixedScale) -> Float16Activations | None:
    """Compute `paged_attention`, and store the result in float16 with the fixed scale ``by``.

    The result is in the layout in which a low-bit matmul reads its input ``[sequences, heads * head_dim]``.

    Return None if contexts are not split, because only the kernel that merges the parts of a context can write this
    layout. Also return None if ``heads * head_dim`` is not a multiple of SPAN, because the matmul would read past the
    last head.
    """
    check_inputs(q, pages, q.shape[0])
    num_seqs, num_heads, head_dim = q.shape
    num_splits = _num_splits(q, pages)
    if num_splits == 1 or num_heads * head_dim % few_tokens.SPAN:
        return None
    out = few_tokens.allocate_by_eights(q, num_heads * head_dim)
    _merge(_attend_parts(q, pages, softmax_scale, num_splits), pages, out, by.growth)
    return Float16Activations(out, by.scales[:num_seqs])


def _num_splits(q: Tensor, pages: Pages) -> int:
    least = TOKENS.value if attention_lanes.takes(q, pages) else max(32, _tiling(q, pages)[0])
    return num_splits_for(q.shape[0], pages.k.shape[2], _longest(pages), q.device, least)


def _longest(pages: Pages) -> int:
    """Return the maximum number of tokens to which a query can attend."""
    longest = pages.tables.shape[1] * pages.k.shape[1]
    return min(longest, pages.window or longest)


def _attend_parts(q: Tensor, pages: Pages, softmax_scale: float, num_splits: int) -> _Parts:
    num_seqs, num_heads, head_dim = q.shape
    numbers = torch.empty(num_seqs, num_splits, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_seqs, num_splits, num_heads, dtype=torch.float32, device=q.device)
    return _Parts(numbers, lse, _attend(q, pages, softmax_scale, numbers, lse))


def _attend(q: Tensor, pages: Pages, softmax_scale: float, out: Tensor, lse: Tensor | None = None) -> int:
    """Launch the attention kernel that supports ``pages``. Return the number of tokens in a tile of this kernel.

    Without ``lse``, contexts are not split, and ``out`` gets the final results. With ``lse``, contexts are split:
    ``out`` and ``lse`` are the tensors `numbers` and `lse` of `_Parts`.
    """
    num_seqs, num_heads, head_dim = q.shape
    k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
    _, block_size, num_kv_heads, _ = k_cache.shape
    group, num_splits = num_heads // num_kv_heads, 1 if lse is None else lse.shape[1]
    dim_tile = max(16, next_power_of_2(head_dim))
    tile, stages, warps = _tiling(q, pages)
    pdl = pdl_options(q.device)
    if lse is None:
        lse, strides = out, (out.stride(0), out.stride(1), 0, 0, 0)
    else:
        strides = (out.stride(0), out.stride(2), out.stride(1), num_splits * num_heads, num_heads)
    scale = softmax_scale * 1.4426950408889634
    grid = (num_kv_heads, num_seqs, num_splits)
    if attention_lanes.takes(q, pages):
        tile, warps = lanes_tiling(-(-_longest(pages) // num_splits))
        _lanes_attention_kernel[grid](
            out, lse, q, k_cache.view(torch.int32), v_cache.view(torch.int32), k_scales, v_scales,
            tables, lens, q.stride(0), q.stride(1), tables.stride(0), *strides, scale, num_splits,
            GROUP=group, HEAD_DIM=head_dim, KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, TILE=tile, WARPS=warps,
            PARTIAL=num_splits > 1, WINDOW=window, num_warps=warps, maxnreg=attention_lanes.registers(group), **pdl,
        )  # fmt: skip
        return tile
    _paged_attention_kernel[grid](
        out, lse, q, k_cache, v_cache, k_scales, v_scales, tables, lens,
        q.stride(0), q.stride(1), tables.stride(0), num_kv_heads * head_dim,
        *strides, scale, num_splits,
        GROUP=group, ROWS=max(16, next_power_of_2(group)), HEAD_DIM=head_dim, DIM_TILE=dim_tile,
        BLOCK_SIZE=block_size, TILE=tile, STAGES=stages, PARTIAL=num_splits > 1,
        WINDOW=window, num_warps=warps, **pdl,
    )  # fmt: skip
    return tile


def _merge(parts: _Parts, pages: Pages, out: Tensor, growth: Tensor | None) -> None:
    """Write merged results to ``out``: in the queries' shape, or, with ``growth``, as `Float16Activations.x`."""
    num_seqs, num_splits, num_heads, head_dim = parts.numbers.shape
    _merge_splits_kernel[(num_seqs, num_heads)](
        out, growth, parts.numbers, parts.lse, pages.lens, out.shape[1], num_heads, num_splits,
        HEAD_DIM=head_dim, DIM_TILE=max(16, next_power_of_2(head_dim)), TILE=parts.tile,
        SPLITS_TILE=next_power_of_2(num_splits), WINDOW=pages.window, num_warps=4, **pdl_options(out.device),
    )  # fmt: skip


def lanes_tiling(part: int) -> tuple[int, int]:
    """Return `_Parts.tile` and the number of warps, for parts of up to ``part`` tokens.

    A warp handles 32 tokens at a time, and a single warp needs no merge. The tile is at most 64 tokens, so that
    contexts much shorter than their block tables are still spread over enough programs.
    """
    warps = min(4, next_power_of_2(-(-part // TOKENS.value)))
    return TOKENS.value * min(warps, 2), warps


def _tiling(q: Tensor, pages: Pages) -> tuple[int, int, int]:
    return tiling(max(16, next_power_of_2(q.shape[2])), q.element_size(), pages.k_scales is not None)


def tiling(dim_tile: int, element_size: int, in_8_bits: bool) -> tuple[int, int, int]:
    """Return (tokens per tile, pipeline stages, warps). ``element_size`` is the bytes of a query element.

    In 8 bits a token has half the bytes, so a tile gets twice the tokens. On an H200, 64 contexts of 4,096 tokens (32
    query heads and 8 kv heads of 128) take 258 us. With tiles of 64 tokens they take 320 to 344, because V is read from
    shared memory byte by byte.
    """
    if in_8_bits and element_size == 2:
        return (128 if dim_tile <= 128 else 32), 3, 4
    tile = max(16, min(128, 16384 // (dim_tile * element_size)))  # 16 kB of K: more would fill shared memory
    return tile, (3 if dim_tile >= 128 else 2), 4


def check_inputs(q: Tensor, pages: Pages, num_seqs: int) -> None:
    """Raise ValueError unless queries, caches and tables fit together."""
    k_cache, v_cache, tables, lens, window, k_scales, v_scales = pages
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    if v_cache.shape != k_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous and of one shape")
    check_scales(k_cache, k_scales)
    check_scales(v_cache, v_scales)
    if cache_dim != head_dim or num_heads % num_kv_heads or (k_scales is None and q.dtype != k_cache.dtype):
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit a cache of {k_cache.dtype} {tuple(k_cache.shape)}")
    if block_size & (block_size - 1) or block_size > 256:
        raise ValueError(f"block_size must be a power of two up to 256, not {block_size}")
    if q.stride(2) != 1 or tables.stride(1) != 1 or tables.dtype != torch.int32:
        raise ValueError("q and int32 block_tables must have a contiguous last dimension")
    if tables.shape[0] != num_seqs or lens.shape != (num_seqs,):
        raise ValueError(f"block_tables and context_lens must have {num_seqs} rows")
    if window is not None and window < 1:
        raise ValueError(f"a window must have at least one token, not {window}")
