"""Upper bounds, valid for any input, of results that follow an RMSNorm. They give fixed scales for float16.

RMSNorm's result is ``y * w``, and the norm of y is at most the square root of in. By the Cauchy-Schwarz inequality, a
row g of the gate's matrix gives at most ``sqrt(in) * |w * g|`` plus its bias, and so does a row of up's matrix.
``silu(gate) * up`` is at most the product of both. Attention's result is a mean of values, so the bounds of v's rows
hold for it. The largest of these bounds is scaled to the upper end of float16's range. Results are usually 1,000 times
smaller than that, and numbers another 100,000 times smaller still have all their digits.
"""

import torch
from torch import Tensor

from minillm.kernels.linear.low_bit.choose import MOST_FUSED, slabs
from minillm.kernels.linear.low_bit.few_tokens import FixedScale
from minillm.kernels.linear.low_bit.lanes import GROWTH
from minillm.kernels.linear.low_bit.layouts import LowBit

_AT_ONCE = 1 << 23  # weights, 32 MiB of them
# Exponents of bounds for which the growth and its inverse are normal numbers. No float32 exceeds the upper one.
_LOWEST, _HIGHEST = -97, 128


def scale_of_gated(matrix: LowBit, bias: Tensor | None, norm_weight: Tensor) -> FixedScale:
    """Return the fixed scale with which to store ``silu(gate) * up`` in float16, where gate and up follow an RMSNorm.

    ``matrix`` is the matrix of gate and up. ``norm_weight`` is the weight of the RMSNorm. The result is computed on the
    device, without waiting for it. Its ``growth`` is 1 if the upper bound of ``silu(gate) * up`` is zero or not finite.
    """
    gate, up = _bounds(matrix, bias, norm_weight).chunk(2)
    return _scale_below((gate * up).max())


def scale_of_attended(
    parts: tuple[LowBit, ...], bias: Tensor | None, norm_weight: Tensor, num_values: int
) -> FixedScale:
    """Return the fixed scale with which to store attention's result in float16: see `scale_of_gated`.

    ``parts``, stacked by rows, are the projection to q, k and v. Their last ``num_values`` rows are those of v.
    """
    most, end = [], sum(part.shape[0] for part in parts)
    first = end - num_values
    for part in reversed(parts):
        start = end - part.shape[0]
        if end > first:
            rows = slice(max(first - start, 0), part.shape[0])
            mine = None if bias is None else bias[start + rows.start : end]
            most.append(_bounds(part.rows(rows), mine, norm_weight).max())
        end = start
    return _scale_below(torch.stack(most).max())


def _bounds(matrix: LowBit, bias: Tensor | None, norm_weight: Tensor) -> Tensor:
    """Return an upper bound for each row's result, ``[rows]`` float64. The matrix's input must be the result of an
    RMSNorm.
    """
    norm = norm_weight.float() if matrix.order is None else norm_weight[matrix.order].float()
    lengths = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows, weights in slabs(matrix, norm, _AT_ONCE):
        torch.linalg.vector_norm(weights.mul_(norm), dim=1, out=lengths[rows])
    most = matrix.shape[1] ** 0.5 * lengths.double()
    return most if bias is None else most + bias.abs()


def _scale_below(bound: Tensor) -> FixedScale:
    exponent = bound.frexp().exponent.clamp(_LOWEST, _HIGHEST)
    power = torch.exp2(15 - exponent.double())  # the bound times this is 2^14 to 2^15: half of the range is left
    growth = torch.where((bound > 0) & bound.isfinite(), power, 1.0).float().view(1)
    return FixedScale(growth, (1 / (growth * GROWTH.value)).expand(MOST_FUSED).contiguous())
