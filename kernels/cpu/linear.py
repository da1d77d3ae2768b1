"""Linear layers on a CPU, and the norm and the activation around them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import reference

# oneDNN chooses its blocked layout for one batch size. The layout for 16 is fast from 1 to 32 rows: 538 MB of weights
# take 30 ms at 1 row and 50 at 16, instead of 31 and 69 with the layout for 1 (2 cores of an EPYC 7003).
_PACKED_FOR_ROWS = 16
# A call of oneDNN takes 30 us, too much for a small matmul. With oneDNN and with torch's own linear, 96 x 48 weights
# take 34 and 3 us at 1 row; 256 x 256 take 69 and 42 us at 16 rows, 576 x 576 take 210 and 210 us.
_LEAST_BLOCKED = 1 << 18  # weights
FBGEMM = ("x86", "fbgemm")  # torch's names for the engines that multiply float32 by float16 weights
_CHECKED_AT_ONCE = 1 << 18  # weights


@dataclass(frozen=True)
class PackedLinear:
    """A weight, packed in the layout of a CPU library. Its functions multiply by the packed weight."""

    apply: Callable[[Tensor], Tensor]  # x [rows, in] -> x @ weight.T + bias [rows, out], float32
    num_bytes: int  # size of the weight
    add_to: Callable[[Tensor, Tensor], Tensor] | None = None  # residual, x -> residual += apply(x)
    in_4_bits: tuple[Tensor, Tensor] | None = None  # packed levels and scales, if kept in 4 bits: see `packed_int4`


def packed_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """Pack ``weight [out, in]`` and ``bias [out]`` in the layout that a CPU reads fastest. Arithmetic is float32.

    The weight is packed in float16, half the bytes, if float32 arithmetic cannot tell the difference: see
    `float16_scales`. This holds for every checkpoint published in bfloat16 or float16. Otherwise, the weight stays
    float32, in oneDNN's blocked layout.

    Return None if torch's own `linear` is fastest. This is so for small weights, for weights that are not float32 on a
    CPU, and if torch has neither FBGEMM nor oneDNN.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
        return None
    if torch.backends.quantized.engine in FBGEMM:
        scales = float16_scales(weight)
        if scales is not None:
            return PackedLinear(_in_float16(weight, bias, scales), weight.numel() * torch.float16.itemsize)
    if torch.backends.mkldnn.is_available() and weight.numel() >= _LEAST_BLOCKED:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise
        return PackedLinear(lambda x: multiply(x, blocked, bias, "none", [], ""), weight.nbytes)
    return None


def _in_float16(weight: Tensor, bias: Tensor | None, scales: Tensor) -> Callable[[Tensor], Tensor]:
    if bool((scales == 1).all()):
        return partial(_multiply_float16, torch.ops.quantized.linear_prepack_fp16(weight, bias))
    half, inverse = torch.ops.quantized.linear_prepack_fp16(weight * scales[:, None], None), scales.reciprocal()

    def multiply(x: Tensor) -> Tensor:
        product = _multiply_float16(half, x).mul_(inverse)
        return product if bias is None else product.add_(bias)

    return multiply


def _multiply_float16(half: torch.ScriptObject, x: Tensor) -> Tensor:
    # torch looks up `__torch_function__` on every argument; for a packed weight this raises C++ exceptions, which cost
    # a quarter of a token's time.
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.quantized.linear_dynamic_fp16.op(x, half)


def float16_scales(weight: Tensor) -> Tensor | None:
    """Return powers of two ``[out]`` by which to multiply the rows of ``weight [out, in]`` to store them in float16.

    A stored number, divided by its row's scale, may differ from the weight. The difference is at most 2^-23 of the
    Euclidean norm of the row, and at most 2^-23 of that of the column. The rounding of float32 sums hides such a
    difference. This holds even if a small row's result is multiplied later, or if a small column has a large input.

    Nearly all rows have scale 1. bfloat16 has fewer digits than float16, so only bfloat16 numbers below 2^-14 may lose
    digits, at most 2^-25. Return None if no scale is accurate enough: the weights have more digits, or are infinite or
    NaN.
    """
    scales, columns = torch.ones(len(weight)), None
    at_once = max(1, _CHECKED_AT_ONCE // weight.shape[1])  # keeps the copies in the cache
    for rows, scale in zip(weight.split(at_once), scales.split(at_once), strict=True):
        change = (rows.half().float() - rows).abs_()
        largest = float(change.max())
        if largest == 0:
            continue
        if columns is None:
            columns = torch.stack([each.square().sum(0) for each in weight.split(at_once)]).sum(0).sqrt_()
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        if largest <= 2**-23 * min(float(lengths.min()), float(columns.min())):
            continue
        limit = torch.minimum(lengths, columns).mul_(2**-23)
        # Scale a row's largest number to 2^14: near float16's maximum, and far from subnormal numbers.
        exponent = (15 - torch.frexp(rows.abs().amax(1)).exponent).clamp_(max=100)
        scale.copy_(torch.where((change <= limit).all(1), scale, torch.ldexp(scale, exponent)))
        held = (rows * scale[:, None]).half().float() / scale[:, None]
        if not bool(((held - rows).abs_() <= limit).all()):
            return None
    return scales


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `reference.rms_norm` for ``x [rows, hidden]``. In float32, the casts of the reference change nothing and
    are left out.
    """
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    if x.shape[0] == 1:  # four small ops instead of twelve: with cold caches each costs as much as 576 multiplications
        row = x.view(-1)
        return (x * weight).mul_((torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5)
    # sqrt(mean(x^2) + eps) in three ops, faster than torch's own rms_norm.
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5).hypot_(scalar(eps**0.5))
    return (x * weight).div_(root)


@cache
def scalar(value: float) -> Tensor:
    """Return a tensor with one float32 value, for ops that take only tensors."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `reference.silu_mul`."""
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Compute `reference.gelu_mul`."""
    if gate_up.dtype != torch.float32:
        return reference.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def norm_add(x: Tensor, norm_weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Compute `reference.norm_add`."""
    return residual.add_(rms_norm(x, norm_weight, eps))
