"""A weight matrix times one token's activations; the norm before it or the addition behind it may be fused.

    matvec             y = W x + b
    norm_matvec        y = W rms_norm(x) + b
    norm_gated_matvec  y = silu(G rms_norm(x)) * (U rms_norm(x))     G, U: the halves of the packed projection
    matvec_add         residual += W x + b

Batch size 1 is what a person at a chat waits for, and there a layer is four such products and little else. Bytes: the
weight, once; the rest is nothing. So a launch is as fast as memory if enough loads are in flight all the time, also
while one kernel ends and the next one begins: a program asks for its first tile of weights, which depend on nothing,
*before* it waits for the kernel in front of it (programmatic dependent launch, compute capability 9.0 and later).

Grid: (out features / ROWS). Tile: ROWS x COLUMNS weights, 16 bytes a load; most rows fit into one tile. The norm costs
no pass of its own: ``sum(x^2)`` is collected beside the product and applied to its result, for it is one factor.
Arithmetic is float32 throughout; unlike `norm` and `linear` apart, nothing is rounded between them.

`TILES` is measured: ``minillm bench matvec`` prints it anew. Other shapes go by `_tile_for`.

Reference: `kernels.reference.norm_linear`, `norm_gated_linear`, `linear_add`; of `matvec`, torch's own linear.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.compat import pdl_options, wait_for_inputs

# (out features, in features) -> (ROWS, COLUMNS, warps), measured on an H200 with a cold L2.
TILES: dict[tuple[int, int], tuple[int, int, int]] = {
    (960, 576): (4, 1024, 4),
    (576, 576): (4, 1024, 4),
    (3072, 576): (4, 1024, 2),
    (576, 1536): (4, 2048, 8),
    (49152, 576): (8, 256, 2),
    (3072, 2048): (4, 1024, 4),
    (2048, 2048): (4, 2048, 8),
    (16384, 2048): (4, 512, 2),
    (2048, 8192): (4, 2048, 8),
    (128256, 2048): (4, 1024, 4),
    (6144, 4096): (4, 2048, 4),
    (4096, 4096): (8, 1024, 8),
    (28672, 4096): (2, 4096, 4),
    (4096, 14336): (4, 1024, 2),
    (128256, 4096): (4, 4096, 4),
    # the 8b's on two ranks, then on four
    (3072, 4096): (4, 2048, 2),
    (4096, 2048): (8, 1024, 8),
    (14336, 4096): (2, 4096, 4),
    (4096, 7168): (8, 1024, 4),
    (64128, 4096): (4, 4096, 4),
    (1536, 4096): (4, 4096, 4),
    (4096, 1024): (8, 1024, 8),
    (7168, 4096): (2, 1024, 2),
    (4096, 3584): (8, 1024, 8),
    (32064, 4096): (4, 4096, 4),
}


@triton.jit
def _load_weights(weight_ptr, rows, columns, num_rows, num_columns):
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    # Each weight is read once: it should not push out of the cache what is read again.
    return tl.load(weight_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _matvec_kernel(
    out_ptr, x_ptr, weight_ptr, norm_ptr, bias_ptr, num_rows, num_columns, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    lanes = tl.arange(0, COLUMNS)
    weights = _load_weights(weight_ptr, rows, lanes, num_rows, num_columns)
    if GATED:
        up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
        up_weights = _load_weights(up_ptr, rows, lanes, num_rows, num_columns)
    wait_for_inputs(PDL)
    total = tl.zeros([ROWS], tl.float32)
    up_total = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for tile in tl.static_range(TILES):
        columns = tile * COLUMNS + lanes
        x = tl.load(x_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        total += tl.sum(weights.to(tl.float32) * x[None, :], axis=1)
        if GATED:
            up_total += tl.sum(up_weights.to(tl.float32) * x[None, :], axis=1)
        if tile + 1 < TILES:
            following = (tile + 1) * COLUMNS + lanes
            weights = _load_weights(weight_ptr, rows, following, num_rows, num_columns)
            if GATED:
                up_weights = _load_weights(up_ptr, rows, following, num_rows, num_columns)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / num_columns + eps)
        total *= scale
        up_total *= scale
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            up_total += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        total = total * tl.sigmoid(total) * up_total
    if ADD:
        total += tl.load(out_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), mask=is_row)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``weight @ x + bias``, ``[1, out]``, of x ``[1, in]`` and weight ``[out, in]``, contiguous.

    Raises:
        ValueError: wrong shape or layout.
    """
    _check(x, weight)
    out = x.new_empty(1, weight.shape[0])
    launch(out, x, weight, bias, None, 0.0, gated=False, add=False)
    return out


def norm_matvec(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``weight @ rms_norm(x) + bias``, ``[1, out]``: see `reference.norm_linear`.

    Args:
        x: ``[1, in]``; weight: ``[out, in]``, contiguous.

    Raises:
        ValueError: wrong shape or layout.
    """
    _check(x, weight)
    out = x.new_empty(1, weight.shape[0]) if out is None else out
    launch(out, x, weight, bias, norm_weight, eps, gated=False, add=False)
    return out


def norm_gated_matvec(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` with ``gate, up = weight @ rms_norm(x) + bias``, ``[1, out / 2]``.

    See `reference.norm_gated_linear`.

    Raises:
        ValueError: wrong shape or layout.
    """
    _check(x, weight)
    out = x.new_empty(1, weight.shape[0] // 2)
    launch(out, x, weight, bias, norm_weight, eps, gated=True, add=False)
    return out


def matvec_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual += weight @ x + bias``, ``[1, out]``, in place: see `reference.linear_add`.

    Raises:
        ValueError: wrong shape or layout.
    """
    _check(x, weight)
    launch(residual, x, weight, bias, None, 0.0, gated=False, add=True)
    return residual


def _check(x: Tensor, weight: Tensor) -> None:
    if x.shape != (1, weight.shape[1]) or x.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError(
            f"a matvec takes [1, {weight.shape[1]}] and a contiguous weight of its dtype, "
            f"not {x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    *,
    gated: bool,
    add: bool,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """Any of the four, with ``tile`` (rows, columns, warps) or the recorded one."""
    features, columns = weight.shape
    rows, width, warps = tile or TILES.get((features, columns)) or _tile_for(features, columns)
    num_rows = features // 2 if gated else features
    _matvec_kernel[(triton.cdiv(num_rows, rows),)](
        out, x, weight, norm_weight if norm_weight is not None else x, bias if bias is not None else x,
        num_rows, columns, eps,
        NORM=norm_weight is not None, GATED=gated, ADD=add, BIAS=bias is not None,
        ROWS=rows, COLUMNS=width, TILES=triton.cdiv(columns, width),
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip


def _tile_for(features: int, columns: int) -> tuple[int, int, int]:
    """Whole rows where they are short, and enough programs to keep every multiprocessor busy."""
    width = min(2048, max(16, triton.next_power_of_2(columns)))
    rows = max(1, min(8, 8192 // width, triton.next_power_of_2(features) // 512))
    return rows, width, 4 if width <= 1024 else 8
