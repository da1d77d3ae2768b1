"""Quantize to 4 or 8 bits in groups, with a search for each group's best scale and offset."""

import torch
from torch import Tensor

from minillm.kernels.linear.low_bit.layouts import GROUP, Layout, LowBit, concatenated, pack_levels

_AT_ONCE = 1 << 22  # weights
# Initial scales, as levels to add to a group's range: clipping its ends may allow finer levels between them.
_WIDER = {4: tuple(0.2 * step - 0.9 for step in range(16)), 8: (0.0,)}


def rounded(weight: Tensor, bits: int) -> LowBit:
    """Quantize ``weight [out, in]`` to 4 or 8 bits, on its device; ``in`` is a multiple of 32.

    Groups of 32 have a scale and an offset in float16, the least-squares solution for their levels. Several initial
    scales are tried, and the result with the smallest error is kept, as in llama.cpp's ``make_qkx2_quants``.
    """
    rows = max(1, _AT_ONCE // weight.shape[1])
    (whole,) = concatenated([_rounded(part, bits) for part in weight.split(rows)])
    return whole


def _rounded(weight: Tensor, bits: int) -> LowBit:
    out, width = weight.shape
    groups = weight.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    top, shift = (1 << bits) - 1, 128 if bits == 8 else 0  # 8-bit levels are stored minus 128
    least = torch.full_like(low, torch.inf)
    best = [torch.zeros_like(groups), 0.0 * (low + high), low]  # stays if an error is NaN
    for wider in _WIDER[bits]:
        scale, offset = (high - low) / (top + wider), low
        for _ in range(2):
            scale, offset = _least_squares(groups, _levels(groups, scale, offset, top), scale, offset)
        scale = scale.half().float()
        stored = (offset + shift * scale).half()
        offset = stored.float() - shift * scale
        levels = _levels(groups, scale, offset, top)
        error = (levels * scale + offset - groups).square_().sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        found = (levels, scale, stored.float())
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
    levels, scale, offset = best
    words, _ = pack_levels((levels - shift).view(out, width), bits)
    factors = torch.cat((scale, offset), 1).half().view(out, -1, 2)
    return LowBit(Layout(bits, "offset"), (out, width), words, None, factors)


def _levels(groups: Tensor, scale: Tensor, offset: Tensor, top: int) -> Tensor:
    return ((groups - offset) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, top)


def _least_squares(groups: Tensor, levels: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's least-squares scale and offset for its ``levels``.

    A group of equal levels keeps the given scale and offset.
    """
    mean_level, mean = levels.mean(1, keepdim=True), groups.mean(1, keepdim=True)
    spread = (levels - mean_level).square().sum(1, keepdim=True)
    slope = ((levels - mean_level) * (groups - mean)).sum(1, keepdim=True) / torch.where(spread == 0, 1.0, spread)
    scale = torch.where(spread == 0, scale, slope)
    return scale, torch.where(spread == 0, offset, mean - scale * mean_level)
