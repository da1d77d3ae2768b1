"""Matrix-vector kernels for one or a few tokens, fused with the norm before or the addition after them.

Bytes: the weight, once; the rest is negligible. A launch runs at memory speed if enough loads are always in flight,
even while one kernel ends and the next begins. The first tile of weights does not depend on the previous kernel. A
program therefore loads it *before* it waits for that kernel (programmatic dependent launch, compute capability 9.0 on).

Grid: (out features / ROWS). Tile: ROWS x COLUMNS weights, 16 bytes per load; most rows fit into one tile. The norm
needs no extra pass: ``sum(x^2)`` is accumulated along with the product and applied to its result, because it is a
single factor. All arithmetic is float32 without tensor cores, so several tokens are computed here only if the weight is
small (`most_tokens`). FP8 weights take half the bytes; they are converted to float32 in registers, and their rows'
scales are also factors of the result. `TILES` is measured. `_tile_for` chooses the tiles of other shapes.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Norm, cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, readable, wait_for_inputs, widen
from minillm.kernels.launch import launched
from minillm.kernels.norm.activation import active

# Tokens, rounded up to a power of two -> (out features, in features) -> (ROWS, COLUMNS, warps), measured on an H200
# in whole models. Only tiles that are faster than those of `_tile_for` are listed.
TILES: dict[int, dict[tuple[int, int], tuple[int, int, int]]] = {
    1: {
        (960, 576): (4, 1024, 4),
        (576, 576): (2, 1024, 8),
        (3072, 576): (8, 1024, 16),
        (576, 1536): (8, 2048, 4),
        (49152, 576): (8, 256, 2),
        (6144, 4096): (4, 2048, 4),
        (4096, 4096): (8, 1024, 8),
    },
    2: {
        (960, 576): (4, 1024, 2),
        (576, 576): (4, 1024, 4),
        (3072, 576): (2, 1024, 4),
        (576, 1536): (2, 2048, 4),
        (3072, 2048): (4, 1024, 4),
        (2048, 2048): (4, 2048, 8),
        (2048, 8192): (2, 2048, 4),
    },
    4: {
        (960, 576): (4, 1024, 2),
        (576, 576): (4, 1024, 2),
        (3072, 576): (4, 1024, 8),
        (576, 1536): (2, 2048, 4),
    },
}
MOST_TOKENS = max(TILES)
_SMALL = 1 << 24  # elements of a weight: see `_tile_for`
# Tokens -> maximum elements of a weight. With larger weights, a norm and then cuBLAS are as fast.
_LARGEST = {2: 17_000_000, 3: 2_000_000, 4: 2_000_000}


@triton.jit
def load_weights(weight_ptr, rows, columns, num_rows, num_columns):
    """Load a tile ``[rows, columns]`` of a weight, with zeros outside of it."""
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    # Each weight is read once, so it should not evict data that is read again.
    return tl.load(weight_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _product(weights, x, TOKENS: tl.constexpr):
    """Multiply a tile of weights ``[rows, columns]`` by activations.

    For one token, x is ``[columns]`` and the result ``[rows]``. For several tokens, x is ``[tokens, 1, columns]`` and
    the result ``[tokens, rows]``. (The general path costs a single token more instructions.)
    """
    weights = widen(weights)
    if TOKENS == 1:
        return tl.sum(weights * x[None, :], axis=1)
    else:
        return tl.sum(weights[None, :, :] * x, axis=2)


@launched
@triton.jit
def _matvec_kernel(
    out_ptr, x_ptr, weight_ptr, scales_ptr, norm_ptr, bias_ptr, num_tokens, num_rows, num_columns, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    lanes = tl.arange(0, COLUMNS)
    weights = load_weights(weight_ptr, rows, lanes, num_rows, num_columns)
    if GATED:
        up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
        up_weights = load_weights(up_ptr, rows, lanes, num_rows, num_columns)
    wait_for_inputs(PDL)
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    if TOKENS == 1:
        squares = tl.zeros([COLUMNS], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    else:
        squares = tl.zeros([TOKENS, 1, COLUMNS], tl.float32)
        total = tl.zeros([TOKENS, ROWS], tl.float32)
    up_total = total
    for tile in tl.static_range(NUM_TILES):
        columns = tile * COLUMNS + lanes
        is_column = columns < num_columns
        if TOKENS == 1:
            x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        else:
            offsets = tokens[:, None, None] * num_columns + columns[None, None, :]
            mask = is_token[:, None, None] & is_column[None, None, :]
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        total += _product(weights, x, TOKENS)
        if GATED:
            up_total += _product(up_weights, x, TOKENS)
        if tile + 1 < NUM_TILES:
            following = (tile + 1) * COLUMNS + lanes
            weights = load_weights(weight_ptr, rows, following, num_rows, num_columns)
            if GATED:
                up_weights = load_weights(up_ptr, rows, following, num_rows, num_columns)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0 if TOKENS == 1 else 2) / num_columns + eps)
        total *= scale
        up_total *= scale
    if scales_ptr is not None:  # of FP8
        total *= tl.load(scales_ptr + rows, mask=is_row, other=0.0)
        if GATED:
            up_total *= tl.load(scales_ptr + num_rows + rows, mask=is_row, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            up_total += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        total = active(total, GATED) * up_total
    at, mask = out_ptr + rows, is_row
    if TOKENS > 1:
        at, mask = at[None, :] + tokens[:, None] * num_rows, is_token[:, None] & is_row[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def most_tokens(weight: Tensor) -> int:
    """Return the maximum number of tokens for which these kernels are the fastest, for a weight ``[out, in]``."""
    return max((1, *(tokens for tokens, largest in _LARGEST.items() if weight.numel() <= largest)))


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    norm: Norm | None = None,
    *,
    gated: int = False,
    add: bool = False,
) -> Tensor:
    """Compute ``x @ weight.T + bias``, after RMSNorm with ``norm`` (weight, eps) if given.

    ``gated``: the weight is gate and up, stacked by rows, and the result is ``silu(gate) * up``. Write the result to
    ``out [tokens, out]``, or add it if ``add``. Raises ValueError for a wrong shape or dtype, for more than
    `MOST_TOKENS` tokens, and if a tensor is not contiguous.
    """
    out = _target(x, weight, out, 2 if gated else 1)
    return launch(out, x, weight, bias, norm, gated=gated, add=add) if x.shape[0] else out


def _target(x: Tensor, weight: Tensor, out: Tensor | None = None, matrices: int = 1) -> Tensor:
    """Check shapes and layouts. Return the tensor for the result: ``out``, or else a new tensor.

    ``matrices`` is the number of matrices that the weight stacks by rows. Raises ValueError for a wrong shape or
    layout.
    """
    fits = x.shape[1:] == weight.shape[1:] and x.shape[0] <= MOST_TOKENS and x.dtype == weight.dtype
    if not (fits and x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())):
        raise ValueError(
            f"a matvec takes up to [{MOST_TOKENS}, {weight.shape[1]}] and a weight of its dtype, all contiguous, "
            f"not {x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    return x.new_empty(x.shape[0], weight.shape[0] // matrices) if out is None else out


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None = None,
    *,
    gated: int = False,
    add: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Launch the kernel: see `product`. Nothing is checked.

    ``scales``: ``[out, 1]`` float32, the scales of an FP8 weight.
    """
    norm_weight, eps = norm or (x, 0.0)
    features, columns = weight.shape
    tokens = next_power_of_2(x.shape[0])
    if scales is not None:
        rows, width, warps = _fp8_tile(tokens, features, columns)
    else:
        matrices = 2 if gated else 1
        rows, width, warps = TILES[tokens].get((features, columns)) or _tile_for(tokens, features, columns, matrices)
    num_rows = features // 2 if gated else features
    _matvec_kernel[(cdiv(num_rows, rows),)](
        out, x, weight if scales is None else readable(weight), scales,
        norm_weight, bias if bias is not None else x, x.shape[0], num_rows, columns, eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None,
        TOKENS=tokens, ROWS=rows, COLUMNS=width, NUM_TILES=cdiv(columns, width),
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _tile_for(tokens: int, features: int, columns: int, matrices: int) -> tuple[int, int, int]:
    """Choose a tile by shape, as measured in whole models.

    For one token and a large weight, a thread loads 64 numbers. Programs have two warps, because a multiprocessor then
    runs enough programs to have loads in flight at any time. A small weight is spread over more threads. ``matrices``:
    2 for gate and up; a program loads one tile of each.
    """
    most = max(1, next_power_of_2(features) // 512)  # enough programs to keep every multiprocessor busy
    widest = max(16, next_power_of_2(columns))
    if tokens > 1:
        return min(4, most), min(1024, widest), 2
    if features * columns > _SMALL:
        rows = (4 if features >= 4096 else 2) // matrices
        return rows, min(4096 // rows // matrices, widest), 2
    width = min(2048, widest)
    while width > 512 and cdiv(columns, width) * width > 1.25 * columns:  # padding
        width //= 2
    return min(8, 8192 // width, most), width, 4 if width <= 1024 else 8


def _fp8_tile(tokens: int, features: int, columns: int) -> tuple[int, int, int]:
    """Return the tile for an FP8 weight. It has more rows than the tile for a 16-bit weight.

    An FP8 weight has half the bytes, so its instructions must take half the time. With more rows, each converted number
    of x is used for more weights. Measured in an 8B model.
    """
    rows, width = 8 if tokens == 1 and features <= 4096 else 4, min(2048, max(16, next_power_of_2(columns)))
    return rows, width, max(1, width // 512)
