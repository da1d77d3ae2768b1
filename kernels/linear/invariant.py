"""Batch-invariant linear layers: a token's result is bitwise the same whatever other tokens are computed with it.

A sum of floats depends on its order. Every element is therefore one chain of float32 additions: the tensor cores add
the input's columns from first to last, sixteen at a time (in float32 one at a time). Tiles only decide which elements a
program computes, not the order, so they may depend on the number of tokens. No library matmul is called, and no sum is
split. (He et al. 2025, "Defeating Nondeterminism in LLM Inference".)

Bytes: the weight, once for each TOKENS tokens, and the tokens. FLOPs: 2 x tokens x weights.

- ``_few_kernel``, grid (rows of the weight / ROWS, tokens / TOKENS): pieces of the weight are prefetched into the L2
  before the previous kernel has ended, because they do not depend on it. Up to eight tokens are the tensor cores'
  second operand, which may be that narrow.
- ``_many_kernel``, grid (multiprocessors): tiles are loaded by the TMA. A program computes one tile after another,
  eight rows of tiles at a time, so that shared data stays in the L2.
- ``_two_parts_kernel``, grid (multiprocessors): the same for 65 to 96 or 129 to 192 tokens, with the weight as the
  tensor cores' first operand, so that tokens are columns of the result. A tile has two parts, and the number of tokens
  in each part is a power of two. With tiles of 128 or 256 tokens, a third of the work would be wasted, or the
  multiprocessors would need another turn.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minillm.kernels.arguments import cdiv
from minillm.kernels.compat import (
    INTERPRETED,
    dot,
    has_large_shared_memory,
    num_multiprocessors,
    pdl_options,
    prefetch_l2,
    wait_for_inputs,
)
from minillm.kernels.launch import launched
from minillm.kernels.norm.activation import active

MOST_FEW = 16  # up to this many tokens, matmuls with large 16-bit weights are faster than the library's: see `is_fast`
_LARGE = 4096  # rows and columns of a large weight, at least
_PROCESSORS = 132  # multiprocessors of an H100 or H200
_FULL = 90  # number of programs that fill such a GPU


@triton.jit
def _store(
    out_ptr, bias_ptr, total, up_total, tokens, rows, num_tokens, num_rows, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the result ``[tokens, rows]``, after gating if GATED. With ADD, add it to the output instead."""
    is_row = rows < num_rows
    mask = (tokens < num_tokens)[:, None] & is_row[None, :]
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_total += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
        total = active(total, GATED) * up_total
    at = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + rows[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(ptr, rows, last_row, num_columns, COLUMNS: tl.constexpr):
    """Prefetch the first COLUMNS columns of some rows of a weight into the L2, by lines of 128 bytes."""
    at = tl.minimum(rows, last_row).to(tl.int64)[:, None] * num_columns + tl.arange(0, COLUMNS // 64)[None, :] * 64
    prefetch_l2(ptr + at)


@launched
@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, num_tokens, num_rows, num_columns, x_stride, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_token = tokens < num_tokens
    up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
    if PDL and AHEAD > 0:
        _prefetch(weight_ptr, rows, num_rows - 1, num_columns, AHEAD)
        if GATED:
            _prefetch(up_ptr, rows, num_rows - 1, num_columns, AHEAD)
    wait_for_inputs(PDL)
    x_at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    weight_at = rows.to(tl.int64)[None, :] * num_columns + lanes[:, None]
    IS_SMALL: tl.constexpr = TOKENS < 16  # smaller than the tensor cores' first operand, which is then the weight
    if IS_SMALL:
        total, up_total = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        total, up_total = tl.zeros([TOKENS, ROWS], tl.float32), tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(0, num_columns, COLUMNS, num_stages=STAGES):
        if EVEN:
            x_mask, weight_mask = is_token[:, None], is_row[None, :]
        else:
            is_column = start + lanes < num_columns
            x_mask, weight_mask = is_token[:, None] & is_column[None, :], is_row[None, :] & is_column[:, None]
        x = tl.load(x_at + start, mask=x_mask, other=0.0)
        weights = tl.load(weight_ptr + weight_at + start, mask=weight_mask, other=0.0)
        total = dot(tl.trans(weights), tl.trans(x), total) if IS_SMALL else dot(x, weights, total)
        if GATED:
            up_weights = tl.load(up_ptr + weight_at + start, mask=weight_mask, other=0.0)
            up_total = dot(tl.trans(up_weights), tl.trans(x), up_total) if IS_SMALL else dot(x, up_weights, up_total)
    if IS_SMALL:
        total, up_total = tl.trans(total), tl.trans(up_total)
    _store(
        out_ptr, bias_ptr, total, up_total, tokens, rows, num_tokens, num_rows, out_stride, GATED, ADD, BIAS
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["num_tokens"])
def _many_kernel(
    out_ptr, x_tiles, weight_tiles, bias_ptr, num_tokens, num_rows, num_columns, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    across, down = tl.cdiv(num_rows, ROWS), tl.cdiv(num_tokens, TOKENS)
    for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0)):
        group = tile // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        first_token = (group * GROUP + tile % (GROUP * across) % height) * TOKENS
        first_row = tile % (GROUP * across) // height * ROWS
        total = tl.zeros([TOKENS, ROWS], tl.float32)
        up_total = tl.zeros([TOKENS, ROWS], tl.float32)
        for start in tl.range(0, num_columns, COLUMNS, num_stages=STAGES):
            x = x_tiles.load([first_token, start])
            total = dot(x, weight_tiles.load([first_row, start]).T, total)
            if GATED:
                up_total = dot(x, weight_tiles.load([num_rows + first_row, start]).T, up_total)
        tokens = first_token + tl.arange(0, TOKENS)
        rows = first_row + tl.arange(0, ROWS)
        _store(
            out_ptr, bias_ptr, total, up_total, tokens, rows, num_tokens, num_rows, out_stride, GATED, ADD, BIAS
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["num_tokens"])
def _two_parts_kernel(
    out_ptr, x_tiles, more_tiles, weight_tiles, bias_ptr, num_tokens, num_rows, num_columns, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    across, down = tl.cdiv(num_rows, ROWS), tl.cdiv(num_tokens, TOKENS + MORE)
    for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0)):
        first_token, first_row = tile // across * (TOKENS + MORE), tile % across * ROWS
        total, up_total = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
        more_total, more_up_total = tl.zeros([ROWS, MORE], tl.float32), tl.zeros([ROWS, MORE], tl.float32)
        for start in tl.range(0, num_columns, COLUMNS, num_stages=STAGES):
            x, more = x_tiles.load([first_token, start]), more_tiles.load([first_token + TOKENS, start])
            weights = weight_tiles.load([first_row, start])
            total, more_total = dot(weights, x.T, total), dot(weights, more.T, more_total)
            if GATED:
                weights = weight_tiles.load([num_rows + first_row, start])
                up_total, more_up_total = dot(weights, x.T, up_total), dot(weights, more.T, more_up_total)
        rows = first_row + tl.arange(0, ROWS)
        tokens = first_token + tl.arange(0, TOKENS)
        _store(
            out_ptr, bias_ptr, total.T, up_total.T, tokens, rows, num_tokens, num_rows, out_stride, GATED, ADD, BIAS
        )  # fmt: skip
        tokens = first_token + TOKENS + tl.arange(0, MORE)
        _store(
            out_ptr, bias_ptr, more_total.T, more_up_total.T, tokens, rows, num_tokens, num_rows, out_stride,
            GATED, ADD, BIAS,
        )  # fmt: skip


class Tile(NamedTuple):
    """The tile sizes of a matmul. The fields `few` and `more` select one of the module's three kernels."""

    few: bool  # whether to use `_few_kernel`
    tokens: int
    rows: int  # rows of the weight; with a gate, rows of each half
    columns: int  # columns of the input to load at a time
    warps: int
    stages: int
    ahead: int = 0  # columns to prefetch into the L2
    more: int = 0  # additional tokens in a tile of `_two_parts_kernel`; 0 selects another kernel


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: int = False,
    add: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias``. Write the result to ``out [tokens, out]``, or add it if ``add``.

    ``gated``: the weight is gate and up, and the result is ``silu(gate) * up``, ``[tokens, out / 2]``. Rows of ``x``
    and ``out`` may be strided; the weight is contiguous. Raises ValueError for a wrong shape or layout.
    """
    (tokens, columns), features = x.shape, weight.shape[0]
    num_rows = features // 2 if gated else features
    fits = weight.shape[1] == columns and out.shape == (tokens, num_rows) and weight.is_contiguous()
    if not fits or x.stride(1) != 1 or out.stride(1) != 1 or not x.dtype == weight.dtype == out.dtype:
        raise ValueError(
            f"a matmul with {weight.dtype} {tuple(weight.shape)} takes [tokens, {weight.shape[1]}], contiguous rows, "
            f"not {x.dtype} {tuple(x.shape)} for {out.dtype} {tuple(out.shape)}"
        )
    if not tokens:
        return out
    few, width, rows, depth, warps, stages, ahead, more = tile or tile_for(x, features, gated=gated)
    # The compiler could contract gating and an addition in one kernel and not in another.
    options = {"enable_fp_fusion": not gated, **pdl_options(x.device)}
    shared = {"GATED": gated, "ADD": add, "BIAS": bias is not None}
    bias = x if bias is None else bias
    if few:
        _few_kernel[(cdiv(num_rows, rows), cdiv(tokens, width))](
            out, x, weight, bias, tokens, num_rows, columns, x.stride(0), out.stride(0),
            **shared, EVEN=columns % depth == 0, AHEAD=min(ahead, (1 << columns.bit_length() - 1) // 64 * 64),
            TOKENS=width, ROWS=rows, COLUMNS=depth, STAGES=stages, num_warps=warps, **options,
        )  # fmt: skip
        return out
    programs = min(cdiv(num_rows, rows) * cdiv(tokens, width + more), num_multiprocessors(x.device))
    if more:
        _two_parts_kernel[(programs,)](
            out, _tiles_of(x, width, depth), _tiles_of(x, more, depth), _tiles_of(weight, rows, depth), bias,
            tokens, num_rows, columns, out.stride(0),
            **shared, TOKENS=width, MORE=more, ROWS=rows, COLUMNS=depth, STAGES=stages, num_warps=warps, **options,
        )  # fmt: skip
    else:
        _many_kernel[(programs,)](
            out, _tiles_of(x, width, depth), _tiles_of(weight, rows, depth), bias,
            tokens, num_rows, columns, out.stride(0),
            **shared, TOKENS=width, ROWS=rows, COLUMNS=depth, STAGES=stages, GROUP=8, num_warps=warps, **options,
        )  # fmt: skip
    return out


def is_fast(weight: Tensor) -> bool:
    """Return whether `product` of up to `MOST_FEW` tokens is faster than the library's matmul.

    That is so for large 16-bit weights on data center GPUs.
    """
    is_large = weight.element_size() == 2 and min(weight.shape) >= _LARGE
    return is_large and has_large_shared_memory(weight.device)


def _tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def tile_for(x: Tensor, features: int, *, gated: int) -> Tile:
    """Return the tile for a matmul of ``x [tokens, in]`` with a weight of ``features`` rows. Measured on an H100."""
    tokens, columns = x.shape
    rows = features // 2 if gated else features
    if INTERPRETED.value:
        return Tile(True, 16, 16, 32, 4, 2)
    if x.element_size() == 4:  # no tensor cores
        return Tile(True, 32, 32, 32, 4, 2)
    if not has_large_shared_memory(x.device):
        return Tile(True, 16, 16, 256, 2, 4) if tokens <= 16 else Tile(True, 64, 32 if gated else 64, 64, 4, 3)
    if tokens <= 8:
        programs = cdiv(rows, 16)  # three of four stages fit on a multiprocessor, or two of five
        return Tile(True, 8, 16, 512, 2, 4 if 2 * _PROCESSORS < programs <= 3 * _PROCESSORS else 5, ahead=1024)
    if tokens <= 16:
        if gated:
            return Tile(True, 16, 32, 256, 4, 4, ahead=512)
        is_large = columns >= 8192 or features >= 1 << 15
        return Tile(True, 16, 16, 512, 2, 4, ahead=1024) if is_large else Tile(True, 16, 16, 256, 2, 5, ahead=1024)
    has_engine = columns % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0  # requirements of the TMA
    if not has_engine or (gated and tokens <= 64):
        return Tile(True, 64, 64, 128, 4, 4 if gated else 3, ahead=512)
    if tokens <= 64 and features >= 1 << 15:
        return Tile(False, 64, 128, 128, 4, 3)
    if tokens <= 64:
        return Tile(False, 64, 32 if features <= 4096 else 64, 128, 4, 4)
    if tokens <= 96 and features < 1 << 15:
        return Tile(False, 64, 64, 128, 4, 3 if gated else 4, more=32)
    down = cdiv(tokens, 128)
    across, is_between = cdiv(rows, 128), 128 < tokens <= 192
    if gated:
        if is_between and 1.5 * cdiv(across, _PROCESSORS) < cdiv(2 * across, _PROCESSORS):
            return Tile(False, 128, 128, 64, 8, 3, more=64)
        return Tile(False, 128, 128, 64, 8, 4 if down <= 2 else 3)
    if is_between:
        if rows >= 1 << 15:
            return Tile(False, 128, 128, 64, 8, 4, more=64)
        if across <= _PROCESSORS // 4:  # the same number of programs, each for half of the tokens
            return Tile(False, 64, 64, 128, 4, 4, more=32)
        if across <= _PROCESSORS // 2:
            return Tile(False, 128, 64, 128, 4, 3, more=64)
    for width in (256, 128):
        if down * cdiv(rows, width) >= _FULL:
            return Tile(False, 128, width, 64, 8, 3 if width == 256 else 4)
    return Tile(False, 128, 64, 128, 4, 4)
