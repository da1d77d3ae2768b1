"""Products of FP8 levels in float16, for one token: the parts of `low_bit_matvec` that are FP8's.

An instruction makes two levels float16, another multiplies them with two activations, which are float16 as well, in
groups of 32 with one scale that is a power of two. Four products are added in float16, whose end they cannot reach, and
all else in float32: the result is off by some 3e-4. With products in float32, `matvec`'s, a weight takes 6.3
instructions on a GPU that has time for 6.9 of them if it is to read at the speed of its memory (H200); with these 2.
"""

import triton
import triton.language as tl

from minillm.kernels.compat import INTERPRETED, widen
from minillm.kernels.low_bit_tiles import pair


@triton.jit
def halves(x_ptr, norm_ptr, groups, num_groups, NORM: tl.constexpr):
    """A token in float16, in groups of 32 of which the largest number is 8 to 16, and its sum of squares.

    Words of two neighbours: of words of four levels at even places the first two and the others, and of those at odd
    places: four times ``[1, groups, 4]``. Then the groups' scales, ``[1, groups]`` float32.
    """
    columns = (groups * 32)[:, None, None] + (tl.arange(0, 4) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    mask = (groups < num_groups)[:, None, None]
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    squares = 0.0
    if NORM:
        squares = tl.sum(tl.sum(tl.sum(x * x, 2), 1), 0)
        x *= tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), 2), 1)
    largest = tl.where((largest > 1e-30) & (largest < 1e30), largest, 1.0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23  # 127 more than it is
    growth = ((127 + 3 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    half = (x * growth[:, None, None]).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    left, right = tl.split(tl.reshape(half, [x.shape[0], 4, 2, 2, 2]))
    first, second = tl.split((left & 0xFFFF) | (right << 16))
    even, odd = tl.split(first[None, :, :, :])
    more_even, more_odd = tl.split(second[None, :, :, :])
    return (even, more_even, odd, more_odd, scale[None, :]), squares


@triton.jit
def _fp8_levels(word, WHICH: tl.constexpr):
    """Two of a word's four numbers, float32: the first two or the others."""
    return (
        widen(((word >> (16 * WHICH)) & 255).to(tl.uint8)),
        widen(((word >> (16 * WHICH + 8)) & 255).to(tl.uint8)),
    )


@triton.jit
def eight_products(even, odd, x):
    """The sum of the products of two words of levels with eight activations, float32."""
    if INTERPRETED:
        total = (even & 0).to(tl.float32)
        for i in tl.static_range(4):
            left, right = _fp8_levels(even if i < 2 else odd, i % 2)
            first, second = pair(x[i])
            total += left * first + right * second
        return total
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 p, q; .reg .b32 s, w; .reg .f32 f; "
            "mov.b32 {p, q}, $1; cvt.rn.f16x2.e4m3x2 s, p; mul.rn.f16x2 s, s, $3; "
            "cvt.rn.f16x2.e4m3x2 w, q; fma.rn.f16x2 s, w, $4, s; "
            "mov.b32 {p, q}, $2; cvt.rn.f16x2.e4m3x2 w, p; fma.rn.f16x2 s, w, $5, s; "
            "cvt.rn.f16x2.e4m3x2 w, q; fma.rn.f16x2 s, w, $6, s; "
            "mov.b32 {p, q}, s; cvt.f32.f16 $0, p; cvt.f32.f16 f, q; add.rn.f32 $0, $0, f; }",
            "=&f,r,r,r,r,r,r", [even, odd, x[0], x[1], x[2], x[3]], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
