"""Linear layers on a CPU, and the norm and the activation around them.

A weight is read at memory speed only from a blocked layout, and in half the bytes where float16 holds it as well
(`packed_linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import reference

# oneDNN picks its blocked layout for one batch size. The layout for 16 is the one that is fast from 1 to 32 rows:
# 538 MB of weights take 30 ms at 1 row and 50 ms at 16, against 31 and 69 with the layout for 1, 46 and 86 unpacked
# (2 cores of an EPYC 7003).
_PACKED_FOR_ROWS = 16
_FBGEMM = ("x86", "fbgemm")  # torch's names for the engines that multiply float32 by float16 weights
_CHECKED_AT_ONCE = 1 << 18  # weights


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer in the layout from which it is read fastest."""

    apply: Callable[[Tensor], Tensor]  # x [rows, in] -> x @ weight.T + bias [rows, out], float32
    itemsize: int  # bytes of a weight


def packed_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """The fastest layout for ``weight [out, in]`` and ``bias [out]``.

    Arithmetic, ``x`` and the result are float32. The weight is kept in float16 where that changes nothing that float32
    could tell (`fits_float16`): so it is with every checkpoint that was published in bfloat16 or float16, and a token
    then costs half the bytes.

    Returns None where nothing is faster than `torch.nn.functional.linear`: weights that are not float32 on a CPU, or a
    torch without these libraries.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
        return None
    if torch.backends.quantized.engine in _FBGEMM and fits_float16(weight):
        half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return PackedLinear(partial(_multiply_float16, half), torch.float16.itemsize)
    if torch.backends.mkldnn.is_available():
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise
        return PackedLinear(lambda x: multiply(x, blocked, bias, "none", [], ""), weight.itemsize)
    return None


def _multiply_float16(half: torch.ScriptObject, x: Tensor) -> Tensor:
    # torch asks every argument for `__torch_function__` first, and a packed weight answers with C++ exceptions. Without
    # them a token takes 24 ms instead of 31, a step of 16 sequences 85 instead of 92 to 101.
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.quantized.linear_dynamic_fp16.op(x, half)


def fits_float16(weight: Tensor) -> bool:
    """Whether products with ``weight [out, in]`` in float16 are as exact as float32 makes them.

    bfloat16 numbers have fewer digits than float16's; only those below 2^-14 may lose some, 2^-25 at most. That is lost
    in the rounding of a float32 sum as long as it is below 2^-23 of a typical row's length (its Euclidean norm).
    """
    limit = 2**-23 * float(torch.linalg.vector_norm(weight)) / weight.shape[0] ** 0.5
    for rows in weight.split(max(1, _CHECKED_AT_ONCE // weight.shape[1])):  # so that the copies stay in the cache
        if not float((rows.half().float() - rows).abs_().max()) <= limit:  # inf or NaN do not fit either
            return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`; in float32 there is no cast whose order could matter."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    if x.shape[0] == 1:  # four small ops instead of twelve: with cold caches each costs as much as 576 multiplications
        row = x.view(-1)
        return (x * weight).mul_((torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5)
    # sqrt(mean(x^2) + eps) in three ops: a seventh of the time of torch's own for 2,048 rows, six tenths for 16.
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5).hypot_(_scalar(eps**0.5))
    return (x * weight).div_(root)


@cache
def _scalar(value: float) -> Tensor:
    """For ops that take tensors only."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
