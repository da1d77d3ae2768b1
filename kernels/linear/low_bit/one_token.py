"""Low-bit matrix-vector kernel for one or two tokens; norm, gating and addition are fused as in `linear.matvec`.

It computes sums of byte products (``dp4a``), so activations are first quantized to integers: 16 bits in groups of 32
with one scale, as two planes of bytes. With 8 bits, as in llama.cpp, the next token's distribution differs by a KL
divergence of 3e-3 on the default model. With 16 bits it differs by 1e-7, but 1.5 times as many instructions are needed.

`_product_kernel`: as many programs as run at a time. Each program quantizes x and keeps it in registers. It then
computes ROWS whole rows at a time. The next rows' weights load during the current multiplication, and the first rows'
weights before the program waits for the previous kernel. Bytes: the matrix, once. Every program quantizes x again,
which costs less than a separate launch as long as programs are few and large: on an H200 a layer of an 8B model in Q4_0
takes 44 us, and 52 with separate quantization.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Norm, cdiv, next_power_of_2
from minillm.kernels.compat import INTERPRETED, begin_part, end_part, num_multiprocessors, pdl_options
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit.layouts import GROUP, Layout, LowBit, bucket
from minillm.kernels.linear.low_bit.planes import constants_of, dot4, level_bytes, load_factors, load_levels, planes_of
from minillm.kernels.norm.activation import active

Tile = tuple[int, int, int]  # rows and warps per program, and programs per multiprocessor

MOST_TOKENS = 2
_FEWEST = 32  # minimum groups per tile: with 8 of them per warp, Triton 3.6 compiles wrong code
_ANY = 1 << 31
# Tokens -> groups per row, rounded up to a power of two -> maximum rows -> four tiles: for 4 bits, for 4 bits with
# 6-bit scales, for 5 or 6 bits, and for 8 bits. Measured on an H200 with a cold L2.
TILES: dict[int, dict[int, dict[int, tuple[Tile, Tile, Tile, Tile]]]] = {
    1: {
        32: {_ANY: ((4, 1, 16), (4, 1, 16), (4, 1, 16), (4, 1, 12))},
        64: {
            8000: ((8, 2, 8), (4, 2, 8), (4, 2, 4), (4, 2, 8)),
            100_000: ((4, 2, 6), (2, 2, 8), (4, 2, 4), (2, 2, 8)),
            _ANY: ((4, 2, 8), (2, 1, 12), (1, 1, 16), (2, 1, 12)),
        },
        128: {
            8000: ((4, 4, 4), (4, 4, 3), (4, 4, 3), (4, 4, 3)),
            100_000: ((2, 2, 6), (2, 4, 4), (2, 2, 4), (2, 2, 4)),
            _ANY: ((2, 2, 8), (2, 2, 6), (2, 2, 6), (2, 2, 6)),
        },
        256: {_ANY: ((4, 8, 2), (4, 8, 1), (4, 8, 1), (2, 8, 2))},
        512: {_ANY: ((4, 16, 1), (2, 16, 2), (2, 8, 2), (2, 16, 2))},
        1024: {_ANY: ((2, 16, 1), (1, 16, 1), (1, 16, 1), (1, 16, 1))},  # not measured: registers for 512 x 2
    },
    2: {
        32: {_ANY: ((4, 1, 12), (4, 1, 12), (4, 1, 12), (8, 4, 3))},
        64: {
            8000: ((4, 2, 4), (4, 2, 4), (4, 2, 4), (4, 2, 4)),
            _ANY: ((2, 2, 6), (2, 2, 4), (2, 2, 4), (1, 1, 8)),
        },
        128: {
            8000: ((4, 4, 2), (4, 4, 2), (4, 4, 2), (4, 4, 2)),
            _ANY: ((2, 2, 4), (2, 4, 2), (2, 4, 2), (1, 4, 4)),
        },
        256: {_ANY: ((4, 8, 1), (4, 8, 1), (4, 8, 1), (4, 8, 1))},
        512: {_ANY: ((2, 8, 1), (2, 8, 1), (2, 8, 1), (2, 8, 1))},
        1024: {_ANY: ((1, 16, 1), (1, 16, 1), (1, 16, 1), (1, 16, 1))},  # not measured
    },
}
_LARGEST = tl.constexpr(127 * 256 + 127)  # two signed bytes


@triton.jit
def _whole_numbers(x_ptr, norm_ptr, order_ptr, groups, num_groups, NORM: tl.constexpr):
    """Quantize one token to integers.

    A value is ``scale * (256 * coarse + fine)``; coarse and fine are signed bytes, four in a word. Values are in the
    order of the matrix's levels (see `low_bit.layouts`). Of every eight values, the first four and the last four are in
    separate tensors.

    Returns:
        A tuple for `_tile_product`: words ``[1, groups, 4]`` of the first coarse, last coarse, first fine and last fine
            bytes; then ``[1, groups]`` float32: the scale, and the sum of the values in each half of the group.
        The sum of the token's squares, which RMSNorm needs; 0 without a norm.
    """
    columns = (groups * 32)[:, None, None] + (tl.arange(0, 4) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    mask = (groups < num_groups)[:, None, None]
    if order_ptr is not None:
        columns = tl.load(order_ptr + columns, mask=mask, other=0)
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    squares = 0.0
    if NORM:
        squares = tl.sum(tl.sum(tl.sum(x * x, 2), 1), 0)
        x *= tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    # NaN and infinity cannot be quantized: they make the scale NaN.
    scale = tl.max(tl.max(tl.abs(x), 2), 1) / _LARGEST + 0.0 * tl.sum(tl.sum(x, 2), 1)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    # Adding 1.5 x 2^23 places an integer in a float's low bits. 128 is added as well. The second byte of the sum is
    # coarse, and its first byte is fine plus 128.
    level = (x * inverse[:, None, None] + 12583040.0).to(tl.int32, bitcast=True)
    even, odd = tl.split(tl.reshape(level, [x.shape[0], 4, 2, 2, 2]))
    first, second = tl.split((even & 0xFFFF) | (odd << 16))  # weights 0 and 1, 2 and 3
    coarse = ((first >> 8) & 0x00FF00FF) | (second & -0x00FF0100)
    fine = ((first & 0x00FF00FF) | ((second & 0x00FF00FF) << 8)) ^ -0x7F7F7F80
    none = coarse & 0
    sums = dot4(coarse, none + 0x01010101, none) * 256 + dot4(fine, none + 0x01010101, none)
    sums = tl.sum(tl.reshape(sums, [x.shape[0], 2, 4]), 2).to(tl.float32) * scale[:, None]
    coarse_x, coarse_y = tl.split(coarse[None, :, :, :])
    fine_x, fine_y = tl.split(fine[None, :, :, :])
    first_sum, second_sum = tl.split(sums[None, :, :])
    return (coarse_x, coarse_y, fine_x, fine_y, scale[None, :], first_sum, second_sum), squares


@triton.jit
def _tile_product(
    levels, factors, x, BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr
):
    """Return the dot products of whole rows with one token, ``[rows]`` float32.

    ``levels`` and ``factors`` are the rows' weights from `load_levels` and `load_factors`, ``x`` is from
    `_whole_numbers`.
    """
    low, upper = level_bytes(levels[0], levels[1], levels[2], BITS, TABLE)
    first_scale, second_scale, zero, offset = factors
    coarse_x, coarse_y, fine_x, fine_y, scale, first_sum, second_sum = x
    low, coarse_x = tl.broadcast(low, coarse_x)
    upper, coarse_y = tl.broadcast(upper, coarse_y)
    low, fine_x = tl.broadcast(low, fine_x)
    upper, fine_y = tl.broadcast(upper, fine_y)
    none = low & 0
    if GROUP == 16:
        both = dot4(upper, coarse_y, dot4(low, coarse_x, none)) * 256 + dot4(upper, fine_y, dot4(low, fine_x, none))
        halves = tl.sum(tl.reshape(both, [low.shape[0], low.shape[1], 2, 2]), 3)  # words 0 and 1, and 2 and 3
        first, second = tl.split(halves)
        part = first_scale * (first.to(tl.float32) * scale - zero * first_sum)
        part += second_scale * (second.to(tl.float32) * scale - zero * second_sum)
    else:
        coarse = tl.sum(dot4(upper, coarse_y, dot4(low, coarse_x, none)), 2)
        fine = tl.sum(dot4(upper, fine_y, dot4(low, fine_x, none)), 2)
        both = first_sum + second_sum
        part = (coarse * 256 + fine).to(tl.float32) * scale
        if SCALES == "offset" or SCALES == "super":
            part = first_scale * part + offset * both
        else:
            part = first_scale * (part - zero * both)
    return tl.sum(part, 1)


@launched
@triton.jit
def _product_kernel(
    out_ptr, x_ptr, norm_ptr, order_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr,
    num_rows, num_groups, x_stride, out_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # With a gate, the rows of up follow those of gate.
    all_rows = num_rows * (2 if GATED else 1)
    lanes, groups = tl.arange(0, ROWS), tl.arange(0, GROUPS)
    first_row = tl.program_id(0) * ROWS
    rows = first_row + lanes
    levels = load_levels(levels_ptr, high_ptr, rows, groups, all_rows, num_groups, BITS)
    factors = load_factors(scales_ptr, units_ptr, rows, groups, all_rows, num_groups, SCALES, GROUP, ZERO)
    up_levels, up_factors = levels, factors
    if GATED:
        rows += num_rows
        up_levels = load_levels(levels_ptr, high_ptr, rows, groups, all_rows, num_groups, BITS)
        up_factors = load_factors(scales_ptr, units_ptr, rows, groups, all_rows, num_groups, SCALES, GROUP, ZERO)
    begin_part(PART, PDL)
    tokens = tl.arange(0, TOKENS)
    norm_scale = tl.full([1, TOKENS], 1.0, tl.float32)
    x = ()
    for token in tl.static_range(TOKENS):
        numbers, squares = _whole_numbers(x_ptr + token * x_stride, norm_ptr, order_ptr, groups, num_groups, NORM)
        x = x + (numbers,)  # type: ignore[assignment]
        if NORM:
            of_token = tl.rsqrt(squares / (num_groups * 32) + eps)
            norm_scale = tl.where(tokens[None, :] == token, of_token, norm_scale)
    for row in range(first_row, num_rows, tl.num_programs(0) * ROWS):
        rows = row + lanes
        following = rows + tl.num_programs(0) * ROWS
        # The next rows load during the current multiplication.
        next_levels = load_levels(levels_ptr, high_ptr, following, groups, num_rows, num_groups, BITS)
        next_factors = load_factors(scales_ptr, units_ptr, following, groups, num_rows, num_groups, SCALES, GROUP, ZERO)
        next_up_levels, next_up_factors = next_levels, next_factors
        if GATED:
            following += num_rows
            next_up_levels = load_levels(levels_ptr, high_ptr, following, groups, all_rows, num_groups, BITS)
            next_up_factors = load_factors(
                scales_ptr, units_ptr, following, groups, all_rows, num_groups, SCALES, GROUP, ZERO
            )
        is_row = rows < num_rows
        at = out_ptr + tokens[None, :].to(tl.int64) * out_stride + rows[:, None]
        totals = tl.zeros([ROWS, TOKENS], tl.float32)
        up_totals, before = totals, totals
        if ADD:  # loaded early, so that it arrives with the sums
            before = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
        for token in tl.static_range(TOKENS):
            is_token = tokens[None, :] == token
            part = _tile_product(levels, factors, x[token], BITS, SCALES, GROUP, TABLE)
            totals += tl.where(is_token, part[:, None], 0.0)
            if GATED:
                part = _tile_product(up_levels, up_factors, x[token], BITS, SCALES, GROUP, TABLE)
                up_totals += tl.where(is_token, part[:, None], 0.0)
        totals *= norm_scale
        up_totals *= norm_scale
        if BIAS:
            totals += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_totals += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            totals = active(totals, GATED) * up_totals
        if ADD:
            totals += before
        tl.store(at, totals.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
        levels, factors, up_levels, up_factors = next_levels, next_factors, next_up_levels, next_up_factors
    end_part(PART, PDL)


def product(
    x: Tensor,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None = None,
    *,
    gated: int = False,
    add: bool = False,
    tile: tuple[int, ...] | None = None,
    part: int = 0,
) -> Tensor:
    """Compute ``x @ matrix.T + bias``. Write the result to ``out [tokens, out]``, or add it if ``add``.

    Args:
        x: ``[tokens, in]``, at most `MOST_TOKENS`; rows of ``x`` and ``out`` may be strided.
        norm: weight and eps of an RMSNorm of x before the matmul.
        gated: the matrix is gate and up, and the result is ``silu(gate) * up``, ``[tokens, out / 2]``.
        tile: rows and warps per program, and programs per multiprocessor.
        part: if several matmuls of the same x are launched one after another, the number of this one, from 1; else 0.
    """
    (tokens, columns), features = x.shape, matrix.shape[0]
    num_rows, groups = features // 2 if gated else features, columns // GROUP
    rows, warps, programs = (
        tile or matrix.tiles.get(bucket(tokens)) or tile_for(tokens, matrix.layout, groups, num_rows)
    )
    weight, eps = norm or (x, 0.0)
    _product_kernel[(min(cdiv(num_rows, rows), programs * num_multiprocessors(out.device)),)](
        out, x, weight, matrix.order, *planes_of(matrix), x if bias is None else bias,
        num_rows, groups, x.stride(0), out.stride(0), eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None, TOKENS=tokens,
        **constants_of(matrix), ROWS=rows, GROUPS=max(_FEWEST, next_power_of_2(groups)), PART=part,
        num_warps=warps, **pdl_options(out.device),
    )  # fmt: skip
    return out


def tile_for(tokens: int, layout: Layout, groups: int, rows: int) -> Tile:
    """Return the built-in tile from `TILES`. Matrices with wider rows than any measured matrix use the widest one's
    tile.
    """
    if INTERPRETED.value:
        return 64, 4, 1
    by_groups = TILES[tokens]
    by_rows = by_groups[min(max(next_power_of_2(groups), min(by_groups)), max(by_groups))]
    tiles = next(tiles for most_rows, tiles in by_rows.items() if rows <= most_rows)
    return tiles[2 if layout.bits in (5, 6) else 3 if layout.bits == 8 else 1 if layout.scales == "super" else 0]
