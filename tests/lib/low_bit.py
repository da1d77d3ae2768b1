"""Random low-bit matrices of every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lib.kernels import DEVICE
from minillm.kernels.linear.low_bit.layouts import Layout, LowBit, pack_levels, pack_super

if TYPE_CHECKING:
    from minillm.kernels.linear.low_bit.few_tokens import Float16Activations

LAYOUTS = {
    "q4_0": Layout(4, "plain", zero=8),
    "q4_1": Layout(4, "offset"),
    "q5_0": Layout(5, "plain", zero=16),
    "q5_1": Layout(5, "offset"),
    "q8_0": Layout(8, "plain"),
    "q4_k": Layout(4, "super"),
    "q5_k": Layout(5, "super"),
    "q6_k": Layout(6, "bytes", zero=32, group=16),
    "iq4_nl": Layout(4, "plain", table=True),
    "iq4_xs": Layout(4, "bytes", table=True),
    "awq": Layout(4, "zeros", group=128),
    "int8 rows": Layout(8, "plain", group=0),
}


def some(layout: Layout, out: int, width: int, seed: int = 0) -> LowBit:
    """Return a matrix of random levels, and random scales of both signs with some zeros."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        values = torch.rand(size, generator=generator) - 0.5
        return torch.where(torch.rand(size, generator=generator) < 0.1, 0.0, values).half() / 50

    low = -128 if layout.bits == 8 else 0
    levels = torch.randint(low, low + (1 << layout.bits), (out, width), generator=generator)
    words, high = pack_levels(levels, layout.bits)
    units = None
    groups = width // (layout.group or width)
    if layout.scales == "plain":
        scales = uniform(out, groups)
    elif layout.scales == "super":
        parts, mins = torch.randint(0, 64, (2, out, width // 256, 8), generator=generator)
        scales = pack_super(parts, mins, uniform(out, width // 256) / 16, uniform(out, width // 256) / 16)
    elif layout.scales == "bytes":
        scales = torch.randint(-128, 128, (out, groups), generator=generator).to(torch.int8)
        units = uniform(out, width // 256) / 32
    else:
        others = torch.randint(0, 16, (out, groups), generator=generator).half()
        scales = torch.stack((uniform(out, groups), uniform(out, groups) if layout.scales == "offset" else others), -1)
    planes = [None if each is None else each.to(DEVICE) for each in (words, high, scales, units)]
    return LowBit(layout, (out, width), *planes)  # type: ignore[arg-type]


def columns(activations: Float16Activations) -> Tensor:
    """Return the numbers ``[tokens, turns * 128]`` that the next matmul reads."""
    eights, turns = activations.x.shape[:2]
    x = activations.x.permute(0, 3, 1, 4, 2, 5).reshape(eights * 8, turns * 128)
    tokens = activations.scales.shape[0]
    return x[:tokens].double() * (activations.scales.double() * 64)[:, None]
