"""A matrix of FP8 times the activations of a token, or of two; norm, gate and addition fused as in `matvec`.

Grid: (out features / ROWS). Tile: ROWS x COLUMNS weights, 16 bytes a load, the next one on its way while one is
multiplied. Bytes: the matrix, once. Weights become float32 in registers, so x keeps its bits.

Half the bytes leave half the time for a weight's instructions. So a thread adds up its own weights, from one tile to
the next, and the threads' sums come together once, at the end. (In `matvec` they do so for every tile: a weight of a
long row would take 4.2 instructions, where it takes 3.5 here, and a program's warps would wait for each other.)
"""

# ruff: noqa: RUF005 (Triton adds tuples and unpacks none)

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import pdl_options, readable, wait_for_inputs, widen
from minillm.kernels.low_bit import LowBit

Norm = tuple[Tensor, float]  # weight, eps
MOST_TOKENS = 2
_RUN = tl.constexpr(16)  # weights of a load


@triton.jit
def _load(weight_ptr, rows, columns, num_rows, num_columns):
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = weight_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")  # read once: it pushes nothing out


@triton.jit
def _sums(weights, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Products ``[rows, columns / _RUN]`` of weights and ``x [columns]``, summed within a thread."""
    return tl.sum(tl.reshape(widen(weights) * x[None, :], [ROWS, COLUMNS // _RUN, _RUN]), axis=2)


@triton.jit
def _product_kernel(
    out_ptr, x_ptr, weight_ptr, scales_ptr, norm_ptr, bias_ptr, num_rows, num_columns, x_stride, out_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    lanes = tl.arange(0, COLUMNS)
    up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
    weights = _load(weight_ptr, rows, lanes, num_rows, num_columns)
    up_weights = weights
    if GATED:
        up_weights = _load(up_ptr, rows, lanes, num_rows, num_columns)
    wait_for_inputs(PDL)
    zeros = tl.zeros([ROWS, COLUMNS // _RUN], tl.float32)
    totals, up_totals, squares = (), (), ()
    for _ in tl.static_range(TOKENS):
        totals, up_totals = totals + (zeros,), up_totals + (zeros,)
        squares = squares + (tl.zeros([COLUMNS], tl.float32),)
    for tile in tl.static_range(NUM_TILES):
        columns = tile * COLUMNS + lanes
        is_column = columns < num_columns
        norm = 1.0
        if NORM:
            norm = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        inputs, all_squares = (), ()
        for token in tl.static_range(TOKENS):
            x = tl.load(x_ptr + token * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
            all_squares = all_squares + (squares[token] + x * x,)
            inputs = inputs + (x * norm,)
        now, up_now = weights, up_weights
        if tile + 1 < NUM_TILES:
            weights = _load(weight_ptr, rows, columns + COLUMNS, num_rows, num_columns)
        sums, up_sums = (), ()
        for token in tl.static_range(TOKENS):
            sums = sums + (totals[token] + _sums(now, inputs[token], ROWS, COLUMNS),)
        if GATED:
            if tile + 1 < NUM_TILES:
                up_weights = _load(up_ptr, rows, columns + COLUMNS, num_rows, num_columns)
            for token in tl.static_range(TOKENS):
                up_sums = up_sums + (up_totals[token] + _sums(up_now, inputs[token], ROWS, COLUMNS),)
        totals, up_totals, squares = sums, up_sums, all_squares
    scales = tl.load(scales_ptr + rows, mask=is_row, other=0.0)
    up_scales = scales
    if GATED:
        up_scales = tl.load(scales_ptr + num_rows + rows, mask=is_row, other=0.0)
    for token in tl.static_range(TOKENS):
        norm_scale = 1.0
        if NORM:
            norm_scale = tl.rsqrt(tl.sum(squares[token], axis=0) / num_columns + eps)
        total = tl.sum(totals[token], axis=1) * norm_scale * scales
        if BIAS:
            total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up_totals[token], axis=1) * norm_scale * up_scales
            if BIAS:
                up += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
            total = total * tl.sigmoid(total) * up
        at = out_ptr + token * out_stride + rows
        if ADD:
            total += tl.load(at, mask=is_row, other=0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_row)


def product(
    x: Tensor,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    """``x @ matrix.T + bias``, written to ``out [tokens, out]``, or added to it.

    Args:
        x: ``[tokens, in]``, at most `MOST_TOKENS`, whose rows may lie apart.
        norm: weight and eps of an RMSNorm of x in front.
        gated: the matrix is gate and up, and ``silu(gate) * up`` is the result, ``[tokens, out / 2]``.
    """
    (tokens, columns), features = x.shape, matrix.shape[0]
    num_rows = features // 2 if gated else features
    rows, width, warps = tile_for(tokens, columns, gated=gated)
    weight, eps = norm or (x, 0.0)
    _product_kernel[(triton.cdiv(num_rows, rows),)](
        out, x, readable(matrix.levels), matrix.scales, weight, x if bias is None else bias,
        num_rows, columns, x.stride(0), out.stride(0), eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None, TOKENS=tokens,
        ROWS=rows, COLUMNS=width, NUM_TILES=triton.cdiv(columns, width), num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def tile_for(tokens: int, columns: int, *, gated: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps. Measured within an 8B model on an H100."""
    rows, widest = (4, 4096) if gated and tokens == 1 else (8 if tokens == 1 else 2 if gated else 4, 2048)
    width = min(widest, max(_RUN.value, triton.next_power_of_2(columns)))
    return rows, width, max(1, width * 4 // widest)
