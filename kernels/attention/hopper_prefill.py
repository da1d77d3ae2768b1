"""Causal attention of prompt chunks over the paged KV cache, with Hopper's tensor memory accelerator and `wgmma`.

The contract is that of `attention.prefill`, which stays the reference and handles everything else. This kernel is
written in Gluon, Triton's lower-level language. A program has one producer warp and two consumer warp groups
(FlashAttention-3, Shah et al. 2024). The producer copies K and V block by block into one tile, with one TMA box for
each block, so blocks may be anywhere in the pool. Consumers compute the scores of one tile while the previous tile's
weights are multiplied with V.

Compute-bound: 4 * queries * visible tokens * heads * head_dim FLOPs. Grid: (heads, tiles of queries over all chunks);
late tiles, which attend to most tokens, start first. Tile: 128 queries x 128 tokens, three stages, 224 KiB of shared
memory for heads of 128. A program goes through the tiles of tokens from the diagonal down. Only its first tiles, and
with a sliding window its last ones, compare positions.
"""

import functools
import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minillm.kernels.arguments import Pages, next_power_of_2
from minillm.kernels.attention.prefill import check_chunks
from minillm.kernels.compat import INTERPRETED, has_wgmma
from minillm.kernels.launch import NotCompiledError, finds_variants, launched

ROWS = 128  # queries of a tile, 64 for each consumer
TILE = 128  # tokens of a tile
_STAGES = 3
_LAUNCH = {"num_warps": 4}
_LEAST_CHUNK = 192  # average tokens of a chunk: one tile of queries alone is slower than the general kernel's two
_LEAST_CONTEXT = 1024  # tokens that block tables can hold: below, creating descriptors takes longer than the kernel
_HIDDEN = tl.constexpr(-1.0e6)  # score of masked tokens: finite, because all tokens of a tile may be masked

# Triton 3.9 renamed both.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _first_tile(begin, number, ROWS: gl.constexpr):
    """Return the number of the first query tile of chunk ``number``, which begins at query ``begin``.

    The number is computed without adding up the tiles of earlier chunks. So each chunk may leave one tile number
    unused.
    """
    return begin // ROWS + number


@gluon.jit
def _find_chunk(number, cu_seqlens_ptr, num_seqs, ROWS: gl.constexpr, SEQS_TILE: gl.constexpr):
    """Return the index of the chunk that query tile ``number`` belongs to."""
    if SEQS_TILE == 1:
        return number * 0
    else:
        seqs = gl.arange(0, SEQS_TILE, layout=gl.BlockedLayout([1], [32], [4], [0]))
        begins = gl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
        is_before = (seqs < num_seqs) & (_first_tile(begins, seqs, ROWS) <= number)
        return gl.sum(is_before.to(gl.int32), axis=0) - 1


@gluon.jit
def _find_rows(table, position, last, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Return the first pool row (slot) of each TMA box in the tile of tokens that begins at ``position``.

    Boxes past the ``last`` token of the context get that token's row.
    """
    rows = ()
    for i in gl.static_range(TILE // BOX):
        token = gl.minimum(position + i * BOX, last)
        row = gl.load(table + token // BLOCK_SIZE) * BLOCK_SIZE
        if BLOCK_SIZE > BOX:
            row += token % BLOCK_SIZE // BOX * BOX
        rows = rows + (row,)  # noqa: RUF005 (the compiler knows no other way)
    return rows


@gluon.jit
def _copy_tile(desc, rows, column, full, target, TILE: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr):
    mbarrier.expect(full, TILE * HEAD_DIM * 2)
    for i in gl.static_range(TILE // BOX):
        _copy(desc, [rows[i], column], full, target.slice(i * BOX, BOX))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, table, top, num_tiles, last, q_row, q_column, kv_column,
    q_s, k_s, v_s, q_full, k_full, v_full, k_empty, v_empty,
    TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the queries to shared memory. Then copy K and V of each tile, as soon as both consumers release a stage."""
    mbarrier.expect(q_full, 2 * 64 * HEAD_DIM * 2)
    _copy(q_desc, [q_row, q_column], q_full, q_s.index(0))
    _copy(q_desc, [q_row + 64, q_column], q_full, q_s.index(1))
    for t in range(num_tiles):
        stage = t % STAGES
        free = ((t // STAGES) & 1) ^ 1  # a new barrier lets parity 1 through
        rows = _find_rows(table, (top - t) * TILE, last, TILE, BLOCK_SIZE, BOX)
        mbarrier.wait(k_empty.index(stage), free)
        _copy_tile(k_desc, rows, kv_column, k_full.index(stage), k_s.index(stage), TILE, BOX, HEAD_DIM)
        mbarrier.wait(v_empty.index(stage), free)
        _copy_tile(v_desc, rows, kv_column, v_full.index(stage), v_s.index(stage), TILE, BOX, HEAD_DIM)


@gluon.jit
def _fold(
    scores, maximum, total, positions, column, scale_log2e,
    TILE: gl.constexpr, WINDOW: gl.constexpr, S_LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add a tile's scores to the running softmax.

    Returns: the tile's weights; the new maximum and the new sum; the factor that corrects earlier outputs.
    """
    if MASKED:
        columns = gl.expand_dims(column + gl.arange(0, TILE, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
        rows = gl.expand_dims(positions, 1)
        scores = gl.where(rows >= columns, scores, _HIDDEN)
        if WINDOW is not None:
            scores = gl.where(columns > rows - WINDOW, scores, _HIDDEN)
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale_log2e)
    weights = gl.exp2(scores * scale_log2e - gl.expand_dims(new_maximum, 1))
    correction = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * correction + gl.sum(weights, axis=1), correction


@gluon.jit
def _turn(
    t, top, q, weights, out, maximum, total, positions, scale_log2e,
    k_s, v_s, k_full, v_full, k_empty, v_empty,
    TILE: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute the scores of tile ``t`` while the previous tile's weights are multiplied with its V.

    Returns: the weights of tile ``t``; the outputs, the maximum and the sum of the running softmax.
    """
    stage, before = t % STAGES, (t - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (t // STAGES) & 1)
    zero = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)
    sums = warpgroup_mma(weights, v_s.index(before), out, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    _barrier()  # all four warps have read K before one thread signals it
    mbarrier.arrive(k_empty.index(stage), count=1)
    new_weights, maximum, total, correction = _fold(
        scores, maximum, total, positions, (top - t) * TILE, scale_log2e, TILE, WINDOW, S_LAYOUT, MASKED
    )
    # This barrier has passed already. The wait's branch keeps ptxas from moving the softmax after the wait below.
    mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)
    out, weights = warpgroup_mma_wait(
        num_outstanding=0, deps=(sums, weights)
    )  # the weights' registers are read until here
    _barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    out = out * gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, O_LAYOUT)), 1)
    return gl.convert_layout(new_weights.to(weights.dtype), P_LAYOUT), out, maximum, total


@gluon.jit
def _consume(
    out_ptr, top, num_tiles, diagonal_tiles, window_tiles, begin, row, length, context, out_stride, out_column,
    scale_log2e, q_s, k_s, v_s, q_full, k_full, v_full, k_empty, v_empty, v_clean,
    TILE: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Compute and store attention of half of the tile's queries: the first 64 (``HALF`` 0) or the last 64 (1).

    Tiles of tokens are read from the last one to the first. Only the first ``diagonal_tiles`` and the last
    ``window_tiles`` that are read need masks.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    row += HALF * 64
    positions = context - length + row + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    maximum = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    out = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    zero = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
    q = q_s.index(HALF)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    _barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    new_weights, maximum, total, _correction = _fold(
        scores, maximum, total, positions, top * TILE, scale_log2e, TILE, WINDOW, S_LAYOUT, True
    )
    weights = gl.convert_layout(new_weights.to(q_s.dtype), P_LAYOUT)
    if (top + 1) * TILE > context:
        # Slots past the context may hold NaN, which a weight of 0 does not hide: each consumer clears half of the tile.
        V_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
        mbarrier.wait(v_full.index(0), 0)
        mine = v_s.index(0).slice(HALF * (TILE // 2), TILE // 2)
        tokens = top * TILE + HALF * (TILE // 2) + gl.arange(0, TILE // 2, layout=gl.SliceLayout(1, V_LAYOUT))
        values = mine.load(V_LAYOUT)
        mine.store(gl.where(gl.expand_dims(tokens < context, 1), values, gl.zeros_like(values)))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(v_clean, count=1)
        mbarrier.wait(v_clean, 0)
    windowed = num_tiles - window_tiles
    for t in range(1, diagonal_tiles):
        weights, out, maximum, total = _turn(
            t, top, q, weights, out, maximum, total, positions, scale_log2e,
            k_s, v_s, k_full, v_full, k_empty, v_empty, TILE, WINDOW, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, True,
        )  # fmt: skip
    for t in range(diagonal_tiles, windowed):
        weights, out, maximum, total = _turn(
            t, top, q, weights, out, maximum, total, positions, scale_log2e,
            k_s, v_s, k_full, v_full, k_empty, v_empty, TILE, WINDOW, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, False,
        )  # fmt: skip
    if WINDOW is not None:
        for t in range(windowed, num_tiles):
            weights, out, maximum, total = _turn(
                t, top, q, weights, out, maximum, total, positions, scale_log2e,
                k_s, v_s, k_full, v_full, k_empty, v_empty, TILE, WINDOW, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT, True,
            )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    sums = warpgroup_mma(weights, v_s.index(last % STAGES), out, is_async=True)
    out, weights = warpgroup_mma_wait(num_outstanding=0, deps=(sums, weights))
    out = out / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT)), 1)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    columns = out_column + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
    offsets = gl.expand_dims((begin + rows).to(gl.int64) * out_stride, 1) + gl.expand_dims(columns, 0)
    gl.store(out_ptr + offsets, out.to(q_s.dtype), mask=gl.expand_dims(rows < length, 1))


@launched
@gluon.jit(do_not_specialize=["num_seqs", "table_stride"])
def _prefill_kernel(
    out_ptr, q_desc, k_desc, v_desc, tables_ptr, lens_ptr, cu_seqlens_ptr,
    table_stride, out_stride, scale_log2e, num_seqs,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, SEQS_TILE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    number = gl.num_programs(1) - 1 - gl.program_id(1)
    chunk = _find_chunk(number, cu_seqlens_ptr, num_seqs, ROWS, SEQS_TILE)
    begin = gl.load(cu_seqlens_ptr + chunk)
    length = gl.load(cu_seqlens_ptr + chunk + 1) - begin
    context = gl.load(lens_ptr + chunk)
    row = (number - _first_tile(begin, chunk, ROWS)) * ROWS
    if row < length:
        position = context - length + row  # of the tile's first query
        num_tiles = (gl.minimum(position + ROWS, context) + TILE - 1) // TILE
        top = num_tiles - 1
        diagonal_tiles = num_tiles - (position + 1) // TILE  # at least one
        window_tiles = num_tiles * 0
        if WINDOW is not None:
            first = gl.maximum(position - WINDOW + 1, 0) // TILE
            whole = (gl.maximum(position + ROWS - WINDOW, 0) + TILE - 1) // TILE  # first tile visible to all queries
            num_tiles = num_tiles - first
            diagonal_tiles = gl.minimum(diagonal_tiles, num_tiles)
            window_tiles = gl.minimum(gl.maximum(whole - first, 0), num_tiles - diagonal_tiles)
        q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HEAD_DIM], q_desc.layout)
        k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], k_desc.layout)
        v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, HEAD_DIM], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        v_clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        mbarrier.init(v_clean, count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)
        fence_async_shared()
        table = tables_ptr + chunk.to(gl.int64) * table_stride
        column = head * HEAD_DIM
        gl.warp_specialize([
            (_consume, (
                out_ptr, top, num_tiles, diagonal_tiles, window_tiles, begin, row, length, context, out_stride, column,
                scale_log2e, q_s, k_s, v_s, q_full, k_full, v_full, k_empty, v_empty, v_clean,
                TILE, WINDOW, HEAD_DIM, STAGES, 0,
            )),
            (_consume, (
                out_ptr, top, num_tiles, diagonal_tiles, window_tiles, begin, row, length, context, out_stride, column,
                scale_log2e, q_s, k_s, v_s, q_full, k_full, v_full, k_empty, v_empty, v_clean,
                TILE, WINDOW, HEAD_DIM, STAGES, 1,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, table, top, num_tiles, context - 1, begin + row, column,
                head // GROUP * HEAD_DIM, q_s, k_s, v_s, q_full, k_full, v_full, k_empty, v_empty,
                TILE, BLOCK_SIZE, BOX, HEAD_DIM, STAGES,
            )),
        ], [4, 1], [240, 24])  # fmt: skip


def takes(q: Tensor, pages: Pages) -> bool:
    """Return whether this kernel supports these chunks and is faster than `attention.prefill`.

    It needs 16-bit values, heads of 64 or 128, blocks of 16 or more tokens, compute capability 9.0, and long chunks.
    """
    block_size, num_seqs = pages.k.shape[1], pages.lens.shape[0]
    fits = q.element_size() == 2 and pages.k.dtype == q.dtype and q.shape[2] in (64, 128) and block_size >= 16
    is_aligned = q.stride(1) == q.shape[2] and not q.data_ptr() % 16 and not q.stride(0) % 8
    is_long = q.shape[0] >= _LEAST_CHUNK * num_seqs and pages.tables.shape[1] * block_size >= _LEAST_CONTEXT
    return fits and is_aligned and is_long and _is_there(q.device, q.dtype, q.shape[2])


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Compute `reference.prefill_attention` for arguments that `takes` accepts. Others may give wrong results.

    Raises ValueError for a wrong shape or layout.
    """
    check_chunks(q, pages, cu_seqlens)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    k, v, tables, lens, window, _, _ = pages
    num_seqs, block_size, num_kv_heads = lens.shape[0], k.shape[1], k.shape[2]
    box = min(block_size, TILE)
    _prefill_kernel[(num_heads, num_tokens // ROWS + num_seqs)](
        out, _described(q, 64), _described(k, box), _described(v, box), tables, lens, cu_seqlens,
        tables.stride(0), out.stride(0), softmax_scale * 1.4426950408889634, num_seqs,
        **_constants(num_heads // num_kv_heads, head_dim, block_size, num_seqs, window), **_LAUNCH,
    )  # fmt: skip
    return out


def _constants(group: int, head_dim: int, block_size: int, num_seqs: int, window: int | None) -> dict[str, int | None]:
    return {
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "BOX": min(block_size, TILE),
        "ROWS": ROWS, "TILE": TILE, "STAGES": _STAGES, "SEQS_TILE": _seqs_tile(num_seqs),
        "WINDOW": window,
    }  # fmt: skip


def _seqs_tile(num_seqs: int) -> int:
    """Return SEQS_TILE, the number of chunks among which `_find_chunk` searches: 1, or a power of two from 256 on.

    Few values are possible, because compiling the kernel for each of them takes seconds.
    """
    return 1 if num_seqs == 1 else max(256, next_power_of_2(num_seqs))


def _described(x: Tensor, box: int) -> TensorDescriptor:
    """Return the TMA's descriptor of ``x [..., heads, head_dim]``, as a matrix with one row per token.

    The TMA copies boxes of this matrix: ``box`` rows, with the columns of one head.
    """
    head_dim = x.shape[-1]
    rows, row_stride = x.shape[:-2].numel(), x.stride(-3)
    return TensorDescriptor(x, [rows, x.shape[-2] * head_dim], [row_stride, 1], [box, head_dim], _layout(x.dtype))


@functools.cache
def _layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=2)


def _is_there(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether this Triton compiles the kernel.

    Inside `only_compiled`, nothing may be compiled. If the answer is not known yet, return False there. Inside
    `missing_variants`, return True.
    """
    try:
        return _compiles(device, dtype, head_dim)
    except NotCompiledError:
        return finds_variants()


@functools.cache
def _compiles(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether this Triton compiles the kernel for this GPU. Warn if it does not."""
    if INTERPRETED.value or not has_wgmma(device):
        return False
    try:
        compile_ahead(device, dtype, head_dim)
    except NotCompiledError:
        raise
    except Exception as error:  # other compiler versions may raise anything
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"long prompts use the general attention kernel: Triton {triton.__version__}: {reason}", stacklevel=2
        )
        return False
    return True


def compile_ahead(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None = None) -> CompiledKernel:
    """Compile the kernel for one sequence and blocks of 16 tokens, without launching it."""
    x = torch.empty(64, 1, head_dim, dtype=dtype, device=device)
    numbers = torch.zeros(2, dtype=torch.int32, device=device)
    return _prefill_kernel.warmup(
        x, _described(x, 64), _described(x, 16), _described(x, 16), numbers, numbers, numbers, 1, head_dim, 1.0, 1,
        **_constants(1, head_dim, 16, 1, window), **_LAUNCH, grid=(1, 1),
    )  # fmt: skip
