"""RMSNorm, also with the residual addition after it.

    y = x / sqrt(mean(x^2) + eps) * weight                          (Zhang & Sennrich 2019)
    residual += y                                                   (if there is a residual)

A row is read once, held in registers as float32, reduced and written. Bytes: 2 * rows * hidden elements; torch's
separate ops move 8 * rows * hidden. Memory-bound. Grid: (rows). Tile: the whole row, padded to a power of two; the
padding reads nothing. The order of casts is Llama's: normalize in float32, round to the input's dtype, then multiply by
the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched


@launched
@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, x_stride, eps,
    SIZE: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    mask = offsets < SIZE
    # Loading the weight before the row reaches 93 % of the copy bandwidth, loading it last 90 %.
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:  # loaded before the sum, which waits for x
        residual = tl.load(out_ptr + row * SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    out = normed.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    if ADD:
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32) + residual
    tl.store(out_ptr + row * SIZE + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `reference.rms_norm` of ``x [rows, hidden]``, with rows of any stride.

    Raises ValueError for a wrong shape or layout.
    """
    return _launch(torch.empty(x.shape, dtype=x.dtype, device=x.device), x, weight, eps, add=False)


def norm_add(x: Tensor, norm_weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Compute `reference.norm_add` of ``x [rows, hidden]`` and a contiguous residual, in place.

    Raises ValueError for a wrong shape or layout.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(
            f"residual must be a contiguous {x.dtype} {tuple(x.shape)}, not {residual.dtype} {tuple(residual.shape)}"
        )
    return _launch(residual, x, norm_weight, eps, add=True)


def _launch(out: Tensor, x: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"rms_norm takes [rows, hidden] with contiguous rows, not {tuple(x.shape)} {x.stride()}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight must be a contiguous {x.dtype} [{x.shape[1]}], not {weight.dtype} {tuple(weight.shape)}"
        )
    if x.shape[0]:
        tile = next_power_of_2(x.shape[1])
        _rms_norm_kernel[(x.shape[0],)](
            out, x, weight, x.stride(0), eps,
            SIZE=x.shape[1], TILE=tile, ADD=add, num_warps=min(max(tile // 512, 1), 16), **pdl_options(x.device),
        )  # fmt: skip
    return out
