"""Low-bit matmuls of dozens to a few hundred tokens: weights are converted to float16 in registers, for `tl.dot`.

`_dot_kernel`: grid (rows of the matrix / ROWS, tokens / TOKENS, parts of the input). A turn of its loop multiplies a
tile of ROWS x 128 weights, which are read once for each TOKENS tokens, by 128 x TOKENS activations. Both are loaded
into shared memory as they are stored, several turns ahead. Each thread converts the weights that ``wgmma`` expects from
it, so converted weights are never written. Lane 4r + t gives row r of every eight, in four of each sixteen columns: two
adjacent columns at 2t and two at 2t + 8. As in `few_tokens`, lanes t = 0 to 3 take columns of four different groups,
and activations are stored in the same order. With a gate, the second eight of every sixteen rows are those of up.

If a matrix has few rows, several programs divide the input. They write sums in float32, and `_add_kernel`, grid
(tokens, rows / COLUMNS), adds them in order.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import cdiv
from minillm.kernels.compat import INTERPRETED, dot, finished, has_wgmma, pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit.few_tokens import Float16Activations
from minillm.kernels.linear.low_bit.lanes import codes, eight_weights, load_row, row_factors
from minillm.kernels.linear.low_bit.layouts import GROUP, Layout, LowBit
from minillm.kernels.linear.low_bit.planes import constants_of, planes_of
from minillm.kernels.norm.activation import active

# With fewer tokens `few_tokens` is faster, with more cuBLAS. For gate and up of an 8B model in 8 bits and 256 tokens,
# cuBLAS including dequantization takes 195 us, and this kernel 199 and 231 with the tiles that fit.
_TOKENS, _TOKENS_OF_8_BITS = range(17, 257), range(17, 129)
_PROGRAMS = 132  # programs of the largest tile that run at a time: an H200's multiprocessors
_COLUMNS = 1024


@triton.jit
def joined(values, COUNT: tl.constexpr):
    """Join COUNT tensors ``[lanes]`` in order to one tensor ``[lanes, 2, 2, …]``. COUNT is a power of two."""
    HALF: tl.constexpr = COUNT // 2
    pairs = ()
    for i in tl.static_range(HALF):
        pairs = pairs + (tl.join(values[i], values[HALF + i]),)
    if HALF == 1:
        return pairs[0]
    else:
        return joined(pairs, HALF)


@triton.jit
def unpacked(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """Split words of two 16-bit numbers, ROWS x COLUMNS / 2 of them, into numbers ``[ROWS, COLUMNS]`` of dtype TYPE."""
    words = tl.reshape(words, [ROWS, COLUMNS // 2])
    first = (words & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
    second = (words >> 16).to(tl.int16).to(TYPE, bitcast=True)
    return tl.reshape(tl.join(first, second), [ROWS, COLUMNS])


@triton.jit
def _weights(
    groups, group, BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    TABLE: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Convert the result of `load_row` to the tile of weights ``[ROWS, 128]`` float16.

    Rows are in order. Columns are ordered by word, pair, group and weight, as in `Float16Activations.x` by tokens.
    """
    factors = row_factors(groups, group, SCALES, GROUP, ROWS * 4)
    pairs = ()
    for word in tl.static_range(4):
        pairs = pairs + eight_weights(groups, factors, word, BITS, SCALES, ZERO, TABLE, CODES, ROWS * 4)
    words = tl.reshape(joined(pairs, 16), [ROWS // (16 * WARPS), 2, WARPS, 8, 4, 16])
    return unpacked(tl.permute(words, (0, 2, 1, 3, 5, 4)), ROWS, 128, tl.float16)


@launched
@triton.jit
def _dot_kernel(
    out_ptr, x_ptr, x_scales_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr,
    num_tokens, num_rows, num_groups, num_turns, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A lane's rows: r and, with the higher registers, r + 8 of its warp's sixteen, then those of the next tile.
    lanes = tl.arange(0, ROWS * 4)
    t, r, warp, tile = lanes % 4, lanes // 4 % 8, lanes // 32 % WARPS, lanes // (64 * WARPS)
    sixteen, is_second = tile * WARPS + warp, lanes // (32 * WARPS) % 2
    FEATURES: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * FEATURES
    if GATED:
        lane_rows = tl.minimum(first + sixteen * 8 + r, num_rows - 1) + is_second * num_rows
    else:
        lane_rows = tl.minimum(first + sixteen * 16 + is_second * 8 + r, num_rows - 1)  # rows outside are not stored
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    x_at = tokens[None, :] * (num_turns * 128) + tl.arange(0, 128)[:, None]  # x is padded after the last token
    share = (num_turns + PARTS - 1) // PARTS
    begin = tl.program_id(2) * share
    wait_for_inputs(PDL)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for turn in range(begin, tl.minimum(begin + share, num_turns)):
        x = tl.load(x_ptr + x_at + turn * 128)
        group = tl.minimum(turn * 4 + t, num_groups - 1)  # x has zeros after its end
        groups = load_row(
            levels_ptr, high_ptr, scales_ptr, units_ptr, lane_rows, group, num_groups, BITS, SCALES, GROUP, True
        )
        weights = _weights(groups, group, BITS, SCALES, GROUP, ZERO, TABLE, CODES, ROWS, WARPS)
        total = finished(dot(weights, x, total))
    features = first + tl.arange(0, FEATURES)
    is_feature = features < num_rows
    at = tokens.to(tl.int64)[None, :] * out_stride + features[:, None]
    mask = is_feature[:, None] & is_token[None, :]
    if PARTS > 1:
        tl.store(out_ptr + tl.program_id(2).to(tl.int64) * num_tokens * out_stride + at, total, mask=mask)
    else:
        result = total * tl.load(x_scales_ptr + tokens, mask=is_token, other=0.0)[None, :]
        if GATED:
            both = tl.permute(tl.reshape(result, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1))
            result, up = tl.split(tl.reshape(both, [FEATURES, TOKENS, 2]))
            if BIAS:
                result += tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
                up += tl.load(bias_ptr + num_rows + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
            result = active(result, GATED) * up
        elif BIAS:
            result += tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        if ADD:
            result += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _add_kernel(
    out_ptr, sums_ptr, x_scales_ptr, bias_ptr, num_tokens, num_rows, out_stride,
    ADD: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_rows
    wait_for_inputs(PDL)
    result = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        result += tl.load(sums_ptr + (part * num_tokens + token) * num_rows + columns, mask=mask, other=0.0)
    result *= tl.load(x_scales_ptr + token)
    if BIAS:
        result += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + token * out_stride + columns
    if ADD:
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """The share of a matmul that one program of `_dot_kernel` computes, and its launch options."""

    rows: int  # rows of the matrix: a multiple of 16 for each warp
    tokens: int
    parts: int  # number of programs that divide the input; with a gate 1
    warps: int  # a multiple of 4
    stages: int  # turns in shared memory: the current one, and those loaded ahead


def product(
    x: Float16Activations,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: int = False,
    add: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Compute ``x @ matrix.T + bias``. Write the result to ``out [tokens, out]``, or add it to ``out`` if ``add``.

    ``x`` must be in the order "by tokens": see `Float16Activations`. Rows of ``out`` may be strided.

    If ``gated``, the matrix is gate and up, and the result is ``silu(gate) * up``, ``[tokens, out / 2]``.
    """
    layout, (features, columns) = matrix.layout, matrix.shape
    tokens, num_rows = x.scales.shape[0], features // 2 if gated else features
    rows, width, parts, warps, stages = tile or tile_for(layout, tokens, features, gated)
    levels, high, *small = planes_of(matrix)
    scales, units = (each if each.data_ptr() % 4 == 0 else each.clone() for each in small)  # they are loaded as words
    bias_or_not, options = x.scales if bias is None else bias, pdl_options(out.device)
    sums = out if parts == 1 else torch.empty(parts, tokens, num_rows, dtype=torch.float32, device=out.device)
    _dot_kernel[(cdiv(num_rows, rows // 2 if gated else rows), cdiv(tokens, width), parts)](
        sums, x.x, x.scales, levels, high, scales, units, bias_or_not,
        tokens, num_rows, columns // GROUP, x.x.shape[1] // 128, sums.stride(-2),
        GATED=gated, ADD=add, BIAS=bias is not None, PARTS=parts, **constants_of(matrix), CODES=codes(layout),
        ROWS=rows, TOKENS=width, WARPS=warps, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    if parts > 1:
        _add_kernel[(tokens, cdiv(num_rows, _COLUMNS))](
            out, sums, x.scales, bias_or_not, tokens, num_rows, out.stride(0),
            ADD=add, BIAS=bias is not None, PARTS=parts, COLUMNS=_COLUMNS, **options,
        )  # fmt: skip
    return out


def takes(x: Tensor, matrices: Iterable[LowBit]) -> bool:
    """Return whether this kernel is the fastest for the number of tokens in ``x``, and the GPU has ``wgmma``."""
    has_8_bits = any(matrix.layout.bits == 8 for matrix in matrices)
    if x.shape[0] not in (_TOKENS_OF_8_BITS if has_8_bits else _TOKENS) or x.dtype.itemsize != 2:
        return False
    return has_wgmma(x.device)


def tile_for(layout: Layout, tokens: int, features: int, gated: int) -> Tile:
    """Return the built-in tile, measured on an H200.

    If a matrix has few rows, more programs divide its input, so that every multiprocessor has work.
    """
    if INTERPRETED.value:
        return Tile(64, 16, 1, 4, 2)
    if tokens > 128:
        programs = cdiv(features, 128) * cdiv(tokens, 256)
        parts = 1 if gated or programs * 2 > _PROGRAMS else 2 if programs * 4 > _PROGRAMS else 4
        is_wide = layout.bits == 8 or (layout.bits, layout.scales) == (5, "super")  # three turns do not fit
        return Tile(128, 256, parts, 8, 2 if is_wide else 3)
    parts = parts_for(features, gated)
    if tokens > 64:
        return Tile(128, 128, parts, 8, 3)
    if tokens > 32 and parts == 1:
        return Tile(128, 64, 1, 4, 4)
    # Three programs of three stages fit instead of two of four.
    stages = 3 if tokens > 32 and cdiv(features, 64) * parts > 2 * _PROGRAMS else 4
    return Tile(64, 32 if tokens <= 32 else 64, parts, 4, stages)


def parts_for(features: int, gated: int) -> int:
    """Return the number of programs that divide the input's columns among them, for matmuls of at most 128 tokens.

    This number depends only on the matrix.
    """
    return 1 if gated or features >= 12288 else 4
