"""Dequantize low-bit matrices, or some of their rows, for embeddings and for cuBLAS.

`_dequantize_kernel`: grid (rows / ROWS, groups / GROUPS). It reads the whole matrix or some rows, and writes
dequantized weights. `_widen_kernel` does the same for FP8; its grid is (rows, columns / COLUMNS).
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, readable, wait_for_inputs, widen
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit.layouts import FP8, GROUP, LowBit
from minillm.kernels.linear.low_bit.planes import constants_of, level_bytes, load_factors, load_levels, planes_of


@triton.jit
def _bytes(words):
    """Convert the signed bytes of words ``[rows, groups, 4]`` to float32, ``[rows, groups, 4, 2, 2]``, in the weights'
    order.
    """
    first = ((words << 24) >> 24).to(tl.float32)
    second = ((words << 16) >> 24).to(tl.float32)
    third = ((words << 8) >> 24).to(tl.float32)
    fourth = (words >> 24).to(tl.float32)
    return tl.join(tl.join(first, second), tl.join(third, fourth))


@triton.jit
def _weights(levels, factors, ROWS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Dequantize the result of `load_levels` with that of `load_factors`: ``[rows, groups * 32]`` float32."""
    low, upper = level_bytes(levels[0], levels[1], levels[2], BITS, TABLE)
    first_scale, second_scale, zero, offset = factors
    zero, offset = zero[:, :, None, None, None], offset[:, :, None, None, None]
    is_first = (tl.arange(0, 4) < 2)[None, None, :]  # words of a group's first 16 weights
    scale = tl.where(is_first, first_scale[:, :, None], second_scale[:, :, None])[:, :, :, None, None]
    both = tl.join(scale * (_bytes(low) - zero) + offset, scale * (_bytes(upper) - zero) + offset)
    return tl.reshape(tl.permute(both, (0, 1, 2, 5, 3, 4)), [ROWS, GROUPS * 32])


@launched
@triton.jit
def _dequantize_kernel(
    out_ptr, index_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, num_out, num_rows, num_groups,
    INDEXED: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_place = places < num_out
    rows = places
    if INDEXED:
        rows = tl.load(index_ptr + places, mask=is_place, other=0).to(tl.int32)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    levels = load_levels(levels_ptr, high_ptr, rows, groups, num_rows, num_groups, BITS)
    factors = load_factors(scales_ptr, units_ptr, rows, groups, num_rows, num_groups, SCALES, GROUP, ZERO)
    weights = _weights(levels, factors, ROWS, GROUPS, BITS, TABLE)
    columns = tl.program_id(1) * GROUPS * 32 + tl.arange(0, GROUPS * 32)
    mask = is_place[:, None] & (columns < num_groups * 32)[None, :]
    at = places.to(tl.int64)[:, None] * num_groups * 32 + columns[None, :]
    tl.store(out_ptr + at, weights.to(out_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _widen_kernel(
    out_ptr, index_ptr, levels_ptr, scales_ptr, num_columns,
    INDEXED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if INDEXED:
        row = tl.load(index_ptr + place).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_columns
    weights = widen(tl.load(levels_ptr + row * num_columns + columns, mask=mask, other=0.0)) * tl.load(scales_ptr + row)
    tl.store(out_ptr + place * num_columns + columns, weights.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(matrix: LowBit, out: Tensor, index: Tensor | None = None) -> Tensor:
    """Write dequantized rows to ``out [rows, in]``, which is contiguous: all rows, or rows ``index [rows]`` if given.

    Columns are in the matrix's own order.
    """
    num_rows, columns = matrix.shape
    if matrix.layout == FP8:
        width = min(2048, next_power_of_2(columns))
        _widen_kernel[(out.shape[0], cdiv(columns, width))](
            out, matrix.scales if index is None else index, readable(matrix.levels), matrix.scales, columns,
            INDEXED=index is not None, COLUMNS=width, **pdl_options(out.device),
        )  # fmt: skip
        return out
    rows = 1 if index is not None else 16
    groups = min(16, next_power_of_2(columns // GROUP))
    _dequantize_kernel[(cdiv(out.shape[0], rows), cdiv(columns // GROUP, groups))](
        out, matrix.levels if index is None else index, *planes_of(matrix), out.shape[0], num_rows, columns // GROUP,
        INDEXED=index is not None, **constants_of(matrix), ROWS=rows, GROUPS=groups,
        num_warps=1 if index is not None else 4, **pdl_options(out.device),
    )  # fmt: skip
    return out
