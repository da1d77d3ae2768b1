"""The parts that kernels of low-bit matrices share: levels and factors of a tile. See `minillm.kernels.low_bit`."""

import struct

import triton
import triton.language as tl

from minillm.kernels.compat import INTERPRETED
from minillm.kernels.low_bit import IQ4_TABLE

# Four levels a word.
_TABLE = struct.unpack("<4i", struct.pack("16b", *IQ4_TABLE))
_T0 = tl.constexpr(_TABLE[0])
_T1 = tl.constexpr(_TABLE[1])
_T2 = tl.constexpr(_TABLE[2])
_T3 = tl.constexpr(_TABLE[3])


@triton.jit
def load_words(ptr, rows, groups, num_rows, num_groups, FIRST: tl.constexpr, PER_GROUP: tl.constexpr):
    """Words ``FIRST`` to ``FIRST + 3`` of each group of a plane: ``[rows, groups, 4]`` int32, zeros outside."""
    mask = (rows < num_rows)[:, None, None] & (groups < num_groups)[None, :, None]
    at = (rows * num_groups)[:, None, None] + groups[None, :, None]  # below 2^31: see `low_bit.MOST_WORDS`
    at = at * PER_GROUP + (FIRST + tl.arange(0, 4))[None, None, :]
    return tl.load(ptr + at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_levels(levels_ptr, high_ptr, rows, groups, num_rows, num_groups, BITS: tl.constexpr):
    """The words that `level_bytes` makes levels of: three tensors ``[rows, groups, 4]``, the last of higher bits."""
    first = load_words(levels_ptr, rows, groups, num_rows, num_groups, 0, 8 if BITS == 8 else 4)
    second = first
    if BITS == 8:
        second = load_words(levels_ptr, rows, groups, num_rows, num_groups, 4, 8)
    high = first
    if BITS == 5 or BITS == 6:
        mask = (rows < num_rows)[:, None, None] & (groups < num_groups)[None, :, None]
        at = ((rows * num_groups)[:, None, None] + groups[None, :, None]) * 4 + tl.arange(0, 4)[None, None, :]
        high = tl.load(high_ptr + at, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)
    return first, second, high


@triton.jit
def _look_up(nibbles):
    """The table's levels at four nibbles, each the low half of a byte."""
    result = nibbles * 0
    for byte in tl.static_range(4):
        at = (nibbles >> (8 * byte)) & 15
        word = tl.where(at < 4, _T0, tl.where(at < 8, _T1, tl.where(at < 12, _T2, _T3)))
        result |= ((word >> ((at & 3) * 8)) & 255) << (8 * byte)
    return result


@triton.jit
def level_bytes(first, second, high, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Levels of both halves of each group: two tensors ``[rows, groups, 4]`` of four bytes a word."""
    low, upper = first, second
    if BITS != 8:
        low, upper = first & 0x0F0F0F0F, (first >> 4) & 0x0F0F0F0F
    if TABLE:
        low, upper = _look_up(low), _look_up(upper)
    if BITS == 5:  # from 8 bits: two in each byte, the low half's first
        high = (high | (high << 12)) & 0x000F000F
        high |= high << 6
        low |= (high & 0x01010101) << 4
        upper |= (high << 3) & 0x10101010
    elif BITS == 6:  # from 16 bits: four in each byte
        high = ((high & 0xFFFF) | (high << 8)) & 0x00FF00FF
        high |= high << 4
        low |= (high & 0x03030303) << 4
        upper |= (high << 2) & 0x30303030
    return low, upper


@triton.jit
def _pair(words):
    """Both float16 numbers of each word."""
    first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def load_factors(
    scales_ptr, units_ptr, rows, groups, num_rows, num_groups,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Scales of both halves, zeros and offsets of groups of 32: four tensors ``[rows, groups]`` float32."""
    mask = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    row = rows[:, None]
    each = groups[None, :]
    nothing = tl.zeros([rows.shape[0], groups.shape[0]], tl.float32)
    zero, offset = nothing + ZERO, nothing
    if SCALES == "super":
        at = (row * (num_groups // 8) + each // 8) * 4
        words = tl.load(scales_ptr + at[:, :, None] + tl.arange(0, 4)[None, None, :], mask=mask[:, :, None], other=0)
        words = tl.reshape(words, [rows.shape[0], groups.shape[0], 2, 2])
        first_and_third, second_and_fourth = tl.split(words)
        low, high = tl.split(first_and_third)
        low_mins, units = tl.split(second_and_fourth)
        unit, min_unit = _pair(units)
        part = (each % 8) * 4
        scale = ((low >> part) & 15) | (((high >> (part // 2)) & 3) << 4)
        least = ((low_mins >> part) & 15) | (((high >> (16 + part // 2)) & 3) << 4)
        scale = scale.to(tl.float32) * unit
        offset = -(least.to(tl.float32) * min_unit)
        second = scale
    elif SCALES == "bytes":
        unit = tl.load(units_ptr + row * (num_groups // 8) + each // 8, mask=mask, other=0.0).to(tl.float32)
        at = (row * num_groups + each) * (2 if GROUP == 16 else 1)
        scale = tl.load(scales_ptr + at, mask=mask, other=0).to(tl.float32) * unit
        second = scale
        if GROUP == 16:
            second = tl.load(scales_ptr + at + 1, mask=mask, other=0).to(tl.float32) * unit
    else:
        at = row + each * 0
        if GROUP > 0:
            at = row * (num_groups // (GROUP // 32)) + each // (GROUP // 32)
        scale = tl.load(scales_ptr + at, mask=mask, other=0)
        if SCALES == "plain":
            scale = scale.to(tl.float32)
        elif SCALES == "zeros":
            scale, zero = _pair(scale)  # two float16 numbers, seen as a word
        else:
            scale, offset = _pair(scale)
        second = scale
    return scale, second, zero, offset


@triton.jit
def dot4(a, b, total):
    """``total`` plus the product of four signed bytes a word of ``a`` and of ``b``: ``dp4a``, or its plain twin."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            total += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return total
