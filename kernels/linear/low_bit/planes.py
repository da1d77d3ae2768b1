"""Load and unpack levels and scales of a tile of a low-bit matrix. `low_bit.layouts` defines the layouts."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import INTERPRETED
from minillm.kernels.linear.low_bit.layouts import IQ4_TABLE, LowBit

# Four levels per word.
_TABLE = struct.unpack("<4i", struct.pack("16b", *IQ4_TABLE))
_T0 = tl.constexpr(_TABLE[0])
_T1 = tl.constexpr(_TABLE[1])
_T2 = tl.constexpr(_TABLE[2])
_T3 = tl.constexpr(_TABLE[3])
_SIGNS = tl.constexpr(-0x7F7F7F80)  # the sign bits of four bytes


@triton.jit
def load_levels(levels_ptr, high_ptr, rows, groups, num_rows, num_groups, BITS: tl.constexpr):
    """Load the packed levels of a tile of groups, for `level_bytes`. Groups outside the matrix get zeros.

    Returns three results. First, words ``[rows, groups, 4]``: all words of a group, or, with 8 bits, those at even
    indices. Second, with 8 bits, the words at odd indices. Third, with 5 or 6 bits, the words of the higher plane
    ``[rows, groups, BITS - 4]``. Results that the layout does not have are placeholders.
    """
    mask = ((rows < num_rows)[:, None] & (groups < num_groups)[None, :])[:, :, None]
    group = (rows * num_groups)[:, None, None] + groups[None, :, None]  # below 2^31
    WORDS: tl.constexpr = 8 if BITS == 8 else 4
    words = tl.load(
        levels_ptr + group * WORDS + tl.arange(0, WORDS)[None, None, :],
        mask=mask, other=0, eviction_policy="evict_first",
    )  # fmt: skip
    odd, high = words, words
    if BITS == 8:
        words, odd = tl.split(tl.reshape(words, [rows.shape[0], groups.shape[0], 4, 2]))
    elif BITS > 4:
        PLANES: tl.constexpr = BITS - 4
        at = high_ptr + group * PLANES + tl.arange(0, PLANES)[None, None, :]
        high = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    return words, odd, high


@triton.jit
def look_up(nibbles):
    """Look up the levels of four nibbles in `IQ4_TABLE`.

    Each nibble is the low half of a byte of the word. Its level is the same byte of the result.
    """
    result = nibbles * 0
    for byte in tl.static_range(4):
        at = (nibbles >> (8 * byte)) & 15
        word = tl.where(at < 4, _T0, tl.where(at < 8, _T1, tl.where(at < 12, _T2, _T3)))
        result |= ((word >> ((at & 3) * 8)) & 255) << (8 * byte)
    return result


@triton.jit
def level_bytes(words, odd, high, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Unpack the result of `load_levels` to levels in bytes, four in a word.

    Returns two tensors ``[rows, groups, 4]``: the first four weights of every eight, and the other four.
    """
    if BITS == 8:
        low, upper = words ^ _SIGNS, odd ^ _SIGNS
    else:
        low, upper = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    if TABLE:
        low, upper = look_up(low), look_up(upper)
    if BITS == 5 or BITS == 6:
        PLANES: tl.constexpr = BITS - 4
        SHARE: tl.constexpr = 4 // PLANES  # words of nibbles per word of the higher plane
        high = tl.broadcast_to(high[:, :, :, None], [words.shape[0], words.shape[1], PLANES, SHARE])
        high = tl.reshape(high, [words.shape[0], words.shape[1], 4])
        high >>= (4 * PLANES * (tl.arange(0, 4) % SHARE))[None, None, :]
    if BITS == 5:
        low |= ((high << 4) & 0x00100010) | ((high << 11) & 0x10001000)
        upper |= ((high << 2) & 0x00100010) | ((high << 9) & 0x10001000)
    elif BITS == 6:
        low |= ((high << 4) & 0x00300030) | ((high << 10) & 0x30003000)
        upper |= (high & 0x00300030) | ((high << 6) & 0x30003000)
    return low, upper


@triton.jit
def pair(words):
    """Split each word into its two float16 numbers, as float32, the low one first."""
    first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def load_factors(
    scales_ptr, units_ptr, rows, groups, num_rows, num_groups,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Load the factors of groups of 32 weights: four tensors ``[rows, groups]`` float32.

    They are the scale of the first 16 weights, the scale of the last 16 weights, the zero, the offset.
    """
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
        unit, min_unit = pair(units)
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
            scale, zero = pair(scale)  # two float16 numbers in a word
        else:
            scale, offset = pair(scale)
        second = scale
    return scale, second, zero, offset


@triton.jit
def dot4(a, b, total):
    """Add the dot product of the four signed bytes in ``a`` and ``b`` to ``total``: the instruction ``dp4a``.

    Under the interpreter, compute the same with plain arithmetic.
    """
    if INTERPRETED:
        for byte in tl.static_range(4):
            total += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return total


def planes_of(matrix: LowBit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the matrix as kernel arguments: levels, high bits, scales, units. Missing planes get a placeholder."""
    scales = matrix.scales.view(torch.int32) if matrix.layout.scales in ("zeros", "offset") else matrix.scales
    high = matrix.levels if matrix.high is None else matrix.high
    return matrix.levels, high, scales, scales if matrix.units is None else matrix.units


def constants_of(matrix: LowBit) -> dict[str, object]:
    """Return the layout of the matrix as compile-time constants of kernels."""
    layout = matrix.layout
    return {
        "BITS": layout.bits,
        "SCALES": layout.scales,
        "GROUP": layout.group,
        "ZERO": layout.zero,
        "TABLE": layout.table,
    }
