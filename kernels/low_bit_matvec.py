"""A low-bit matrix times the activations of a token, or of a few; norm, gate and addition fused as in `matvec`.

Products are sums of bytes (``dp4a``), so activations become whole numbers first: 16 bits in groups of 32 with one
scale, as two planes of bytes. With 8 bits, as llama.cpp has them, the next token's distribution differs by a KL of 3e-3
on the default model; with 16 by 1e-7, for half as many instructions again.

`quantise_activations`: grid (spans of 1,024 elements, tokens). `_product_kernel`: as many programs as run at a time,
each of which takes ROWS whole rows after another and keeps x in registers; the next rows' weights are on their way
while these are multiplied, and the first rows' before the program waits for the kernel in front of it. Bytes: the
matrix, once.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import INTERPRETED, pdl_options, wait_for_inputs
from minillm.kernels.low_bit import GROUP, LowBit, bucket
from minillm.kernels.low_bit_tiles import constants_of, dot4, level_bytes, load_factors, load_levels, planes_of

MOST_TOKENS = 2
_SPAN = 1024
_LARGEST = tl.constexpr(127 * 256 + 127)  # as two bytes, both of which are signed


class Activations(NamedTuple):
    """Activations ``[tokens, in]`` in whole numbers: ``scale * (256 * first plane + second plane)``."""

    planes: Tensor  # [tokens, 2, in / 4] int32, four neighbours a word
    factors: Tensor  # [tokens, in / 32, 3] float32: the scale, and the sums of each half of the group
    squares: Tensor  # [tokens, spans] float32: parts of the sum of squares, from before the norm's weight


@triton.jit
def _quantise_kernel(
    planes_ptr, factors_ptr, squares_ptr, x_ptr, norm_ptr, num_columns, num_spans,
    NORM: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    span, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = span * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = columns < num_columns
    x = tl.load(x_ptr + token * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        tl.store(squares_ptr + token * num_spans + span, tl.sum(tl.sum(x * x, 1), 0))
        x *= tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    # NaN and infinity, which no whole number holds, make the scale NaN.
    scale = tl.max(tl.abs(x), 1) / _LARGEST + 0.0 * tl.sum(x, 1)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    level = tl.floor(x * inverse[:, None] + 0.5).to(tl.int32)
    upper = (level + 128) >> 8
    lower = level - (upper << 8)
    is_group = groups < num_columns // 32
    factor_at = factors_ptr + (token * (num_columns // 32) + groups) * 3
    halves = tl.sum(tl.reshape(level, [GROUPS, 2, 16]), 2).to(tl.float32) * scale[:, None]
    tl.store(factor_at, scale, mask=is_group)
    tl.store(factor_at[:, None] + 1 + tl.arange(0, 2)[None, :], halves, mask=is_group[:, None])
    # As levels are: see `minillm.kernels.low_bit`. Words of the first four of eight come first.
    neighbours, fours = tl.arange(0, 4), tl.arange(0, 8)
    shifts = (16 * (neighbours % 2) + 8 * (neighbours // 2))[None, None, :]
    words = groups[:, None] * 8 + (4 * (fours % 2) + fours // 2)[None, :]
    at = planes_ptr + token * 2 * (num_columns // 4) + words
    upper_words = tl.sum((tl.reshape(upper, [GROUPS, 8, 4]) & 255) << shifts, 2)
    tl.store(at, upper_words, mask=is_group[:, None])
    lower_words = tl.sum((tl.reshape(lower, [GROUPS, 8, 4]) & 255) << shifts, 2)
    tl.store(at + num_columns // 4, lower_words, mask=is_group[:, None])


def quantise_activations(x: Tensor, norm_weight: Tensor | None = None) -> Activations:
    """Turn ``x [tokens, in]`` into whole numbers; with a norm's weight, multiplied by it and without its scale."""
    tokens, columns = x.shape
    spans = triton.cdiv(columns, _SPAN)
    planes = torch.empty(tokens, 2, columns // 4, dtype=torch.int32, device=x.device)
    factors = torch.empty(tokens, columns // GROUP, 3, dtype=torch.float32, device=x.device)
    squares = torch.empty(tokens, spans, dtype=torch.float32, device=x.device)
    _quantise_kernel[(spans, tokens)](
        planes, factors, squares, x, x if norm_weight is None else norm_weight, columns, spans,
        NORM=norm_weight is not None, GROUPS=_SPAN // GROUP, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return Activations(planes, factors, squares)


@triton.jit
def _load_x(planes_ptr, factors_ptr, groups, num_groups):
    """One token's planes, four times ``[1, groups, 4]``, and its scales and sums, three times ``[1, groups]``."""
    mask = (groups < num_groups)[None, :, None]
    at = planes_ptr + (groups * 8)[None, :, None] + tl.arange(0, 4)[None, None, :]
    lower = at + num_groups * 8
    factors = factors_ptr + (groups * 3)[None, :]
    is_group = (groups < num_groups)[None, :]
    return (
        tl.load(at, mask=mask, other=0),
        tl.load(at + 4, mask=mask, other=0),
        tl.load(lower, mask=mask, other=0),
        tl.load(lower + 4, mask=mask, other=0),
        tl.load(factors, mask=is_group, other=0.0),
        tl.load(factors + 1, mask=is_group, other=0.0),
        tl.load(factors + 2, mask=is_group, other=0.0),
    )


@triton.jit
def _tile_product(
    levels, factors, x, BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr
):
    """``[rows]``: the product of whole rows with one token."""
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


@triton.jit
def _product_kernel(
    out_ptr, planes_ptr, x_factors_ptr, squares_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr,
    num_rows, num_groups, num_spans, out_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The rows of the second matrix, where there is one, follow those of the first.
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
    wait_for_inputs(PDL)
    x = _load_x(planes_ptr, x_factors_ptr, groups, num_groups)
    token_index = tl.arange(0, TOKENS)
    norm_scale = tl.full([1, TOKENS], 1.0, tl.float32)
    if NORM:
        spans = tl.arange(0, SPANS)
        squares_at = squares_ptr + token_index[:, None] * num_spans + spans[None, :]
        squares = tl.sum(tl.load(squares_at, mask=(spans < num_spans)[None, :], other=0.0), 1)
        norm_scale = tl.rsqrt(squares / (num_groups * 32) + eps)[None, :]
    for row in range(first_row, num_rows, tl.num_programs(0) * ROWS):
        rows = row + lanes
        following = rows + tl.num_programs(0) * ROWS
        # The next rows are on their way while these are multiplied.
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
        at = out_ptr + token_index[None, :].to(tl.int64) * out_stride + rows[:, None]
        totals = tl.zeros([ROWS, TOKENS], tl.float32)
        up_totals, before = totals, totals
        if ADD:  # asked for here, it is there when the sums are
            before = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
        for token in tl.static_range(TOKENS):
            if TOKENS > 1:
                x = _load_x(
                    planes_ptr + token * num_groups * 16, x_factors_ptr + token * num_groups * 3, groups, num_groups
                )
            is_token = token_index[None, :] == token
            part = _tile_product(levels, factors, x, BITS, SCALES, GROUP, TABLE)
            totals += tl.where(is_token, part[:, None], 0.0)
            if GATED:
                part = _tile_product(up_levels, up_factors, x, BITS, SCALES, GROUP, TABLE)
                up_totals += tl.where(is_token, part[:, None], 0.0)
        totals *= norm_scale
        up_totals *= norm_scale
        if BIAS:
            totals += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_totals += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            totals = totals * tl.sigmoid(totals) * up_totals
        if ADD:
            totals += before
        tl.store(at, totals.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
        levels, factors, up_levels, up_factors = next_levels, next_factors, next_up_levels, next_up_factors


def takes(num_tokens: int, matrix: LowBit) -> bool:
    """Whether these kernels are the fastest way to multiply a matrix with this many tokens."""
    return num_tokens <= MOST_TOKENS


def product(
    x: Activations,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    *,
    eps: float | None = None,
    gated: bool = False,
    add: bool = False,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """``x @ matrix.T + bias``, written to ``out [tokens, out]``, whose rows may lie apart, or added to it.

    Args:
        eps: of the RMSNorm whose weight `quantise_activations` was given; None: no norm.
        gated: the matrix is gate and up, and ``silu(gate) * up`` is the result, ``[tokens, out / 2]``.
        tile: rows and warps of a program, and programs of a multiprocessor.
    """
    features, columns = matrix.shape
    tokens, groups = x.planes.shape[0], columns // GROUP
    num_rows = features // 2 if gated else features
    rows, warps, programs = tile or matrix.tiles.get(bucket(tokens)) or tile_for(groups, num_rows)
    grid = (min(triton.cdiv(num_rows, rows), programs * _processors(out.device)),)
    spans = x.squares.shape[1]
    # Triton wants powers of two: three tokens are three launches.
    for token in range(tokens) if tokens & (tokens - 1) else (None,):
        part = x if token is None else Activations(*(each[token : token + 1] for each in x))
        _product_kernel[grid](
            out if token is None else out[token : token + 1], *part, *planes_of(matrix),
            matrix.scales if bias is None else bias,
            num_rows, groups, spans, out.stride(0), eps or 0.0,
            NORM=eps is not None, GATED=gated, ADD=add, BIAS=bias is not None, TOKENS=part.planes.shape[0],
            **constants_of(matrix), ROWS=rows, GROUPS=triton.next_power_of_2(groups),
            SPANS=triton.next_power_of_2(spans), num_warps=warps, **pdl_options(out.device),
        )  # fmt: skip
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tile_for(groups: int, rows: int) -> tuple[int, int, int]:
    """Rows and warps of a program, and programs of a multiprocessor; measured on an H200."""
    if INTERPRETED.value:
        return 64, 4, 1
    lanes = triton.next_power_of_2(groups)
    if lanes > 256:
        return 2, lanes // 64, 2
    if lanes > 128:
        return 1, 4, 8
    if lanes < 128:
        return 1, 1, 16
    if rows > 100_000:
        return 1, 4, 8
    return (1, 2, 8) if rows > 8192 else (2, 2, 6)
