"""A small weight times 3 to 16 tokens, by the matrix unit; the norm in front or the addition behind may be fused.

For so many tokens the multiplications of `kernels.linear.matvec` take longer than memory does, and cuBLAS takes 4 us
for the smallest product, and a norm or a gate beside it 2 more. So a program has whole rows of the weight, which it
asks for before it waits for the kernel in front (programmatic dependent launch). Each of its warps multiplies a part
of the columns; their sums come together once, at the end. The norm costs no pass of its own: ``sum(x^2)`` is collected
beside the product and applied to its result.

Grid: (out features / ROWS, tokens / 8). Tiles: PARTS x ROWS x DEPTH weights and PARTS x ROWS x REST, a warp for each
part, by 8 tokens, the matrix unit's narrowest operand; two powers of two waste little of what columns there are. Bytes:
the weight, once for each 8 tokens, of which the second finds it in the L2; the tokens, once for each program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import dot, has_large_shared_memory, pdl_options, wait_for_inputs

MOST_TOKENS = 16
_FEWEST = 3  # with two, `matvec` is faster
# Tokens, at most -> (out features, in features) -> (ROWS, PARTS): on an H200 in a chain of whole layers. It counts how
# many programs ask for the same tokens at once: with half as many a product may take two thirds of the time.
_AT_MOST_4 = {(960, 576): (32, 4), (576, 576): (16, 4), (3072, 576): (64, 2), (576, 1536): (16, 4)}
TILES: dict[int, dict[tuple[int, int], tuple[int, int]]] = {4: _AT_MOST_4, 16: {**_AT_MOST_4, (576, 1536): (8, 4)}}
_TOKENS = tl.constexpr(8)
_LARGEST = 5_000_000  # elements of a weight; with larger ones cuBLAS is as fast
_LARGEST_OF_LONG_ROWS, _LONG, _LONGEST = 2_500_000, 1536, 4096  # columns
_DEEPEST, _NARROWEST = 256, 16  # columns of a warp's tile


@triton.jit
def _tile(ptr, rows, columns, num_rows, num_columns):
    """A tile ``[parts, rows, depth]`` of a matrix, for ``rows`` and ``columns [parts, depth]``; zeros outside."""
    mask = (rows < num_rows)[None, :, None] & (columns < num_columns)[:, None, :]
    at = ptr + rows.to(tl.int64)[None, :, None] * num_columns + columns[:, None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _fold(sums, squares, x, weights, norm, NORM: tl.constexpr):
    """Add a tile's products ``[parts, rows, tokens]`` and its inputs' squares ``[parts, tokens]``."""
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=2)
        x = (wide * norm.to(tl.float32)[:, None, :]).to(x.dtype)
    return dot(weights, tl.permute(x, (0, 2, 1)), sums), squares, x


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    out_ptr, x_ptr, weight_ptr, norm_ptr, bias_ptr, num_tokens, num_rows, num_columns, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    part = tl.arange(0, PARTS)[:, None]
    columns = part * DEPTH + tl.arange(0, DEPTH)[None, :]
    up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
    weights = _tile(weight_ptr, rows, columns, num_rows, num_columns)
    norm = part
    if GATED:
        up_weights = _tile(up_ptr, rows, columns, num_rows, num_columns)
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=columns < num_columns, other=0.0)
    if REST > 0:
        rest = PARTS * DEPTH + part * REST + tl.arange(0, REST)[None, :]
        rest_weights = _tile(weight_ptr, rows, rest, num_rows, num_columns)
        rest_norm = part
        if GATED:
            rest_up_weights = _tile(up_ptr, rows, rest, num_rows, num_columns)
        if NORM:
            rest_norm = tl.load(norm_ptr + rest, mask=rest < num_columns, other=0.0)
    tokens = tl.program_id(1) * _TOKENS + tl.arange(0, _TOKENS)
    at = out_ptr + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    mask = is_row[:, None] & (tokens < num_tokens)[None, :]
    wait_for_inputs(PDL)
    x = _tile(x_ptr, tokens, columns, num_tokens, num_columns)
    if REST > 0:
        rest_x = _tile(x_ptr, tokens, rest, num_tokens, num_columns)
    if ADD:  # asked for in time
        residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    squares = tl.zeros([PARTS, _TOKENS], tl.float32)
    sums = tl.zeros([PARTS, ROWS, _TOKENS], tl.float32)
    up_sums = sums
    sums, squares, x = _fold(sums, squares, x, weights, norm, NORM)
    if GATED:
        up_sums = dot(up_weights, tl.permute(x, (0, 2, 1)), up_sums)
    if REST > 0:
        sums, squares, rest_x = _fold(sums, squares, rest_x, rest_weights, rest_norm, NORM)
        if GATED:
            up_sums = dot(rest_up_weights, tl.permute(rest_x, (0, 2, 1)), up_sums)
    total = tl.sum(sums, axis=0)
    up_total = total
    if GATED:
        up_total = tl.sum(up_sums, axis=0)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / num_columns + eps)[None, :]
        total *= scale
        up_total *= scale
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total * tl.sigmoid(total) * up_total
    if ADD:
        total += residual
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def takes(num_tokens: int, weight: Tensor) -> bool:
    """Whether this is the fastest way to multiply a weight ``[out, in]`` with this many tokens."""
    return _FEWEST <= num_tokens <= MOST_TOKENS and is_small(weight)


def is_small(weight: Tensor) -> bool:
    """Whether a weight ``[out, in]`` of bfloat16 is so small that its products take as long as launches do.

    Float16 cannot hold numbers as large as an input times its norm's weights may be, before they are divided.
    """
    longest = _LONGEST if has_large_shared_memory(weight.device) else _LONG
    columns = weight.shape[-1]
    largest = _LARGEST if columns <= _LONG else _LARGEST_OF_LONG_ROWS
    return weight.dtype == torch.bfloat16 and columns <= longest and weight.numel() <= largest


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None = None,
    *,
    gated: bool = False,
    add: bool = False,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """Any product of `minillm.kernels.linear.matvec` for which `takes` holds, by ``tile`` (rows, warps)."""
    norm_weight, eps = norm or (x, 0.0)
    tokens, columns = x.shape
    num_rows = weight.shape[0] // 2 if gated else weight.shape[0]
    rows, warps = tile or _tile_for(x, weight, gated=gated)
    depth, rest = _depths(triton.cdiv(columns, warps))
    _few_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(tokens, _TOKENS.value))](
        out, x, weight, norm_weight, x if bias is None else bias, tokens, num_rows, columns, eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None,
        ROWS=rows, PARTS=warps, DEPTH=depth, REST=rest, num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _depths(columns: int) -> tuple[int, int]:
    """So many columns of a warp as two powers of two, of which the second may be 0."""
    depth = max(_NARROWEST, min(_DEEPEST, 1 << columns.bit_length() - 1))
    left = max(0, columns - depth)
    return depth, max(_NARROWEST, triton.next_power_of_2(left)) if left else 0


def _tile_for(x: Tensor, weight: Tensor, *, gated: bool) -> tuple[int, int]:
    """The recorded tile, or one as was good with a model of 360 million weights, if shared memory has room for it."""
    tokens, columns = x.shape
    recorded = TILES[4 if tokens <= 4 else 16].get((weight.shape[0], columns))
    if recorded is not None:
        rows, warps = recorded
    elif gated:
        rows, warps = (32 if tokens <= 8 else 16), 4
    else:
        rows, warps = (16 if columns <= 1024 else 8), 4 if columns <= 768 else 8
    room = (200 if has_large_shared_memory(x.device) else 80) << 10
    while rows > 8 and (rows * (2 if gated else 1) + 8) * warps * sum(_depths(triton.cdiv(columns, warps))) * 2 > room:
        rows //= 2
    return rows, warps
