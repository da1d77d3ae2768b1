"""Decode attention that reads each block once for all sequences that share it.

`minillm.kernels.attention.plan` makes the plan and defines its terms: a node is a run of shared blocks, an item is a
part of a node, a tail is the rest of a sequence's context. There are two phases (ChunkAttention, Ye et al. 2024) and a
merge:

1. *Chunk first*: a program computes items, each for one kv head. The rows of its tile are the queries of the node's
  sequences, for every query head of the kv head. It stores an output and a log-sum-exp in float32, separately for each
  sequence.
2. *Sequence first*: a program computes a sequence's tail, or a part of it, for one kv head.
3. *Merge*: a program merges the partial results of a sequence, from its nodes and its tail.

The first two phases overlap (programmatic dependent launch): the first is compute-bound, the second memory-bound. All
programs of the first phase run at the same time and loop over the items. The second phase can therefore start at once,
and no tail waits for a node. The plan decides where programs of the first phase run (`AttentionShape.ways`). Either
each multiprocessor has one, which reserves more than half of the shared memory to exclude a second one and leaves space
for tails. Or, in 8 bits, some multiprocessors have two, and the others process tails.

Grids: (programs), (kv heads, sequences, splits) and (sequences, heads). They depend on the number of sequences and on
`WorkList.launch`, which the host knows. The rest of the plan is on the device, so sharing may change from step to step
under one CUDA graph. Tiles: in the first phase 64 rows (the minimum of Hopper's tensor cores) x 16 kB of K; in the
second 16 rows x 16 tokens or 8 kB of K; in the merge up to 8 heads.

Bytes: each node's blocks once for every 64 rows (from the L2 except for the first time), each tail once, and 8 x
head_dim for each query head and result. FLOPs: 4 x head_dim for each query head and token, as without sharing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages, cdiv, next_power_of_2
from minillm.kernels.attention import int8_decode as attention_lanes
from minillm.kernels.attention import int8_shared as prefix_lanes
from minillm.kernels.attention.decode import attend_tile, check_inputs, load_scales, paged_attention
from minillm.kernels.attention.int8_decode import TOKENS, attend_group, load_group
from minillm.kernels.attention.int8_shared import attend_rows, store_rows
from minillm.kernels.attention.plan import ITEM_WORDS, AttentionShape, WorkList
from minillm.kernels.compat import has_large_shared_memory, pdl_options, release, wait, wait_for_inputs
from minillm.kernels.launch import launched

_ITEM_WORDS = tl.constexpr(ITEM_WORDS)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, table_ptr, begin, end, dims, is_dim, slot_stride, scale_log2e,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute attention of ``q [rows, dims]`` over tokens ``begin … end - 1`` of one block table.

    Returns: the largest score and the sum of softmax weights of each row, ``[rows]``, and outputs ``[rows, dims]`` that
    are not yet divided by that sum.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_TILE], tl.float32)
    columns = tl.arange(0, TILE)
    tokens = begin + columns
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    for position in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = position + columns
        valid = tokens < end
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        k_scales, v_scales = None, None
        if k_scales_ptr is not None:
            wide = blocks.to(tl.int64)
            k_scales = load_scales(k_scales_ptr, kv_head, wide, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
            v_scales = load_scales(v_scales_ptr, kv_head, wide, tokens, valid, slot_stride, HEAD_DIM, BLOCK_SIZE)
        # Load the next tile's block ids a tile ahead, or its loads would wait for them.
        blocks = tl.load(table_ptr + (tokens + TILE) // BLOCK_SIZE, mask=tokens + TILE < end, other=0)
        maximum, total, out = attend_tile(
            q, k_ptr, v_ptr, k_scales, v_scales, slots, valid, dims, is_dim, slot_stride, scale_log2e,
            maximum, total, out, ROWS, TILE,
        )  # fmt: skip
    return maximum, total, out


@triton.jit
def _take_most_shared_memory(ptr, number):
    """Reserve 128 kB of shared memory, so that no second program runs on the same multiprocessor.

    The memory belongs to a matmul that never runs, because ``number`` is never negative. Programs start while those of
    the previous kernel still run. Without the reservation, two programs could share one multiprocessor for as long as
    they live, while other multiprocessors have none.
    """
    if number < 0:
        numbers = (tl.zeros([512, 128], tl.int32) + number).to(tl.bfloat16)
        rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
        products = tl.dot((tl.zeros([64, 512], tl.int32) + number).to(tl.bfloat16), numbers)
        tl.store(ptr + rows * 128 + columns, products)


@triton.jit
def _load_item(items_ptr, order_ptr, starts_ptr, number, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Load one item of the work list: the part of a node that one program computes.

    Returns: the item's number of sequences; one of them, for its block table; the first token; the token after the
    last. Then two tensors ``[ROWS]``: the sequence of each row of the tile, and the index of the row's partial result.
    """
    item_ptr = items_ptr + number * _ITEM_WORDS
    count = tl.load(item_ptr)
    member = tl.load(item_ptr + 1)
    first = tl.load(item_ptr + 2)
    begin = tl.load(item_ptr + 3)
    end = tl.load(item_ptr + 4)
    members = tl.arange(0, ROWS) // GROUP
    seqs = tl.load(order_ptr + first + members, mask=members < count, other=0)
    results = tl.load(starts_ptr + first + members, mask=members < count, other=0) + tl.load(item_ptr + 5)
    return count, member, begin, end, seqs, results


@launched
@triton.jit(do_not_specialize=["table_stride"])
def _chunk_first_kernel(
    partial_ptr, lse_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr,
    counts_ptr, items_ptr, order_ptr, starts_ptr,
    q_seq_stride, q_head_stride, table_stride, slot_stride, scale_log2e, num_heads, num_kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, KV_HEADS: tl.constexpr,
    ALONE: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The plan was copied before the step, so it can be read before the wait.
    num_tasks = tl.load(counts_ptr) * num_kv_heads
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if PAIRS:
        # Programs i and i + num_processors share a multiprocessor. The active ones are spread evenly.
        num_processors, num_pairs = num_programs // 2, tl.load(counts_ptr + 1)
        place = program % num_processors
        pair = place * num_pairs // num_processors
        if (place + 1) * num_pairs // num_processors == pair:
            num_tasks = 0
        program = program // num_processors * num_pairs + pair
        num_programs = 2 * num_pairs
    item = _load_item(items_ptr, order_ptr, starts_ptr, program // num_kv_heads, GROUP, ROWS)
    wait_for_inputs(PDL)
    if ALONE:
        _take_most_shared_memory(partial_ptr, num_tasks)
    for task in tl.range(program, num_tasks, num_programs):
        kv_head = task % num_kv_heads
        count, member, begin, end, seqs, results = item
        table_ptr = tables_ptr + member.to(tl.int64) * table_stride
        rows = tl.arange(0, ROWS)
        is_row = rows // GROUP < count
        heads = kv_head * GROUP + rows % GROUP
        dims = tl.arange(0, DIM_TILE)
        is_dim = dims < HEAD_DIM
        row_mask = is_row[:, None] & is_dim[None, :]
        q_offsets = seqs.to(tl.int64)[:, None] * q_seq_stride + heads[:, None] * q_head_stride + dims[None, :]
        q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
        if KV_HEADS is not None:
            out, factors, lse = attend_rows(
                q, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, begin, end, scale_log2e,
                ROWS, HEAD_DIM, BLOCK_SIZE, KV_HEADS,
            )  # fmt: skip
        else:
            maximum, total, out = _attend(
                q, k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM,
                k_scales_ptr, v_scales_ptr, kv_head, table_ptr, begin, end, dims, is_dim,
                slot_stride, scale_log2e, ROWS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, TILE, STAGES,
            )  # fmt: skip
            out, lse = out / total[:, None], maximum + tl.log2(total)
        at = results.to(tl.int64) * num_heads + heads
        if KV_HEADS is not None:
            store_rows(partial_ptr, at, is_row, out, factors, ROWS, HEAD_DIM)
        else:
            tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=row_mask)
        tl.store(lse_ptr + at, lse, mask=is_row)
        following = task + num_programs
        if following < num_tasks:
            item = _load_item(items_ptr, order_ptr, starts_ptr, following // num_kv_heads, GROUP, ROWS)


@launched
@triton.jit(do_not_specialize=["table_stride"])
def _sequence_first_kernel(
    partial_ptr, lse_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr,
    lens_ptr, order_ptr, tails_ptr,
    q_seq_stride, q_head_stride, table_stride, slot_stride, scale_log2e, num_heads, max_results,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Everything read here existed before the first phase, which waits before it lets this kernel start.
    release(PDL)
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(order_ptr + place).to(tl.int64)
    begin = tl.load(tails_ptr + place)
    if KV_HEADS is not None:
        first = kv_head * GROUP
        queries = load_group(q_ptr + seq * q_seq_stride + first * q_head_stride, q_head_stride, GROUP, HEAD_DIM, 1)
    end = tl.load(lens_ptr + seq)
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), SPLITS), TILE) * TILE
        begin += split * size
        end = tl.minimum(begin + size, end)
    result = (max_results + place * SPLITS + split).to(tl.int64) * num_heads
    if KV_HEADS is not None:
        attend_group(
            partial_ptr + (result + first) * HEAD_DIM, lse_ptr + result + first, queries,
            k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, tables_ptr + seq * table_stride, HEAD_DIM,
            scale_log2e, kv_head, begin, end, q_ptr.dtype.element_ty, GROUP, HEAD_DIM, BLOCK_SIZE, KV_HEADS, 1,
        )  # fmt: skip
    else:
        rows = tl.arange(0, ROWS)
        is_row = rows < GROUP
        heads = kv_head * GROUP + rows
        dims = tl.arange(0, DIM_TILE)
        is_dim = dims < HEAD_DIM
        row_mask = is_row[:, None] & is_dim[None, :]
        q = tl.load(
            q_ptr + seq * q_seq_stride + heads[:, None] * q_head_stride + dims[None, :], mask=row_mask, other=0.0
        )
        maximum, total, out = _attend(
            q, k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM,
            k_scales_ptr, v_scales_ptr, kv_head, tables_ptr + seq * table_stride, begin, end, dims, is_dim,
            slot_stride, scale_log2e, ROWS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, TILE, STAGES,
        )  # fmt: skip
        divisor = tl.where(total > 0, total, 1.0)  # an empty context, or part of a tail, gives zero
        at = result + heads
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], out / divisor[:, None], mask=row_mask)
        tl.store(lse_ptr + at, maximum + tl.log2(divisor), mask=is_row)
    # A waiting program would keep another from starting. Only one waits, so that this kernel ends after the first.
    last = (kv_head == tl.num_programs(0) - 1) & (place == tl.num_programs(1) - 1) & (split == SPLITS - 1)
    if last:
        wait(PDL)


@launched
@triton.jit
def _merge_results_kernel(
    out_ptr, partial_ptr, lse_ptr, order_ptr, starts_ptr, out_seq_stride, out_head_stride, num_heads, max_results,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    seq = tl.load(order_ptr + place).to(tl.int64)
    first = tl.load(starts_ptr + place)
    num_results = SPLITS + tl.load(starts_ptr + place + 1) - first
    wait_for_inputs(PDL)
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, DIM_TILE], tl.float32)
    for start in range(0, num_results, AT_ONCE):
        for step in tl.static_range(AT_ONCE):  # their loads are in flight together
            number = start + step + tl.zeros([HEADS], tl.int32)
            result = tl.where(number < SPLITS, max_results + place * SPLITS + number, first + number - SPLITS)
            at = result.to(tl.int64) * num_heads + heads
            mask = is_head & (number < num_results)
            lse = tl.load(lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            partial = tl.load(
                partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None] & is_dim[None, :],
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_maximum = tl.maximum(maximum, lse)
            anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # for heads without a token so far
            correction = tl.exp2(maximum - anchor)
            weight = tl.exp2(lse - anchor)
            total = total * correction + weight
            out = out * correction[:, None] + partial * weight[:, None]
            maximum = new_maximum
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    out_ptr += seq * out_seq_stride
    at = heads[:, None] * out_head_stride + dims[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])


def _tail_tiling(shape: AttentionShape) -> tuple[int, int, int]:
    """Return the tile of a program that computes tails: tokens per tile, pipeline stages, warps.

    A tail is the part of a context that only one sequence reads. Tails are short, and as many as possible should run at
    the same time as programs that read shared blocks. A program therefore has one warp and tiles of 16 tokens.

    With one query head per kv head, tails run one after another, and wider tiles finish each tail sooner. In float32,
    matmuls use no tensor cores and take many registers, so a program has two warps.
    """
    warps = 2 if shape.element_size == 4 else 1
    if shape.group > 1:
        return 16, 3, warps  # 32 sequences, 4,096 shared tokens and 64 own ones, 32/8 heads x 128: 19.9 us, 24.3 below
    return max(16, min(shape.tile, 8192 // (shape.dim_tile * shape.element_size))), 2, warps


def prefix_attention(q: Tensor, pages: Pages, softmax_scale: float, work: WorkList) -> Tensor:
    """Compute `reference.prefix_attention`; the other arguments are as in `attention.decode.paged_attention`.

    With a sliding window, each sequence reads all its tokens itself, because windows begin at different tokens, after
    the shared blocks. Raises ValueError for a wrong shape or layout, or if ``work`` is for another shape or number of
    sequences.
    """
    if pages.window is not None:
        return paged_attention(q, pages, softmax_scale)
    num_seqs, num_heads, head_dim = q.shape
    k_cache, v_cache, tables, lens, _, k_scales, v_scales = pages
    _, block_size, num_kv_heads, _ = k_cache.shape
    shape = work.shape
    check_inputs(q, pages, num_seqs)
    if (num_heads, num_kv_heads, head_dim) != (shape.num_heads, shape.num_kv_heads, shape.head_dim):
        raise ValueError(f"a work list for {shape} does not fit q {tuple(q.shape)} and {num_kv_heads} kv heads")
    if work.order.shape != (num_seqs,):
        raise ValueError(f"a work list for {work.order.shape[0]} sequences does not fit {num_seqs}")
    out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    splits, max_results = work.tail_splits, shape.max_results(num_seqs)
    partial = q.new_empty(max_results + num_seqs * splits, num_heads, head_dim, dtype=torch.float32)
    lse = q.new_empty(partial.shape[:2], dtype=torch.float32)
    scale, slot_stride = softmax_scale * 1.4426950408889634, num_kv_heads * head_dim
    sizes = {"GROUP": shape.group, "HEAD_DIM": head_dim, "DIM_TILE": shape.dim_tile, "BLOCK_SIZE": block_size}
    options = pdl_options(q.device)
    node_stages = 3 if options["PDL"] and shape.dim_tile <= 128 else 2  # the maximum that fits every GPU's memory
    _chunk_first_kernel[(work.at_a_time * shape.num_processors,)](
        partial, lse, q, k_cache, v_cache, k_scales, v_scales, tables,
        work.counts, work.items, work.order, work.starts,
        q.stride(0), q.stride(1), tables.stride(0), slot_stride, scale, num_heads, num_kv_heads,
        ROWS=shape.rows, TILE=shape.tile, STAGES=node_stages,
        KV_HEADS=num_kv_heads if prefix_lanes.takes(q, pages) else None,
        ALONE=work.at_a_time == 1 and has_large_shared_memory(q.device), PAIRS=work.at_a_time == 2,
        **sizes, num_warps=4, **options,
    )  # fmt: skip
    tile, stages, warps = _tail_tiling(shape)
    by_lanes, registers = attention_lanes.takes(q, pages), None
    if by_lanes:
        tile, stages, warps, registers = TOKENS.value, 1, 1, attention_lanes.registers(shape.group)
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    _sequence_first_kernel[(num_kv_heads, num_seqs, splits)](
        partial, lse, q, k_cache, v_cache, k_scales, v_scales, tables, lens, work.order, work.tails,
        q.stride(0), q.stride(1), tables.stride(0), slot_stride, scale, num_heads, max_results,
        ROWS=max(16, next_power_of_2(shape.group)), TILE=tile, STAGES=stages, SPLITS=splits,
        KV_HEADS=num_kv_heads if by_lanes else None,
        **sizes, num_warps=warps, maxnreg=registers, **options,
    )  # fmt: skip
    # One warp per head; with few heads, few per program, so that all run in parallel.
    heads = min(8, next_power_of_2(num_seqs * num_heads // (8 * shape.num_processors) + 1))
    _merge_results_kernel[(num_seqs, cdiv(num_heads, heads))](
        out, partial, lse, work.order, work.starts, out.stride(0), out.stride(1), num_heads, max_results,
        HEADS=heads, HEAD_DIM=head_dim, DIM_TILE=shape.dim_tile, SPLITS=splits, AT_ONCE=4 if splits > 1 else 2,
        num_warps=heads, **options,
    )  # fmt: skip
    return out
