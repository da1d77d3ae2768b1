"""A small weight matrix times the activations of some tokens, by the matrix unit; norm, gate or addition are fused.

A layer of a small model has little to do: with 32 tokens each of its products takes a few microseconds, and so does
each launch. So what stands before or behind a product is part of it here, as in `minillm.kernels.matvec`, and the next
kernel is brought in while this one works (programmatic dependent launch), which cuBLAS does not do.

Grid: (out features / ROWS): a program has all tokens and a few rows of the weight. Tile: TOKENS x COLUMNS activations
and ROWS x COLUMNS weights, several under way at a time. The norm costs no pass of its own: ``sum(x^2)`` is collected
beside the product and applied to its result. Bytes: the weight, once, and the activations, for each program from the
L2. FLOPs: 2 x tokens x weights. Sums are in float32, and over the columns in one order, whatever the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import dot, pdl_options, wait_for_inputs

MOST_TOKENS = 64
_LARGEST = 6_000_000  # weights: larger ones keep the chip busy by themselves
_COLUMNS = 128


@triton.jit
def _small_matmul_kernel(
    out_ptr, x_ptr, weight_ptr, norm_ptr, bias_ptr, num_tokens, num_rows, num_columns, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    lanes = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_token = tokens < num_tokens
    up_ptr = weight_ptr + tl.cast(num_rows, tl.int64) * num_columns
    squares = tl.zeros([TOKENS], tl.float32)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    up_total = tl.zeros([TOKENS, ROWS], tl.float32)
    wait_for_inputs(PDL)
    for start in tl.range(0, num_columns, COLUMNS, num_stages=STAGES):
        columns = start + lanes
        is_column = columns < num_columns
        x = tl.load(
            x_ptr + tokens[:, None] * num_columns + columns[None, :], mask=is_token[:, None] & is_column[None, :],
            other=0.0,
        )  # fmt: skip
        at = rows[None, :] * num_columns + columns[:, None]
        mask = is_column[:, None] & is_row[None, :]
        weights = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            norm = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
            x = (wide * norm[None, :]).to(x_ptr.dtype.element_ty)
        total = dot(x, weights, total)
        if GATED:
            up_weights = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
            up_total = dot(x, up_weights, up_total)
    if NORM:
        scale = tl.rsqrt(squares / num_columns + eps)
        total *= scale[:, None]
        up_total *= scale[:, None]
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_total += tl.load(bias_ptr + num_rows + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * up_total
    at = out_ptr + tokens[:, None] * num_rows + rows[None, :]
    mask = is_token[:, None] & is_row[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is meant for ``x [tokens, in]`` and a weight ``[out, in]``."""
    few = x.shape[0] <= MOST_TOKENS and weight.dim() == 2 and weight.numel() <= _LARGEST
    return few and weight.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous()


def norm_matmul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``rms_norm(x) @ weight.T + bias``, ``[tokens, out]``, in ``out`` if given: see `reference.norm_linear`."""
    return _launch(_target(x, weight.shape[0], out), x, weight, bias, (norm_weight, eps))


def norm_gated_matmul(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, ``[tokens, out / 2]``, of a packed weight: see `reference.norm_gated_linear`."""
    return _launch(_target(x, weight.shape[0] // 2), x, weight, bias, (norm_weight, eps), gated=True)


def matmul_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual += x @ weight.T + bias``, ``[tokens, out]``, in place: see `reference.linear_add`."""
    return _launch(residual, x, weight, bias, add=True)


def _target(x: Tensor, features: int, out: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], features) if out is None else out


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None = None,
    *,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    """Any of the three; raises ValueError where a shape or layout is wrong."""
    tokens, columns = x.shape
    num_rows = weight.shape[0] // 2 if gated else weight.shape[0]
    tensors = (out, x, weight)
    fits = weight.shape[1] == columns and out.shape == (tokens, num_rows) and tokens <= MOST_TOKENS
    if not fits or any(not each.is_contiguous() or each.dtype != x.dtype for each in tensors):
        raise ValueError(
            f"a small product takes up to [{MOST_TOKENS}, {weight.shape[1]}], all contiguous and of one dtype, "
            f"not {x.dtype} {tuple(x.shape)}, {weight.dtype} {tuple(weight.shape)} and {out.dtype} {tuple(out.shape)}"
        )
    if not tokens:
        return out
    norm_weight, eps = norm or (x, 0.0)
    _small_matmul_kernel[(triton.cdiv(num_rows, 16),)](
        out, x, weight, norm_weight, bias if bias is not None else x, tokens, num_rows, columns, eps,
        NORM=norm is not None, GATED=gated, ADD=add, BIAS=bias is not None,
        TOKENS=max(16, triton.next_power_of_2(tokens)), ROWS=16, COLUMNS=_COLUMNS, STAGES=4,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return out
