"""Low-bit matrices times a few tokens to a few dozen, by the matrix unit; norm, gate and addition fused.

`_matmul_kernel`: grid (out features / rows of a program, tokens / tokens of a program). Weights go from memory to
registers as they lie there, and become float16 by their bits, just as an ``mma`` instruction wants them; it sums in
float32. So no weight is in shared memory, and no program waits for another of its warps before its rows end. For that
the kernel is written by lanes: a tensor has one element for each of the program's threads. Warps share the input, in
turns of 128 columns, and add their sums at the end, in their order. Bytes: the matrix, once for each TILES x 8 tokens.

``mma`` multiplies 16 rows by 8 tokens. Lane 4r + t has rows r and r + 8 and token r, and a sixteenth of the input: two
neighbours at 2t and two at 2t + 8. Which columns these are is free, if both sides agree: here lane t has group t of
the four, a word of each at a time, so a lane needs one scale a row. Activations are put in that order, eight tokens
next to each other, so that a warp reads whole lines (`halve_activations`: grid (spans of 2,048 columns, tokens)).

Frantar et al. 2024, https://arxiv.org/abs/2408.11743, and Kim et al. 2022, https://arxiv.org/abs/2211.10017, have the
ideas: weights that need no shared memory, and numbers made by their bits.
"""

# ruff: noqa: RUF005 (Triton adds tuples and unpacks none)
import functools
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import INTERPRETED, pdl_options, wait_for_inputs
from minillm.kernels.low_bit import GROUP, Layout, LowBit
from minillm.kernels.low_bit_tiles import constants_of, look_up, pair, planes_of

_SPAN = 2048  # columns that a program prepares
_GROWTH = 64.0  # of weights, so that small scales are no subnormal numbers
_ONCE = tl.constexpr(_GROWTH)
_SIGNS = tl.constexpr(-0x7F7F7F80)  # of four bytes


class HalfActivations(NamedTuple):
    """Activations ``[tokens, in]`` in float16, in the kernel's order, and the scale of each token, float32."""

    x: Tensor  # [eights of tokens, in / 128 rounded up to spans, 4 words, 8 tokens, 4 groups, 8 columns]
    scales: Tensor  # [tokens]


@triton.jit
def _halve_kernel(
    out_ptr, scales_ptr, x_ptr, norm_ptr, num_columns, eps,
    NORM: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    row = tl.load(x_ptr + token * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    norm_scale = 1.0
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(row * row, 0) / num_columns + eps)
        row *= tl.load(norm_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    # A power of two, so that nothing is lost, brings the largest near to the end of float16's range.
    largest = tl.max(tl.abs(row), 0)
    exponent = tl.floor(tl.log2(tl.where((largest > 1e-30) & (largest < 1e30), largest, 1.0)))
    growth = tl.exp2(13.0 - exponent)
    columns = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + token * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.load(norm_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    turn = token // 8 * tl.num_programs(0) * (SPAN // 128) + columns // 128
    at = turn * 1024 + columns % 32 // 8 * 256 + token % 8 * 32 + columns % 128 // 32 * 8 + columns % 8
    tl.store(out_ptr + at, (x * growth).to(tl.float16))
    if tl.program_id(0) == 0:  # NaN and infinity stay
        tl.store(scales_ptr + token, norm_scale / (growth * _ONCE) + 0.0 * tl.sum(row, 0))


def halve_activations(x: Tensor, norm: tuple[Tensor, float] | None = None) -> HalfActivations:
    """``x [tokens, in]``, with ``norm`` (weight, eps) normalised, in float16, whose range a scale extends."""
    tokens, columns = x.shape
    spans = triton.cdiv(columns, _SPAN)
    half = x.new_empty(triton.cdiv(tokens, 8), spans * _SPAN // 128, 4, 8, 4, 8, dtype=torch.float16)
    scales = x.new_empty(tokens, dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    _halve_kernel[(spans, tokens)](
        half, scales, x, weight, columns, eps, NORM=norm is not None,
        COLUMNS=triton.next_power_of_2(columns), SPAN=_SPAN, num_warps=8, **pdl_options(x.device),
    )  # fmt: skip
    return HalfActivations(half, scales)


@functools.cache
def _codes(layout: Layout) -> tuple[str, str, str, str]:
    """PTX for each of a group's four nibble words: its eight weights, ``(level - zero) * scale + offset``, in float16.

    A number's bits are its exponent's and then the level: 1,024 + level, or 64 + level where the level lies 4 bits
    higher. Subtracting is exact. $0 to $3: pairs of neighbours; $4: the word; $5: of 8 bits the next word, else the
    higher plane's; $6: the scale, $7: the offset, both twice.
    """

    def twice(value: float) -> str:
        number = struct.unpack("<H", struct.pack("<e", value))[0]
        return f"0x{number:04x}{number:04x}"

    eight = layout.bits == 8 or layout.table  # levels in bytes, 128 more than they are
    higher = layout.bits - 4
    result = []
    for word in range(4):
        lines = ["{ .reg .b32 n, k; shr.u32 n, $4, 8;"]
        for out in range(4):
            if eight and out == 2:
                lines += ["shr.u32 n, $5, 8;"]
            source = "n" if out % 2 else "$5" if eight and out == 2 else "$4"
            mask = "0x00FF00FF" if eight else "0x000F000F" if out < 2 else "0x00F000F0"
            base, middle = (1024, 1152) if eight else (1024, 1024) if out < 2 else (64, 64)
            lines += [f"lop3.b32 ${out}, {source}, {mask}, {twice(base)}, 0xEA;"]
            if higher in (1, 2):  # see `low_bit._high_shifts`
                place, start = 4 if out < 2 else 8, higher * (4 * (word % (4 // higher)) + out)
                lines += [f"{'shl' if place > start else 'shr'}.b32 k, $5, {abs(place - start)};"]
                kept = ((1 << higher) - 1) << place
                lines += [f"lop3.b32 ${out}, k, 0x{kept:04x}{kept:04x}, ${out}, 0xEA;"]
            lines += [f"mov.b32 k, {twice(middle + layout.zero)}; sub.rn.f16x2 ${out}, ${out}, k;"]
            has_offset = layout.scales in ("super", "offset", "zeros")
            lines += [f"fma.rn.f16x2 ${out}, ${out}, $6, $7;" if has_offset else f"mul.rn.f16x2 ${out}, ${out}, $6;"]
        result.append(" ".join([*lines, "}"]))
    return tuple(result)  # type: ignore[return-value]


@triton.jit
def _twice(number):
    """A float32 number as two float16 in a word."""
    half = number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (half << 16) | (half & 0xFFFF)


@triton.jit
def _fours(words, LANES: tl.constexpr):
    """The columns of ``[lanes, 4]``."""
    even, odd = tl.split(tl.reshape(words, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_row(
    levels_ptr, high_ptr, scales_ptr, units_ptr, row, group, num_groups,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each lane's group of a row: its words, those from the fifth on of 8 bits, its higher plane's, and its scales."""
    at = row.to(tl.int64) * num_groups + group
    four = tl.arange(0, 4)[None, :]
    words_at = (levels_ptr + at * (8 if BITS == 8 else 4))[:, None] + four
    words = tl.load(words_at, eviction_policy="evict_first")
    more = words
    if BITS == 8:
        more = tl.load(words_at + 4, eviction_policy="evict_first")
    high, unit = row, row
    if BITS == 5:
        high = tl.load(high_ptr + at, eviction_policy="evict_first")
    elif BITS == 6:
        high = tl.load((high_ptr + at * 2)[:, None] + tl.arange(0, 2)[None, :], eviction_policy="evict_first")
    if SCALES == "super":
        scales = tl.load((scales_ptr + (row * (num_groups // 8) + group // 8) * 4)[:, None] + four)
    elif SCALES == "bytes":
        scales = tl.load(scales_ptr + at)  # of groups of 16 both
        unit = tl.load(units_ptr + row * (num_groups // 8) + group // 8)
    elif GROUP == 0:
        scales = tl.load(scales_ptr + row)
    else:
        scales = tl.load(scales_ptr + row * (num_groups // (GROUP // 32)) + group // (GROUP // 32))
    return words, more, high, scales, unit


@triton.jit
def _factors(row, group, SCALES: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Scales of a lane's first 16 weights and of the others, and its offset: ``[lanes]``, each twice in float16."""
    _, _, _, scales, unit = row
    offset = group
    if SCALES == "super":
        low, low_mins, high, units = _fours(scales, LANES)
        unit, min_unit = pair(units)
        part = (group % 8) * 4
        scale = ((low >> part) & 15) | (((high >> (part // 2)) & 3) << 4)
        least = ((low_mins >> part) & 15) | (((high >> (16 + part // 2)) & 3) << 4)
        first = _twice(scale.to(tl.float32) * (unit * _ONCE))
        second = first
        offset = _twice(least.to(tl.float32) * (min_unit * -_ONCE))
    elif SCALES == "bytes":
        unit = unit.to(tl.float32) * _ONCE
        scales = scales.to(tl.int32)
        if GROUP == 16:
            first = _twice(((scales << 24) >> 24).to(tl.float32) * unit)
            second = _twice((scales >> 8).to(tl.float32) * unit)
        else:
            first = _twice(scales.to(tl.float32) * unit)
            second = first
    elif SCALES == "plain":
        first = _twice(scales.to(tl.float32) * _ONCE)
        second = first
    else:
        scale, other = pair(scales)
        if SCALES == "zeros":
            other = -scale * other
        first = _twice(scale * _ONCE)
        second = first
        offset = _twice(other * _ONCE)
    return first, second, offset


@triton.jit
def _eight_weights(
    row, factors, WORD: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr,
    TABLE: tl.constexpr, CODES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Eight of a lane's weights: four words of two float16."""
    words, more, high, _, _ = row
    scale = factors[1] if WORD > 1 else factors[0]
    other = _fours(words, LANES)[WORD]
    word = other
    if BITS == 8:  # words 2 WORD and 2 WORD + 1 of eight
        eight = _fours(more, LANES) if WORD > 1 else _fours(words, LANES)
        word, other = eight[2 * (WORD % 2)], eight[2 * (WORD % 2) + 1]
    elif BITS == 5:
        other = high
    elif BITS == 6:
        other = tl.split(high)[WORD // 2]
    elif TABLE:
        other = look_up((word >> 4) & 0x0F0F0F0F) ^ _SIGNS
        word = look_up(word & 0x0F0F0F0F) ^ _SIGNS
    if INTERPRETED:
        result = ()
        for out in tl.static_range(4):
            halves = (word, word)
            for neighbour in tl.static_range(2):
                place: tl.constexpr = 16 * neighbour + 8 * (out % 2)
                if BITS == 8 or TABLE:
                    level = (((other if out > 1 else word) >> place) & 255) - 128
                else:
                    level = (word >> (place + 4 * (out // 2))) & 15
                    if BITS > 4:
                        start: tl.constexpr = (BITS - 4) * (4 * (WORD % (4 // (BITS - 4))) + out) + 16 * neighbour
                        level |= ((other >> start) & ((1 << (BITS - 4)) - 1)) << 4
                number = (level - ZERO).to(tl.float32) * pair(scale)[0]
                if SCALES == "super" or SCALES == "offset" or SCALES == "zeros":
                    number += pair(factors[2])[0]
                halves = (halves[1], number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
            result = result + (halves[0] | (halves[1] << 16),)
        return result
    else:
        return tl.inline_asm_elementwise(
            CODES[WORD], "=&r,=&r,=&r,=&r,r,r,r,r", [word, other, scale, factors[2]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _sixteenth(upper, lower, x, WARPS: tl.constexpr):
    """Sums over two neighbours of every lane of a quad, for one pair of rows r or r + 8: ``[warps, 8 rows, 8 tokens]``.

    The plain twin's part of ``mma``: ``upper`` and ``x`` are words of two float16.
    """
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    for which in tl.static_range(2):
        a, b = (upper, x[0]) if which == 0 else (lower, x[1])
        a, b = tl.reshape(a, [WARPS, 8, 1, 4]), tl.reshape(b, [WARPS, 1, 8, 4])
        for neighbour in tl.static_range(2):
            total += tl.sum(pair(a)[neighbour] * pair(b)[neighbour], 3)
    return total


@triton.jit
def _mma(upper, lower, x, c, FIRST: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr):
    """Sixteen columns' products added to ``c``: rows r and r + 8, tokens 2t and 2t + 1, for lane 4r + t."""
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
    else:  # compute capability 7.5 has half of it
        return tl.inline_asm_elementwise(
            "{ .reg .f32 p, q, r, s; "
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {p,q,r,s}, {$4,$5}, {$8}, {$10,$11,$12,$13}; "
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$6,$7}, {$9}, {p,q,r,s}; }",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [u0, l0, u1, l1, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _matmul_kernel(
    out_ptr, x_ptr, x_scales_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr,
    num_tokens, num_rows, num_groups, x_turns, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    CODES: tl.constexpr, WIDE: tl.constexpr,
    WARPS: tl.constexpr, ROW_TILES: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = WARPS * 32
    lanes = tl.arange(0, LANES)
    warp, r, t = lanes // 32, lanes % 32 // 4, lanes % 4
    first_token = tl.program_id(1) * TILES * 8
    # Rows r and r + 8 of each tile; with a gate, row r of it and of the matrix behind it. What is outside is computed
    # again from the last row, group or token, and not stored; x has zeros behind its end.
    rows = ()
    for tile in tl.static_range(ROW_TILES):
        start = tl.program_id(0) * ROW_TILES + tile
        if GATED:
            row = tl.minimum(start * 8 + r, num_rows - 1)
            rows = rows + (row, num_rows + row)
        else:
            rows = rows + (tl.minimum(start * 16 + r, num_rows - 1), tl.minimum(start * 16 + 8 + r, num_rows - 1))
    queue = ()  # of what is on its way, for AHEAD turns
    for step in tl.static_range(AHEAD):
        group = tl.minimum((warp + step * WARPS) * 4 + t, num_groups - 1)
        loaded = ()
        for i in tl.static_range(2 * ROW_TILES):
            loaded = loaded + (
                _load_row(levels_ptr, high_ptr, scales_ptr, units_ptr, rows[i], group, num_groups, BITS, SCALES, GROUP),
            )
        queue = queue + (loaded,)
    wait_for_inputs(PDL)
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
                _load_row(
                    levels_ptr, high_ptr, scales_ptr, units_ptr, rows[i], following, num_groups, BITS, SCALES, GROUP
                ),
            )
        queue = queue + (loaded,)
        now = queue[0]
        factors = ()
        for i in tl.static_range(2 * ROW_TILES):
            factors = factors + (_factors(now[i], tl.minimum(turn * 4 + t, num_groups - 1), SCALES, GROUP, LANES),)
        for word in tl.static_range(4):
            weights = ()
            for i in tl.static_range(2 * ROW_TILES):
                weights = weights + (_eight_weights(now[i], factors[i], word, BITS, SCALES, ZERO, TABLE, CODES, LANES),)
            x = ()
            for tile in tl.static_range(TILES):
                # Tokens behind the last one are it again: fewer lines are read.
                token = tl.minimum(r, num_tokens - 1 - (first_token + tile * 8))
                eight = tl.minimum(tl.program_id(1) * TILES + tile, (num_tokens - 1) // 8)
                at = x_ptr + (eight * x_turns + turn) * 512 + word * 128 + tl.maximum(token, 0) * 16 + t * 4
                x = x + (_fours(tl.load(at[:, None] + four), LANES),)
            sums = ()
            for k in tl.static_range(ROW_TILES * TILES):
                upper, lower = weights[2 * (k // TILES)], weights[2 * (k // TILES) + 1]
                half = _mma(upper, lower, x[k % TILES], totals[k], 0, WARPS, WIDE)
                sums = sums + (_mma(upper, lower, x[k % TILES], half, 2, WARPS, WIDE),)
            totals = sums
        queue = queue[1:]
    lane = tl.arange(0, 32)
    r, t = lane // 4, lane % 4
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
                first = first * tl.sigmoid(first) * second
            else:
                if ADD:
                    second += tl.load(at + lower, mask=is_lower, other=0.0).to(tl.float32)
                tl.store(at + lower, second.to(out_ptr.dtype.element_ty), mask=is_lower)
            if ADD:
                first += tl.load(at + upper, mask=is_upper, other=0.0).to(tl.float32)
            tl.store(at + upper, first.to(out_ptr.dtype.element_ty), mask=is_upper)


class Tile(NamedTuple):
    """How a program is cut."""

    warps: int  # that share the input
    rows: int  # sixteens of them, with a gate eights of each matrix
    tokens: int  # eights
    ahead: int  # turns of 128 columns that are on their way


def matmul(
    x: HalfActivations,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    add: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ matrix.T + bias``, written to ``out [tokens, out]``, whose rows may lie apart, or added to it.

    ``gated``: the matrix is gate and up, and ``silu(gate) * up`` is the result, ``[tokens, out / 2]``.
    """
    layout, (features, columns) = matrix.layout, matrix.shape
    tokens, num_rows = x.scales.shape[0], features // 2 if gated else features
    warps, row_tiles, tiles, ahead = tile or tile_for(tokens, features, columns, out.device)
    levels, high, scales, units = planes_of(matrix)
    if layout.group == 16:
        scales = scales.view(torch.int16)
    _matmul_kernel[(triton.cdiv(num_rows, (8 if gated else 16) * row_tiles), triton.cdiv(tokens, 8 * tiles))](
        out, x.x.view(torch.int32), x.scales, levels, high, scales, units, x.scales if bias is None else bias,
        tokens, num_rows, columns // GROUP, x.x.shape[1], out.stride(0),
        GATED=gated, ADD=add, BIAS=bias is not None, **constants_of(matrix), CODES=_codes(layout),
        WIDE=_has_wide_mma(out.device), WARPS=warps, ROW_TILES=row_tiles, TILES=tiles, AHEAD=ahead, num_warps=warps,
        **pdl_options(out.device),
    )  # fmt: skip
    return out


@functools.cache
def _has_wide_mma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def tile_for(tokens: int, features: int, columns: int, device: torch.device) -> Tile:
    """More warps where there are fewer rows, so that every multiprocessor has work; measured on an H200."""
    tiles = min(8, triton.next_power_of_2(triton.cdiv(tokens, 8)))
    if INTERPRETED.value:
        return Tile(8, 1, min(tiles, 2), 1)  # few turns, for each has its cost
    is_tall, is_long = features >= 12288, columns > 8192
    if tiles == 1:
        return Tile(4, 1, 1, 1) if is_tall else Tile(16, 1, 1, 1) if is_long else Tile(8, 1, 1, 2)
    if tiles == 2:
        return Tile(2, 2, 2, 1) if is_tall else Tile(8, 1, 2, 2) if is_long or features <= 4096 else Tile(8, 2, 2, 1)
    if is_tall:
        return Tile(2, 2, tiles, 1)
    return Tile(8, 2, tiles, 1) if is_long else Tile(4, 2, 4, 1)
