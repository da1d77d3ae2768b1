"""Linear layers of FP8 matrices on a GPU.

    x[t, k] ~ scale[t] * level[t, k]        scale: the token's largest number / 448, levels of float8_e4m3fn

=================  ==================================================================================================
tokens             computed by
=================  ==================================================================================================
up to MOST_FUSED   `matvec`: weights become float32 in registers, x keeps its bits
more               `torch._scaled_mm`: x rounded token by token, FP8 x FP8 on the matrix unit
=================  ==================================================================================================

`_quantise_kernel`: grid (tokens); tile: a whole row, read once and written in 8 bits. The norm in front is fused: its
``1 / sqrt(mean(x^2) + eps)`` is a factor of the scale. The residual and SwiGLU come behind the product, as ops of their
own. What `takes` refuses is unpacked: see `minillm.kernels.low_bit_linear`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels import matvec
from minillm.kernels.activation import silu_mul
from minillm.kernels.compat import has_fp8, narrow, pdl_options, wait_for_inputs
from minillm.kernels.low_bit import LARGEST_FP8, LowBit

Norm = tuple[Tensor, float]  # weight, eps
MOST_FUSED = 2  # tokens
_UNIT = 16  # of which both sides of a matrix are a multiple, for `torch._scaled_mm`
_LEAST = tl.constexpr(1e-30)  # of a scale: zeros stay zeros, and numbers far below it become zeros


@triton.jit
def _quantise_kernel(
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
    # Infinity makes an infinite scale, and becomes NaN itself; so the token is NaN in every product.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST), _LEAST)
    tl.store(out_ptr + row * SIZE + offsets, narrow(x * tl.div_rn(1.0, scale)), mask=mask)
    tl.store(scales_ptr + row, scale * factor)


def quantise(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Levels ``[tokens, in]`` float8_e4m3fn and scales ``[tokens, 1]`` float32 of x, with ``norm`` of its RMSNorm.

    Rows of ``x`` may be strided.
    """
    tokens, size = x.shape
    levels = torch.empty(tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    weight, eps = norm or (x, 0.0)
    tile = triton.next_power_of_2(size)
    _quantise_kernel[(tokens,)](
        levels, scales, x, weight, x.stride(0), eps,
        NORM=norm is not None, LARGEST=LARGEST_FP8, SIZE=size, TILE=tile,
        num_warps=min(max(tile // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return levels, scales


def takes(x: Tensor, matrix: LowBit) -> bool:
    """Whether the product of any number of tokens is computed here: more than a few where the GPU computes with FP8."""
    fits = not (matrix.shape[0] % _UNIT or matrix.shape[1] % _UNIT)
    return _are_few(x) or (fits and x.dtype == torch.bfloat16 and has_fp8(x.device))


def _are_few(x: Tensor) -> bool:
    return 0 < x.shape[0] <= MOST_FUSED


def linear(x: Tensor, matrix: LowBit, bias: Tensor | None, out: Tensor | None, norm: Norm | None) -> Tensor:
    """``x [tokens, in] @ matrix.T + bias``, in ``out`` if given, contiguous; with ``norm`` of RMSNorm's result."""
    if _are_few(x):
        out = x.new_empty(x.shape[0], matrix.shape[0]) if out is None else out
        return matvec.launch(out, x, matrix.levels, bias, norm, scales=matrix.scales)
    product = _product(x, matrix, bias, norm)
    return product if out is None else out.copy_(product)


def gated_linear(x: Tensor, matrix: LowBit, bias: Tensor | None, norm: Norm) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = linear(x, …)``."""
    if not _are_few(x):
        return silu_mul(_product(x, matrix, bias, norm))
    out = x.new_empty(x.shape[0], matrix.shape[0] // 2)
    return matvec.launch(out, x, matrix.levels, bias, norm, gated=True, scales=matrix.scales)


def linear_add(x: Tensor, matrix: LowBit, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual += linear(x, …)``."""
    if not _are_few(x):
        return residual.add_(_product(x, matrix, bias, None))
    return matvec.launch(residual, x, matrix.levels, bias, add=True, scales=matrix.scales)


def _product(x: Tensor, matrix: LowBit, bias: Tensor | None, norm: Norm | None) -> Tensor:
    levels, scales = quantise(x, norm)
    return torch._scaled_mm(
        levels, matrix.levels.t(), scale_a=scales, scale_b=matrix.scales.t(), bias=bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
