"""FP8 matrix-vector kernel for one token, for matrices with long rows or a gate.

Grid: (out features / ROWS). Tile: ROWS x COLUMNS weights, 16 bytes per load; the next tile loads while one is
multiplied. Bytes: the matrix, once. Weights are converted to float32 in registers, so x is not quantized.

An FP8 weight has half the bytes of a 16-bit weight, so its instructions must take half the time. Therefore a thread
sums its own weights from tile to tile, and the threads' sums are combined once, at the end. (`matvec` combines the sums
for every tile. A weight of a long row takes 4.2 instructions there, 3.5 here, and a program's warps wait for each
other.) With short rows and no gate, and with two tokens, `matvec` is faster.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Norm, cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, readable, wait_for_inputs, widen
from minillm.kernels.launch import launched
from minillm.kernels.linear.low_bit.layouts import LowBit
from minillm.kernels.linear.matvec import load_weights
from minillm.kernels.norm.activation import active

_SHORT = 4096  # maximum columns of a short row
_RUN = tl.constexpr(16)  # weights per load


@triton.jit
def _sums(weights, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply a tile of weights by ``x [columns]``, and add within each thread: ``[rows, columns / _RUN]``."""
    return tl.sum(tl.reshape(widen(weights) * x[None, :], [ROWS, COLUMNS // _RUN, _RUN]), axis=2)


@launched
@triton.jit
def _product_kernel(
    out_ptr, x_ptr, weight_ptr, scales_ptr, norm_ptr, bias_ptr, num_rows, num_columns, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    lanes = tl.arange(0, COLUMNS)
    weights = load_weights(weight_ptr, rows, lanes, num_rows, num_columns)
    up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
    up_weights = weights
    if GATED:
        up_weights = load_weights(up_ptr, rows, lanes, num_rows, num_columns)
    wait_for_inputs(PDL)
    squares = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS // _RUN], tl.float32)
    up_total = total
    for tile in tl.static_range(NUM_TILES):
        columns = tile * COLUMNS + lanes
        is_column = columns < num_columns
        x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        now, up_now = weights, up_weights
        if tile + 1 < NUM_TILES:
            weights = load_weights(weight_ptr, rows, columns + COLUMNS, num_rows, num_columns)
        total += _sums(now, x, ROWS, COLUMNS)
        if GATED:
            if tile + 1 < NUM_TILES:
                up_weights = load_weights(up_ptr, rows, columns + COLUMNS, num_rows, num_columns)
            up_total += _sums(up_now, x, ROWS, COLUMNS)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / num_columns + eps)
    result = tl.sum(total, axis=1) * scale * tl.load(scales_ptr + rows, mask=is_row, other=0.0)
    if BIAS:
        result += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_total, axis=1) * scale * tl.load(scales_ptr + num_rows + rows, mask=is_row, other=0.0)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
        result = active(result, GATED) * up
    at = out_ptr + rows
    if ADD:
        result += tl.load(at, mask=is_row, other=0.0).to(tl.float32)
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=is_row)


def takes(tokens: int, matrix: LowBit, *, gated: int = False) -> bool:
    """Return whether this kernel is the fastest for the matrix and this number of tokens."""
    return tokens == 1 and (bool(gated) or matrix.shape[1] > _SHORT)


def product(
    x: Tensor,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None = None,
    *,
    gated: int = False,
    add: bool = False,
) -> Tensor:
    """Compute ``x [1, in] @ matrix.T + bias``. Write the result to ``out [1, out]``, or add it if ``add``.

    Args:
        norm: weight and eps of an RMSNorm of x before the matmul.
        gated: the matrix is gate and up, and the result is ``silu(gate) * up``, ``[1, out / 2]``.
    """
    features, columns = matrix.shape
    num_rows = features // 2 if gated else features
    rows, widest = (4, 4096) if gated else (8, 2048)  # fastest in an 8B model on an H100
    width = min(widest, max(_RUN.value, next_power_of_2(columns)))
    weight, eps = norm or (x, 0.0)
    _product_kernel[(cdiv(num_rows, rows),)](
        out, x, readable(matrix.levels), matrix.scales, weight, x if bias is None else bias, num_rows, columns, eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None,
        ROWS=rows, COLUMNS=width, NUM_TILES=cdiv(columns, width),
        num_warps=max(1, width * 4 // widest), **pdl_options(x.device),
    )  # fmt: skip
    return out
