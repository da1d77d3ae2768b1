"""Low-bit matmuls of a few to a few dozen tokens on the tensor cores; norm, gating and addition are fused.

`_matmul_kernel`: grid (out features / rows of a program, tokens / tokens of a program). Weights go from memory to
registers as they are stored. Bit operations convert them to float16, in the order that an ``mma`` instruction expects.
``mma`` sums in float32. No weight is in shared memory, and the warps of a program wait for each other only at the end.
This is therefore a lane kernel: a tensor has one element for each of the program's threads. The warps of a program take
turns at the input, 128 columns at a time, and add their sums at the end, in order. Bytes: the matrix, once for each
TILES x 8 tokens.

``mma`` multiplies 16 rows by 8 tokens, in 16 columns of the input. Lane 4r + t gives rows r and r + 8 of the weight and
token r, each in four of the 16 columns: two adjacent columns at 2t and two at 2t + 8. Any columns of the input can take
these places if both operands agree. Here lanes t = 0 to 3 take columns of four different groups, one word of each group
at a time. So a lane needs one scale per row. Activations are stored in that order, eight tokens adjacent, so that a
warp reads whole cache lines (`convert_to_float16`: grid (tokens), a whole row each). A gated matmul writes its result
in that order itself if this kernel also computes the next matmul (`gated_to_float16`).

Weights without shared memory are from Frantar et al. 2024, https://arxiv.org/abs/2408.11743, conversion by bit
operations is from Kim et al. 2022, https://arxiv.org/abs/2211.10017.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Norm, cdiv, next_power_of_2
from minillm.kernels.compat import INTERPRETED, begin_part, end_part, pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit.lanes import GROWTH, codes, columns4, eight_weights, load_row, row_factors
from minillm.kernels.linear.low_bit.layouts import GROUP, LowBit, bucket
from minillm.kernels.linear.low_bit.planes import constants_of, pair, planes_of
from minillm.kernels.norm.activation import active

SPAN = 2048  # columns: one turn of 128 for each of 16 warps. The input is padded with zeros to a multiple of it.


class Float16Activations(NamedTuple):
    """Activations ``[tokens, in]`` in float16, in the order in which low-bit matmuls read them, with a scale per token.

    A warp reads the input in turns of 128 columns. The columns are padded with zeros to a multiple of 16 turns (SPAN).
    There are two orders: this module reads ``x`` by eights, which are groups of eight tokens; `many_tokens` reads it by
    tokens.
    """

    # by eights: [eights of tokens, turns, 4 words, 8 tokens, 4 groups, 8 columns]
    # by tokens: [tokens, turns * 128], in a turn: 4 words, 4 pairs of columns, 4 groups, both columns
    x: Tensor
    scales: Tensor  # [tokens] float32


class FixedScale(NamedTuple):
    """A scale of activations that is equal for all tokens and known in advance: see
    `minillm.kernels.linear.low_bit.bound`.
    """

    growth: Tensor  # [1] float32, a power of two that scales the largest possible number into float16's range
    scales: Tensor  # [maximum tokens] float32, the scales of `Float16Activations`: the inverse of the growth


@triton.jit
def by_eights(tokens, token, columns, column, num_turns):
    """Return the offset of an element in `Float16Activations.x`, stored by eights.

    ``tokens`` is the index of a group of eight tokens, and ``token`` the index of the element's token in that group. In
    the same way, ``columns`` and ``column`` give the element's column.
    """
    turn, group, word = columns // 16, columns % 16 // 4, columns % 4
    return (tokens * num_turns + turn) * 1024 + word * 256 + token * 32 + group * 8 + column


@launched
@triton.jit
def _to_float16_kernel(
    out_ptr, scales_ptr, x_ptr, norm_ptr, order_ptr, num_columns, num_turns, eps,
    NORM: tl.constexpr, COLUMNS: tl.constexpr, BY_EIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    norm, read = 1.0, columns
    if order_ptr is not None:
        read = tl.load(order_ptr + columns, mask=is_column, other=0)
    if NORM:
        norm = tl.load(norm_ptr + read, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + token * num_columns + read, mask=is_column, other=0.0).to(tl.float32)
    norm_scale = 1.0
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(x * x, 0) / num_columns + eps)
        x *= norm
    # Scale the largest near the end of float16's range, by a power of two, which is exact.
    largest = tl.max(tl.abs(x), 0)
    largest = tl.where((largest > 1e-30) & (largest < 1e30), largest, 1.0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23  # biased by 127
    growth = ((127 + 13 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    turn, group, word = columns // 128, columns % 128 // 32, columns % 32 // 8
    if BY_EIGHTS:
        at = by_eights(token // 8, token % 8, columns // 8, columns % 8, num_turns)
    else:
        at = (token * num_turns + turn) * 128 + word * 32 + columns % 8 // 2 * 8 + group * 2 + columns % 2
    tl.store(out_ptr + at, (x * growth).to(tl.float16), mask=turn < num_turns)
    tl.store(scales_ptr + token, norm_scale / (growth * GROWTH))


def convert_to_float16(
    x: Tensor, norm: Norm | None = None, order: Tensor | None = None, *, by_eights: bool = True
) -> Float16Activations:
    """Convert ``x [tokens, in]`` to float16 with a scale per token, after RMSNorm with ``norm`` (weight, eps) if given.

    NaN and infinity stay. The number of tokens is padded; the rows of padding are arbitrary.

    Args:
        order: ``[in]``, the order of a matrix's columns. If given, the columns of ``x`` are put into this order.
        by_eights: store the result by eights of tokens, padded to a multiple of eight. Otherwise store it by tokens,
            padded to a tile of `many_tokens`.
    """
    tokens, columns = x.shape
    turns = _turns(columns)
    rows = next_power_of_2(max(tokens, 32)) if tokens <= 256 else cdiv(tokens, 256) * 256
    out = allocate_by_eights(x, columns) if by_eights else x.new_empty(rows, turns * 128, dtype=torch.float16)
    scales = x.new_empty(tokens, dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    width = next_power_of_2(turns * 128)
    _to_float16_kernel[(tokens,)](
        out, scales, x, weight, order, columns, turns, eps, NORM=norm is not None, COLUMNS=width, BY_EIGHTS=by_eights,
        num_warps=8 if width <= 4096 else 16, **pdl_options(x.device),
    )  # fmt: skip
    return Float16Activations(out, scales)


def _turns(columns: int) -> int:
    return cdiv(columns, SPAN) * (SPAN // 128)


def allocate_by_eights(x: Tensor, columns: int) -> Tensor:
    """Allocate the tensor `Float16Activations.x` for ``columns`` columns and as many tokens as ``x`` has rows.

    The tensor is for the order "by eights": see `Float16Activations`.
    """
    return x.new_empty((cdiv(x.shape[0], 8), _turns(columns), 4, 8, 4, 8), dtype=torch.float16)


@triton.jit
def _sixteenth(upper, lower, x, WARPS: tl.constexpr):
    """Compute under the interpreter what ``mma`` computes on a GPU, for eight rows and eight tokens.

    Each lane gives words of two float16, from adjacent columns. ``upper`` and ``lower`` are two words of the lane's
    row, and ``x`` has two words of the lane's token. Returns ``[warps, 8 rows, 8 tokens]``.
    """
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    for which in tl.static_range(2):
        a, b = (upper, x[0]) if which == 0 else (lower, x[1])
        a, b = tl.reshape(a, [WARPS, 8, 1, 4]), tl.reshape(b, [WARPS, 1, 8, 4])
        for neighbor in tl.static_range(2):
            total += tl.sum(pair(a)[neighbor] * pair(b)[neighbor], 3)
    return total


@triton.jit
def _mma(upper, lower, x, c, FIRST: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr):
    """Add the products of sixteen columns to ``c``. Lane 4r + t gets rows r and r + 8, for tokens 2t and 2t + 1.

    ``upper`` and ``lower`` are the weights of rows r and r + 8, ``x`` the activations of token r. All are words of two
    float16. FIRST is the first of the two words to multiply.
    """
    u0, u1, l0, l1 = upper[FIRST], upper[FIRST + 1], lower[FIRST], lower[FIRST + 1]
    b0, b1 = x[FIRST], x[FIRST + 1]
    if INTERPRETED:
        first, second = _sixteenth(u0, u1, (b0, b1), WARPS), _sixteenth(l0, l1, (b0, b1), WARPS)
        d0, d1 = tl.split(tl.reshape(first, [WARPS * 32, 2]))
        d2, d3 = tl.split(tl.reshape(second, [WARPS * 32, 2]))
        return c[0] + d0, c[1] + d1, c[2] + d2, c[3] + d3
    elif WIDE:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [u0, l0, u1, l1, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # compute capability 7.5 has only half of it
        return tl.inline_asm_elementwise(
            "{ .reg .f32 p, q, r, s; "
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {p,q,r,s}, {$4,$5}, {$8}, {$10,$11,$12,$13}; "
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$6,$7}, {$9}, {p,q,r,s}; }",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [u0, l0, u1, l1, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _end_span(out_ptr, num_tokens, num_columns, num_turns, TILES: tl.constexpr):
    """Write zeros to the output's columns after the last one, because the next matmul reads whole spans."""
    place = tl.arange(0, 256)  # of a word, for eight tokens
    for word in range(num_columns // 128 * 4 + tl.program_id(0), num_turns * 4, tl.num_programs(0)):
        is_behind = word // 4 * 128 + place % 32 // 8 * 32 + word % 4 * 8 >= num_columns
        for tile in tl.static_range(TILES):
            tokens = tl.program_id(1) * TILES + tile
            at = out_ptr + (tokens * num_turns * 4 + word) * 256 + place
            tl.store(at, (place * 0).to(tl.float16), mask=is_behind & (tokens * 8 + place // 32 < num_tokens))


@launched
@triton.jit
def _matmul_kernel(
    out_ptr, x_ptr, x_scales_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr, growth_ptr,
    num_tokens, num_rows, num_groups, x_turns, out_stride,  # HALVES: turns of the output
    GATED: tl.constexpr, HALVES: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    CODES: tl.constexpr, WIDE: tl.constexpr,
    WARPS: tl.constexpr, ROW_TILES: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = WARPS * 32
    lanes = tl.arange(0, LANES)
    warp, r, t = lanes // 32, lanes % 32 // 4, lanes % 4
    first_token = tl.program_id(1) * TILES * 8
    # Rows r and r + 8 of each tile; with a gate, row r of gate and of up. Rows, groups and tokens outside the matrix
    # repeat the last one, and are not stored; x has zeros after its end.
    rows = ()
    for tile in tl.static_range(ROW_TILES):
        start = tl.program_id(0) * ROW_TILES + tile
        if GATED:
            row = tl.minimum(start * 8 + r, num_rows - 1)
            rows = rows + (row, num_rows + row)
        else:
            rows = rows + (tl.minimum(start * 16 + r, num_rows - 1), tl.minimum(start * 16 + 8 + r, num_rows - 1))
    queue = ()  # of pending loads, for AHEAD turns
    for step in tl.static_range(AHEAD):
        group = tl.minimum((warp + step * WARPS) * 4 + t, num_groups - 1)
        loaded = ()
        for i in tl.static_range(2 * ROW_TILES):
            loaded = loaded + (
                load_row(levels_ptr, high_ptr, scales_ptr, units_ptr, rows[i], group, num_groups, BITS, SCALES, GROUP),
            )
        queue = queue + (loaded,)
    begin_part(PART, PDL)
    zeros = (lanes * 0).to(tl.float32)
    totals = ()
    for _ in tl.static_range(ROW_TILES * TILES):
        totals = totals + ((zeros, zeros, zeros, zeros),)
    four = tl.arange(0, 4)[None, :]
    for begin in range(0, (num_groups + 3) // 4, WARPS):
        turn = begin + warp
        following = tl.minimum((turn + AHEAD * WARPS) * 4 + t, num_groups - 1)
        loaded = ()
        for i in tl.static_range(2 * ROW_TILES):
            loaded = loaded + (
                load_row(
                    levels_ptr, high_ptr, scales_ptr, units_ptr, rows[i], following, num_groups, BITS, SCALES, GROUP
                ),
            )
        queue = queue + (loaded,)
        now = queue[0]
        factors = ()
        for i in tl.static_range(2 * ROW_TILES):
            factors = factors + (row_factors(now[i], tl.minimum(turn * 4 + t, num_groups - 1), SCALES, GROUP, LANES),)
        for word in tl.static_range(4):
            weights = ()
            for i in tl.static_range(2 * ROW_TILES):
                weights = weights + (eight_weights(now[i], factors[i], word, BITS, SCALES, ZERO, TABLE, CODES, LANES),)
            x = ()
            for tile in tl.static_range(TILES):
                # Tokens after the last one repeat it, so that fewer lines are read.
                token = tl.minimum(r, num_tokens - 1 - (first_token + tile * 8))
                eight = tl.minimum(tl.program_id(1) * TILES + tile, (num_tokens - 1) // 8)
                at = x_ptr + (eight * x_turns + turn) * 512 + word * 128 + tl.maximum(token, 0) * 16 + t * 4
                x = x + (columns4(tl.load(at[:, None] + four), LANES),)
            sums = ()
            for k in tl.static_range(ROW_TILES * TILES):
                upper, lower = weights[2 * (k // TILES)], weights[2 * (k // TILES) + 1]
                half = _mma(upper, lower, x[k % TILES], totals[k], 0, WARPS, WIDE)
                sums = sums + (_mma(upper, lower, x[k % TILES], half, 2, WARPS, WIDE),)
            totals = sums
        queue = queue[1:]
    lane = tl.arange(0, 32)
    r, t = lane // 4, lane % 4
    if HALVES:
        growth = tl.load(growth_ptr)
    for k in tl.static_range(ROW_TILES * TILES):
        start = tl.program_id(0) * ROW_TILES + k // TILES
        if GATED:
            upper, lower = start * 8 + r, start * 8 + r + num_rows
        else:
            upper, lower = start * 16 + r, start * 16 + r + 8
        for column in tl.static_range(2):
            token = first_token + (k % TILES) * 8 + 2 * t + column
            is_token = token < num_tokens
            first = tl.sum(tl.reshape(totals[k][column], [WARPS, 32]), 0)
            second = tl.sum(tl.reshape(totals[k][2 + column], [WARPS, 32]), 0)
            scale = tl.load(x_scales_ptr + token, mask=is_token, other=0.0)
            first, second = first * scale, second * scale
            is_upper, is_lower = is_token & (upper < num_rows), is_token & (lower < num_rows)
            if BIAS:
                first += tl.load(bias_ptr + upper, mask=is_upper, other=0.0).to(tl.float32)
                second += tl.load(bias_ptr + lower, mask=is_upper if GATED else is_lower, other=0.0).to(tl.float32)
            at = out_ptr + token.to(tl.int64) * out_stride
            if GATED:
                first = active(first, GATED) * second
            else:
                if ADD:
                    second += tl.load(at + lower, mask=is_lower, other=0.0).to(tl.float32)
                tl.store(at + lower, second.to(out_ptr.dtype.element_ty), mask=is_lower)
            if ADD:
                first += tl.load(at + upper, mask=is_upper, other=0.0).to(tl.float32)
            at += upper
            if HALVES:
                first *= growth
                tokens = tl.program_id(1) * TILES + k % TILES
                at = out_ptr + by_eights(tokens, 2 * t + column, start, r, out_stride)
            tl.store(at, first.to(out_ptr.dtype.element_ty), mask=is_upper)
    if HALVES:
        _end_span(out_ptr, num_tokens, num_rows, out_stride, TILES)
    end_part(PART, PDL)


class Tile(NamedTuple):
    """The share of a matmul that one program of `_matmul_kernel` computes, and its launch options."""

    warps: int  # number of warps, which share the input's columns
    rows: int  # rows of the matrix / 16; with a gate, rows of each of its halves / 8
    tokens: int  # tokens / 8
    ahead: int  # turns of 128 columns to load ahead


def matmul(
    x: Float16Activations,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: int = False,
    add: bool = False,
    tile: Tile | None = None,
    part: int = 0,
) -> Tensor:
    """Compute ``x @ matrix.T + bias``. Write the result to ``out [tokens, out]``, or add it if ``add``.

    Rows of ``out`` may be strided.

    Args:
        gated: the matrix is gate and up, and the result is ``silu(gate) * up``, ``[tokens, out / 2]``.
        part: if several matmuls of the same x are launched one after another, the number of this one, from 1; else 0.
    """
    _launch(x, matrix, bias, out, out.stride(0), None, gated=gated, add=add, tile=tile, part=part)
    return out


def gated_to_float16(
    x: Float16Activations,
    matrix: LowBit,
    bias: Tensor | None,
    by: FixedScale,
    tile: Tile | None = None,
    *,
    gated: int = True,
) -> Float16Activations:
    """Compute ``silu(gate) * up`` like `matmul`, and store it in float16 with the fixed scale ``by``.

    The result is in the input layout of the next matmul.
    """
    out = allocate_by_eights(x.scales, matrix.shape[0] // 2)
    _launch(x, matrix, bias, out, out.shape[1], by.growth, gated=gated, add=False, tile=tile, part=0)
    return Float16Activations(out, by.scales[: x.scales.shape[0]])


def _launch(
    x: Float16Activations, matrix: LowBit, bias: Tensor | None, out: Tensor, out_stride: int, growth: Tensor | None,
    *, gated: int, add: bool, tile: Tile | None, part: int,
) -> None:  # fmt: skip
    layout, (features, columns) = matrix.layout, matrix.shape
    tokens, num_rows = x.scales.shape[0], features // 2 if gated else features
    warps, row_tiles, tiles, ahead = tile or matrix.tiles.get(bucket(tokens)) or tile_for(tokens, features, columns)
    levels, high, scales, units = planes_of(matrix)
    if layout.group == 16:
        scales = scales.view(torch.int16)
    _matmul_kernel[(cdiv(num_rows, (8 if gated else 16) * row_tiles), cdiv(tokens, 8 * tiles))](
        out, x.x.view(torch.int32), x.scales, levels, high, scales, units, x.scales if bias is None else bias,
        x.scales if growth is None else growth, tokens, num_rows, columns // GROUP, x.x.shape[1], out_stride,
        GATED=gated, HALVES=growth is not None, ADD=add, BIAS=bias is not None,
        **constants_of(matrix), CODES=codes(layout),
        WIDE=_has_wide_mma(out.device), WARPS=warps, ROW_TILES=row_tiles, TILES=tiles, AHEAD=ahead, PART=part,
        num_warps=warps, **pdl_options(out.device),
    )  # fmt: skip


@functools.cache
def _has_wide_mma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def tile_for(tokens: int, features: int, columns: int) -> Tile:
    """Return the built-in tile, measured on an H200.

    Programs for matrices with fewer rows have more warps, so that every multiprocessor has work.
    """
    tiles = min(8, next_power_of_2(cdiv(tokens, 8)))
    if INTERPRETED.value:
        return Tile(8, 1, min(tiles, 2), 1)  # few turns, because each has overhead
    is_tall, is_long = features >= 12288, columns > 8192
    if tiles == 1:
        return Tile(4, 2, 1, 1) if is_tall else Tile(16, 1, 1, 1) if is_long else Tile(8, 1, 1, 2)
    if tiles == 2:
        return Tile(4, 2, 2, 1) if is_tall else Tile(8, 1, 2, 2) if is_long or features <= 4096 else Tile(8, 1, 2, 1)
    if is_tall:
        return Tile(2, 2, tiles, 1)
    return Tile(8, 2, tiles, 1) if is_long else Tile(4, 2, 4, 1)
