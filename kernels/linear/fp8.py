"""Linear layers of FP8 matrices on a GPU.

    x[t, k] ~ scale[t] * level[t, k]        scale: the token's largest number / 448, levels of float8_e4m3fn

=================  ==================================================================================================
tokens             computed by
=================  ==================================================================================================
up to MOST_FUSED   `fp8_matvec` or `matvec`: weights are converted to float32 in registers, x is not quantized
more               `torch._scaled_mm`: x is quantized per token, FP8 x FP8 on the tensor cores
=================  ==================================================================================================

`_quantize_kernel`: grid (tokens); tile: a whole row, read once and written in 8 bits. The norm before it is fused: its
``1 / sqrt(mean(x^2) + eps)`` is a factor of the scale.

`_finish_kernel`: grid (tokens, columns / TILE). It scales the sums of levels, and fuses SwiGLU or the residual add.
With few tokens, `torch._scaled_mm` takes twice the time if it multiplies the scales of tokens and columns itself. It is
faster from `_SCALED_INSIDE` tokens on.

`_gate_kernel`: grid (tokens); tile: a whole row of gate and up, read once. It computes SwiGLU and quantizes the result,
so a gated MLP writes the input of its second matmul in 8 bits (`mlp`).

Matrices that `takes` rejects are dequantized: see `minillm.kernels.linear.low_bit.choose`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Norm, cdiv, next_power_of_2
from minillm.kernels.compat import has_fp8, narrow, pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.linear import fp8_matvec, matvec
from minillm.kernels.linear.low_bit.layouts import LARGEST_FP8, LowBit
from minillm.kernels.norm.activation import active, gate_mul

MOST_FUSED = 2  # tokens
_UNIT = 16  # `torch._scaled_mm` needs matrices with both sizes a multiple of this
_SCALED_INSIDE = 1024  # tokens
_TILE = 1024
_LEAST = tl.constexpr(1e-30)  # minimum scale: zeros stay zeros, and much smaller numbers become zeros


@launched
@triton.jit
def _quantize_kernel(
    out_ptr, scales_ptr, x_ptr, norm_ptr, x_stride, eps,
    NORM: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    mask = offsets < SIZE
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        x *= tl.load(norm_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # Infinity makes the scale infinite and becomes NaN, so the token's results are NaN.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST), _LEAST)
    tl.store(out_ptr + row * SIZE + offsets, narrow(x * tl.div_rn(1.0, scale)), mask=mask)
    tl.store(scales_ptr + row, scale * factor)


def quantize(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Quantize ``x [tokens, in]`` to FP8 with a scale per token, after RMSNorm if ``norm`` is given.

    Return levels ``[tokens, in]`` float8_e4m3fn, and scales ``[tokens, 1]`` float32. Rows of ``x`` may be strided.
    """
    tokens, size = x.shape
    levels = torch.empty(tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    weight, eps = norm or (x, 0.0)
    tile = next_power_of_2(size)
    _quantize_kernel[(tokens,)](
        levels, scales, x, weight, x.stride(0), eps,
        NORM=norm is not None, LARGEST=LARGEST_FP8, SIZE=size, TILE=tile,
        num_warps=min(max(tile // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return levels, scales


@launched
@triton.jit
def _gate_kernel(
    out_ptr, out_scales_ptr, sums_ptr, token_scales_ptr, scales_ptr, bias_ptr, num_columns,
    GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < num_columns
    wait_for_inputs(PDL)
    sums_ptr += token * num_columns * 2
    gate = tl.load(sums_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(sums_ptr + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    if not SCALED:  # otherwise the matmul has applied scales and bias
        token_scale = tl.load(token_scales_ptr + token)
        gate *= token_scale * tl.load(scales_ptr + columns, mask=mask, other=0.0)
        up *= token_scale * tl.load(scales_ptr + num_columns + columns, mask=mask, other=0.0)
        if BIAS:
            gate += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    result = active(gate, GATED) * up
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(result), axis=0), LARGEST), _LEAST)
    tl.store(out_ptr + token * num_columns + columns, narrow(result * tl.div_rn(1.0, scale)), mask=mask)
    tl.store(out_scales_ptr + token, scale)


@launched
@triton.jit
def _finish_kernel(
    out_ptr, sums_ptr, token_scales_ptr, scales_ptr, bias_ptr, num_columns, out_stride,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < num_columns
    wait_for_inputs(PDL)
    token_scale = tl.load(token_scales_ptr + token)
    sums_ptr += token * num_columns * (2 if GATED else 1)
    result = tl.load(sums_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    result *= token_scale * tl.load(scales_ptr + columns, mask=mask, other=0.0)
    if BIAS:
        result += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        columns_up = num_columns + columns
        up = tl.load(sums_ptr + columns_up, mask=mask, other=0.0).to(tl.float32)
        up *= token_scale * tl.load(scales_ptr + columns_up, mask=mask, other=0.0)
        if BIAS:
            up += tl.load(bias_ptr + columns_up, mask=mask, other=0.0).to(tl.float32)
        result = active(result, GATED) * up
    at = out_ptr + token * out_stride + columns
    if ADD:
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=mask)


def takes(x: Tensor, matrix: LowBit) -> bool:
    """Return whether this module can multiply the matrix by x.

    More than `MOST_FUSED` tokens need bfloat16, sizes that are multiples of 16, and a GPU that computes with FP8.
    """
    fits = not (matrix.shape[0] % _UNIT or matrix.shape[1] % _UNIT)
    return _are_few(x) or (fits and x.dtype == torch.bfloat16 and has_fp8(x.device))


def _are_few(x: Tensor) -> bool:
    return 0 < x.shape[0] <= MOST_FUSED


def product(
    x: Tensor, matrix: LowBit, bias: Tensor | None, out: Tensor | None, norm: Norm | None,
    *, gated: int = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``x [tokens, in] @ matrix.T + bias``, after RMSNorm if ``norm`` is given: see `matvec.product`."""
    if out is None:
        out = x.new_empty(x.shape[0], matrix.shape[0] // (2 if gated else 1))
    if not _are_few(x):
        return _multiply(*quantize(x, norm), matrix, bias, out, gated=gated, add=add)
    if fp8_matvec.takes(x.shape[0], matrix, gated=gated):
        return fp8_matvec.product(x, matrix, bias, out, norm, gated=gated, add=add)
    return matvec.launch(out, x, matrix.levels, bias, norm, gated=gated, add=add, scales=matrix.scales)


def mlp(
    x: Tensor, norm: Norm | None, gate_up: LowBit, bias: Tensor | None, down: LowBit, down_bias: Tensor | None,
    residual: Tensor | None, gated: int = True,
) -> Tensor:  # fmt: skip
    """Compute RMSNorm, the gated `product` and the projection ``down``, for more than `MOST_FUSED` tokens.

    ``silu(gate) * up`` is quantized where it is computed, so it is never written in 16 bits. Add the result to
    ``residual`` in place. Without a residual, return the result as a new tensor ``[tokens, out]``.
    """
    levels, token_scales = quantize(x, norm)
    sums = _sums(levels, token_scales, gate_up, bias, x.dtype)
    tokens, size = x.shape[0], down.shape[1]
    middle, scales = torch.empty(tokens, size, dtype=levels.dtype, device=x.device), torch.empty_like(token_scales)
    tile = next_power_of_2(size)
    _gate_kernel[(tokens,)](
        middle, scales, sums, token_scales, gate_up.scales, token_scales if bias is None else bias, size,
        GATED=gated, SCALED=tokens >= _SCALED_INSIDE, BIAS=bias is not None, LARGEST=LARGEST_FP8, TILE=tile,
        num_warps=min(max(tile // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    out = x.new_empty(tokens, down.shape[0]) if residual is None else residual
    return _multiply(middle, scales, down, down_bias, out, gated=False, add=residual is not None)


def _multiply(
    levels: Tensor, token_scales: Tensor, matrix: LowBit, bias: Tensor | None, out: Tensor, *, gated: int, add: bool
) -> Tensor:
    """Multiply quantized tokens ``levels [tokens, in]`` with scales ``[tokens, 1]``; write to ``out`` or add to it."""
    is_final = levels.shape[0] >= _SCALED_INSIDE
    into = out if is_final and not gated and not add else None
    product = _sums(levels, token_scales, matrix, bias, out.dtype, into)
    if is_final:
        return gate_mul(product, gated) if gated else out.add_(product) if add else product
    columns = out.shape[1]
    _finish_kernel[(levels.shape[0], cdiv(columns, _TILE))](
        out, product, token_scales, matrix.scales, token_scales if bias is None else bias, columns, out.stride(0),
        GATED=gated, ADD=add, BIAS=bias is not None, TILE=_TILE, **pdl_options(out.device),
    )  # fmt: skip
    return out


def _sums(
    levels: Tensor, token_scales: Tensor, matrix: LowBit, bias: Tensor | None, dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the layer's result ``[tokens, out]`` in ``dtype``, if there are at least `_SCALED_INSIDE` tokens.

    For fewer tokens, return only the matmul of the levels, without scales and bias. If ``out`` is given, the result is
    written to it.
    """
    scales, extra = (_one(levels.device), _one(levels.device)), None
    if levels.shape[0] >= _SCALED_INSIDE:
        scales, extra = (token_scales, matrix.scales.t()), bias
    columns = matrix.levels.t()
    return torch._scaled_mm(levels, columns, *scales, bias=extra, out_dtype=dtype, use_fast_accum=True, out=out)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
