"""How large a gated product can be, whatever is in front of it: a scale for it that needs no look at its numbers.

RMSNorm's result is ``y * w``, and y is no longer than the square root of in. So, by Cauchy and Schwarz, a row g of the
gate's matrix gives no more than ``sqrt(in) * |w * g|`` and its bias, a row of up's alike, and ``silu(gate) * up`` no
more than both multiplied. The largest of these bounds is brought near to the end of float16's range. Numbers stay far
below it, by 1,000 times as a rule, and what is another 100,000 times smaller has all its digits still.
"""

import torch
from torch import Tensor

from minillm.kernels.low_bit import LowBit
from minillm.kernels.low_bit_lanes import GROWTH
from minillm.kernels.low_bit_linear import MOST_FUSED, slabs
from minillm.kernels.low_bit_matmul import FixedScale

_AT_ONCE = 1 << 23  # weights, 32 MiB of them
# The exponents of bounds whose growth, and what takes it back, are normal numbers; none of float32 is beyond the upper.
_LOWEST, _HIGHEST = -97, 128


def scale_of_gated(matrix: LowBit, bias: Tensor | None, norm_weight: Tensor) -> FixedScale:
    """The scale of ``silu(gate) * up`` behind RMSNorm, of a matrix that is both; the device is not waited for.

    A bound that says nothing, zero or none, has no growth.
    """
    norm = norm_weight.float() if matrix.order is None else norm_weight[matrix.order].float()
    lengths = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows, weights in slabs(matrix, norm, _AT_ONCE):
        torch.linalg.vector_norm(weights.mul_(norm), dim=1, out=lengths[rows])
    most = matrix.shape[1] ** 0.5 * lengths.double()
    if bias is not None:
        most += bias.abs()
    gate, up = most.chunk(2)
    bound = (gate * up).max()
    exponent = bound.frexp().exponent.clamp(_LOWEST, _HIGHEST)
    power = torch.exp2(15 - exponent.double())  # the bound times this is from 2^14 to 2^15: half of the range is spare
    growth = torch.where((bound > 0) & bound.isfinite(), power, 1.0).float().view(1)
    return FixedScale(growth, (1 / (growth * GROWTH.value)).expand(MOST_FUSED).contiguous())
