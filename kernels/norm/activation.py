"""The activation of a gated MLP on the fused projection.

    out = silu(gate) * up,   gate, up = the halves of each row      (Shazeer 2020)
    out = gelu(gate) * up,   with GELU's tanh approximation: gate * sigmoid(1.596 * (gate + 0.0447 * gate^3))

Bytes: reads 2 * rows * size elements and writes rows * size; torch's two ops move 5 * rows * size.
Memory-bound. Grid: (rows, tiles of a row). Tile: 2,048 columns of gate and up, 16 bytes per thread and load.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import GELU, cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

_TILE = 2048


@triton.jit
def active(x, GATED: tl.constexpr):
    """Return SiLU of ``x`` in float32, or GELU if ``GATED`` is `arguments.GELU`."""
    steepness = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GATED == 2 else x
    return x * tl.sigmoid(steepness)


@launched
@triton.jit
def _gated_kernel(out_ptr, gate_up_ptr, stride, size, GATED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < size
    gate_ptr = gate_up_ptr + row * stride
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + offsets, mask=mask, other=0.0)
    # Rounded to the input's dtype before the multiplication, as in Llama's two ops.
    rounded = active(gate, GATED).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + offsets, (rounded * up.to(tl.float32)).to(up.dtype), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `reference.silu_mul`. Rows may be strided. Raises ValueError for a wrong shape or layout."""
    return gate_mul(gate_up, True)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Compute `reference.gelu_mul`, with the arguments of `silu_mul`."""
    return gate_mul(gate_up, GELU)


def gate_mul(gate_up: Tensor, gated: int) -> Tensor:
    """Compute `silu_mul`, or `gelu_mul` if ``gated`` is `GELU`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"silu_mul takes [rows, 2 * size] with contiguous rows, not {tuple(gate_up.shape)}")
    return gate_mul_into(gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2), gate_up, gated)


def gate_mul_into(out: Tensor, gate_up: Tensor, gated: int) -> Tensor:
    """Compute `gate_mul`, and write the result to ``out [rows, size]``, which is contiguous."""
    rows, size = out.shape
    if rows:
        tile = min(_TILE, next_power_of_2(size))
        grid = (rows, cdiv(size, tile))
        warps = min(8, max(1, tile // 256))
        _gated_kernel[grid](
            out, gate_up, gate_up.stride(0), size, GATED=gated, TILE=tile, num_warps=warps, **pdl_options(out.device)
        )
    return out
