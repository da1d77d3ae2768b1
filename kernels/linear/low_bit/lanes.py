"""Load and convert a lane's weights of a low-bit matrix, as pairs of float16, for lane kernels such as `few_tokens`.

In a lane kernel a tensor has one element per thread: see docs/kernels.md.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
import functools
import struct

import triton
import triton.language as tl

from minillm.kernels.compat import INTERPRETED
from minillm.kernels.linear.low_bit.layouts import Layout
from minillm.kernels.linear.low_bit.planes import look_up, pair

GROWTH = tl.constexpr(64.0)  # factor of weights, so that small scales are not subnormal
_SIGNS = tl.constexpr(-0x7F7F7F80)  # the sign bits of four bytes


@functools.cache
def codes(layout: Layout) -> tuple[str, str, str, str]:
    """Return the PTX that dequantizes a group of 32 weights: one string for each of its four nibble words.

    Each string computes a word's eight weights, ``(level - zero) * scale + offset``, in float16. The bits of a level
    are placed below fixed exponent bits. This gives the number 1,024 + level, or 64 + level if the level is 4 bits
    higher. Subtracting the constant part is exact.

    Operands: $0 to $3 are the results, pairs of adjacent weights. $4 is the word. $5 is the next word if levels have 8
    bits, else the word of the higher plane. $6 is the scale and $7 the offset, each twice.
    """

    def twice(value: float) -> str:
        number = struct.unpack("<H", struct.pack("<e", value))[0]
        return f"0x{number:04x}{number:04x}"

    eight = layout.bits == 8 or layout.table  # levels in bytes, plus 128
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
            if higher in (1, 2):  # see `layouts._high_shifts`
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
    """Round a float32 number to float16, and pack it twice in a word."""
    half = number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (half << 16) | (half & 0xFFFF)


@triton.jit
def columns4(words, LANES: tl.constexpr):
    """Split ``words [lanes, 4]`` into its four columns."""
    even, odd = tl.split(tl.reshape(words, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_small(ptr, at, BITS: tl.constexpr):
    """Load elements of 8 or 16 bits by loading the 32-bit words around them: smaller loads are not pipelined."""
    SHARE: tl.constexpr = 32 // BITS
    words = tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at // SHARE)
    return (words >> (at % SHARE * BITS)).to(tl.int8 if BITS == 8 else tl.int16)


@triton.jit
def load_row(
    levels_ptr, high_ptr, scales_ptr, units_ptr, row, group, num_groups,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, PIPELINED: tl.constexpr = False,
):  # fmt: skip
    """Load one group of weights of a row for each lane, still packed. PIPELINED: load scales as `_load_small` does.

    Returns, for the group: its first four words ``[lanes, 4]``; with 8 bits, its other four words; the words of the
    higher plane; the scales; the unit of the scales. Results that the layout does not have are placeholders.
    """
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
    elif not PIPELINED:
        if SCALES == "bytes":
            scales = tl.load(scales_ptr + at)  # with groups of 16, both
            unit = tl.load(units_ptr + row * (num_groups // 8) + group // 8)
        elif GROUP == 0:
            scales = tl.load(scales_ptr + row)
        else:
            scales = tl.load(scales_ptr + row * (num_groups // (GROUP // 32)) + group // (GROUP // 32))
    elif SCALES == "bytes":
        scales = _load_small(scales_ptr, at, 16 if GROUP == 16 else 8)
        unit = _load_small(units_ptr, row * (num_groups // 8) + group // 8, 16).to(tl.float16, bitcast=True)
    else:
        if GROUP == 0:
            at = row
        else:
            at = row * (num_groups // (GROUP // 32)) + group // (GROUP // 32)
        if SCALES == "plain" and scales_ptr.dtype.element_ty.primitive_bitwidth == 16:
            scales = _load_small(scales_ptr, at, 16).to(scales_ptr.dtype.element_ty, bitcast=True)
        else:
            scales = tl.load(scales_ptr + at)
    return words, more, high, scales, unit


@triton.jit
def row_factors(row, group, SCALES: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Return the factors of each lane's group, from the result of `load_row`.

    Returns: the scale of the first 16 weights, the scale of the last 16 weights, the offset. Each is ``[lanes]``,
    packed twice as float16 and multiplied by `GROWTH`.
    """
    _, _, _, scales, unit = row
    offset = group
    if SCALES == "super":
        low, low_mins, high, units = columns4(scales, LANES)
        unit, min_unit = pair(units)
        part = (group % 8) * 4
        scale = ((low >> part) & 15) | (((high >> (part // 2)) & 3) << 4)
        least = ((low_mins >> part) & 15) | (((high >> (16 + part // 2)) & 3) << 4)
        first = _twice(scale.to(tl.float32) * (unit * GROWTH))
        second = first
        offset = _twice(least.to(tl.float32) * (min_unit * -GROWTH))
    elif SCALES == "bytes":
        unit = unit.to(tl.float32) * GROWTH
        scales = scales.to(tl.int32)
        if GROUP == 16:
            first = _twice(((scales << 24) >> 24).to(tl.float32) * unit)
            second = _twice((scales >> 8).to(tl.float32) * unit)
        else:
            first = _twice(scales.to(tl.float32) * unit)
            second = first
    elif SCALES == "plain":
        first = _twice(scales.to(tl.float32) * GROWTH)
        second = first
    else:
        scale, other = pair(scales)
        if SCALES == "zeros":
            other = -scale * other
        first = _twice(scale * GROWTH)
        second = first
        offset = _twice(other * GROWTH)
    return first, second, offset


@triton.jit
def eight_weights(
    row, factors, WORD: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr,
    TABLE: tl.constexpr, CODES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return eight weights of each lane's group, those of nibble word WORD, as four words of two float16.

    ``row`` is the result of `load_row`, ``factors`` that of `row_factors`.
    """
    words, more, high, _, _ = row
    scale = factors[1] if WORD > 1 else factors[0]
    other = columns4(words, LANES)[WORD]
    word = other
    if BITS == 8:  # words 2 WORD and 2 WORD + 1 of eight
        eight = columns4(more, LANES) if WORD > 1 else columns4(words, LANES)
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
            for neighbor in tl.static_range(2):
                place: tl.constexpr = 16 * neighbor + 8 * (out % 2)
                if BITS == 8 or TABLE:
                    level = (((other if out > 1 else word) >> place) & 255) - 128
                else:
                    level = (word >> (place + 4 * (out // 2))) & 15
                    if BITS > 4:
                        start: tl.constexpr = (BITS - 4) * (4 * (WORD % (4 // (BITS - 4))) + out) + 16 * neighbor
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
