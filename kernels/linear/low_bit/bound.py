"""How large numbers behind a norm can be, whatever is in front of it: a scale that needs no look at the numbers.

RMSNorm's result is ``y * w``, and y is no longer than the square root of in. So, by Cauchy and Schwarz, a row g of the
gate's matrix gives no more than ``sqrt(in) * |w * g|`` and its bias, a row of up's alike, and ``silu(gate) * up`` no
more than both multiplied. Attention's result is a mean of values, so it is within the bounds of v's rows. The largest
of these bounds is brought near to the end of float16's range. Numbers stay far below it, by 1,000 times as a rule, and
what is another 100,000 times smaller has all its digits still.
"""

import torch
from torch import Tensor

from minillm.kernels.linear.low_bit.choose import MOST_FUSED, slabs
from minillm.kernels.linear.low_bit.few_tokens import FixedScale
from minillm.kernels.linear.low_bit.lanes import GROWTH
from minillm.kernels.linear.low_bit.layouts import LowBit

_AT_ONCE = 1 << 23  # weights, 32 MiB of them
# The exponents of bounds whose growth, and what takes it back, are normal numbers; none of float32 is beyond the upper.
_LOWEST, _HIGHEST = -97, 128


def scale_of_gated(matrix: LowBit, bias: Tensor | None, norm_weight: Tensor) -> FixedScale:
    """The scale of ``silu(gate) * up`` behind RMSNorm, of a matrix that is both; the device is not waited for.

    A bound that says nothing, zero or none, has no growth.
    """
    gate, up = _bounds(matrix, bias, norm_weight).chunk(2)
    return _scale_below((gate * up).max())


def scale_of_attended(
    parts: tuple[LowBit, ...], bias: Tensor | None, norm_weight: Tensor, num_values: int
) -> FixedScale:
    """The scale of attention's result, where the last ``num_values`` rows of ``parts`` are v's; as `scale_of_gated`."""
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
    """How large each row's product behind RMSNorm can be, float64 ``[rows]``."""
    norm = norm_weight.float() if matrix.order is None else norm_weight[matrix.order].float()
    lengths = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows, weights in slabs(matrix, norm, _AT_ONCE):
        torch.linalg.vector_norm(weights.mul_(norm), dim=1, out=lengths[rows])
    most = matrix.shape[1] ** 0.5 * lengths.double()
    return most if bias is None else most + bias.abs()


def _scale_below(bound: Tensor) -> FixedScale:
    exponent = bound.frexp().exponent.clamp(_LOWEST, _HIGHEST)
    power = torch.exp2(15 - exponent.double())  # the bound times this is from 2^14 to 2^15: half of the range is spare
    growth = torch.where((bound > 0) & bound.isfinite(), power, 1.0).float().view(1)
    return FixedScale(growth, (1 / (growth * GROWTH.value)).expand(MOST_FUSED).contiguous())
