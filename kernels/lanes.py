"""Instructions of lane kernels: int8 tensor core matmuls, byte permutations, and the same in plain Triton.

In a lane kernel, a tensor has one element for each of the program's threads. Lane 4r + t of a warp, with r < 8 and t <
4, is group r, thread t in NVIDIA's PTX manual, and holds the parts of matrices that the manual lists. Plain Triton
operations compute the same under the interpreter, which cannot run these instructions. docs/kernels.md explains one
example.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
import triton
import triton.language as tl

from minillm.kernels.compat import INTERPRETED

BFLOAT_UNIT = tl.constexpr(2.0**-13)  # factor of the results of `int8_pair_to_bf16x2` and `int8_to_bf16x4`


@triton.jit
def _products(a, b, UNSIGNED: tl.constexpr, WARPS: tl.constexpr):
    """Compute under the interpreter what ``mma`` computes on a GPU, for eight rows of A. A and B are the factors of
    `mma`.

    In lane 4r + t, return the products of row r with columns 2t and 2t + 1 of B. ``a`` and ``b`` are pairs of words; a
    word has four int8.
    """
    shifts = (24 - tl.arange(0, 4) * 8)[None, None, :]
    a = (tl.join(a[0], a[1])[:, :, None] << shifts) >> 24
    b = (tl.join(b[0], b[1])[:, :, None] << shifts) >> 24
    if UNSIGNED:
        b = b & 255
    products = tl.reshape(a, [WARPS, 8, 1, 32]) * tl.reshape(b, [WARPS, 1, 8, 32])
    return tl.split(tl.reshape(tl.sum(products, 3), [WARPS * 32, 2]))


@triton.jit
def mma(upper, lower, b, c, UNSIGNED: tl.constexpr, WARPS: tl.constexpr):
    """Add the product of two int8 matrices, ``[16, 32]`` and ``[32, 8]``, to ``c``. Return the four sums of each lane.

    Lane 4r + t gives three pairs of words of four int8: ``upper`` from row r and ``lower`` from row r + 8 of the first
    matrix, and ``b`` from column r of the second. The lane's sums are those of rows r and r + 8, in columns 2t and 2t +
    1. The bytes of ``b`` are unsigned if UNSIGNED.
    """
    if INTERPRETED:
        d0, d1 = _products(upper, b, UNSIGNED, WARPS)
        d2, d3 = _products(lower, b, UNSIGNED, WARPS)
        return c[0] + d0, c[1] + d1, c[2] + d2, c[3] + d3
    else:
        code: tl.constexpr = (
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 " if UNSIGNED else
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        )  # fmt: skip
        return tl.inline_asm_elementwise(
            code + "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [upper[0], lower[0], upper[1], lower[1], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def transpose8x8(words, WARPS: tl.constexpr):
    """Transpose an 8 x 8 matrix of 16-bit values in each warp.

    Before, lane 4r + t has columns 2t and 2t + 1 of row r, two values in a word. Afterwards, it has the same columns
    and row of the transposed matrix.
    """
    if INTERPRETED:
        values = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        values = tl.permute(tl.reshape(values, [WARPS, 8, 8]), [0, 2, 1])
        low, high = tl.split(tl.reshape(values, [WARPS * 32, 2]))
        return low | (high << 16)
    else:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _byte(word, place: tl.constexpr):
    return (word >> (8 * place)) & 255


@triton.jit
def transpose4x4_bytes(a, b, c, d):
    """Transpose four words of four bytes each: word i of the result has byte i of ``a``, ``b``, ``c`` and ``d``."""
    if INTERPRETED:
        result = ()
        for i in tl.static_range(4):
            result = result + (_byte(a, i) | (_byte(b, i) << 8) | (_byte(c, i) << 16) | (_byte(d, i) << 24),)
        return result
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, q, r, s; prmt.b32 p, $4, $5, 0x5140; prmt.b32 q, $6, $7, 0x5140; "
            "prmt.b32 r, $4, $5, 0x7362; prmt.b32 s, $6, $7, 0x7362; "
            "prmt.b32 $0, p, q, 0x5410; prmt.b32 $1, p, q, 0x7632; "
            "prmt.b32 $2, r, s, 0x5410; prmt.b32 $3, r, s, 0x7632; }",
            "=&r,=&r,=&r,=&r,r,r,r,r", [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def two_digits(a, b):
    """Pack two numbers below 2^16 in a word: first the upper bytes of ``a`` and ``b``, then their lower bytes."""
    if INTERPRETED:
        return _byte(a, 1) | (_byte(b, 1) << 8) | (_byte(a, 0) << 16) | (_byte(b, 0) << 24)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x4051;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def bytes_at(a, b, c, d, place):
    """Take the byte with index ``place`` (0 or 1) of each of four words. Pack these bytes into one word."""
    if INTERPRETED:
        shift = place * 8
        return (
            ((a >> shift) & 255)
            | (((b >> shift) & 255) << 8)
            | (((c >> shift) & 255) << 16)
            | (((d >> shift) & 255) << 24)
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, q; prmt.b32 p, $1, $2, $5; prmt.b32 q, $3, $4, $5; prmt.b32 $0, p, q, 0x5410; }",
            "=r,r,r,r,r,r", [a, b, c, d, 0x40 + place * 0x11], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def of_eights(x, WARPS: tl.constexpr):
    """Give each of 32 lanes one of the warp's four values: lane 4r + t gets the value of lanes 8t to 8t + 7.

    These eight lanes must have the same value of ``x``.
    """
    if INTERPRETED:
        x = tl.max(tl.reshape(x, [WARPS, 1, 4, 8]), 3)
        return tl.reshape(tl.broadcast_to(x, [WARPS, 8, 4]), [WARPS * 32])
    else:
        lane = tl.arange(0, WARPS * 32) % 4 * 8
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _half(word, place: tl.constexpr):
    """Convert the signed byte at ``place`` of a word to float16. Return the bits."""
    return ((word << (24 - 8 * place)) >> 24).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def int8_to_f16x4(word):
    """Convert four int8 in a word to two pairs of float16.

    An int8 with its sign bit flipped is that number plus 128. ORed into the mantissa of 1,024, it is the number plus
    1,152.
    """
    if INTERPRETED:
        return _half(word, 0) | (_half(word, 1) << 16), _half(word, 2) | (_half(word, 3) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 n, m, k; xor.b32 n, $2, 0x80808080; mov.b32 m, 0x64646464; mov.b32 k, 0x64806480; "
            "prmt.b32 $0, n, m, 0x4140; prmt.b32 $1, n, m, 0x4342; "
            "sub.rn.f16x2 $0, $0, k; sub.rn.f16x2 $1, $1, k; }",
            "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _bfloat(word, place: tl.constexpr):
    """Convert the signed byte at ``place`` of a word to bfloat16, times `BFLOAT_UNIT`. Return the bits."""
    number = ((word << (24 - 8 * place)) >> 24).to(tl.float32) * BFLOAT_UNIT
    return (number.to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def int8_pair_to_bf16x2(a, b, place: tl.constexpr):
    """Convert the int8 at ``place`` of two words to a pair of bfloat16, times `BFLOAT_UNIT`.

    The bits of the number plus 128, read as a bfloat16, are that sum times 2^-133. This is subnormal or the smallest
    normal number, and the arithmetic is exact.
    """
    if INTERPRETED:
        return _bfloat(a, place) | (_bfloat(b, place) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, m, n; prmt.b32 p, $1, $2, $3; mov.b32 m, 0x00800080; mov.b32 n, 0x00FF00FF; "
            "lop3.b32 p, p, m, n, 0x28; mov.b32 m, 0x7B807B80; mov.b32 n, 0xBC80BC80; fma.rn.bf16x2 $0, p, m, n; }",
            "=r,r,r,r", [a, b, 0x4400 + 0x1111 * place], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def int8_to_bf16x4(word):
    """Convert four int8 in a word to two pairs of bfloat16, times `BFLOAT_UNIT`: see `int8_pair_to_bf16x2`."""
    if INTERPRETED:
        return _bfloat(word, 0) | (_bfloat(word, 1) << 16), _bfloat(word, 2) | (_bfloat(word, 3) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 n, m, o; xor.b32 n, $2, 0x80808080; mov.b32 m, 0x7B807B80; mov.b32 o, 0xBC80BC80; "
            "prmt.b32 $0, n, 0, 0x4140; prmt.b32 $1, n, 0, 0x4342; "
            "fma.rn.bf16x2 $0, $0, m, o; fma.rn.bf16x2 $1, $1, m, o; }",
            "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _approximately(x, FUNCTION: tl.constexpr):
    """Apply an approximate float32 instruction to x. The instruction treats subnormal numbers as 0."""
    return tl.inline_asm_elementwise(
        FUNCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """Return 1 / x in float32, accurate to the last bit."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return _approximately(x, "rcp")


@triton.jit
def logarithm(x):
    """Return the base-2 logarithm of a normal float32 above 0; NaN for NaN."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return _approximately(x, "lg2")


@triton.jit
def power(x):
    """Return 2^x in float32. Subnormal results become 0, which saves three of four instructions."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return _approximately(x, "ex2")
