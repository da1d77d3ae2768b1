"""Convert GGUF's quantized matrices to the kernels' layouts (`kernels.linear.low_bit.layouts`), on any device.

ggml's ``ggml-common.h`` and ``ggml-quants.c`` define the formats. A row consists of blocks of 32 or 256 weights with
their scales. The conversion is exact: it changes no scale and no level. In this file, a level is a weight's quantized
integer, and ``raw`` is a uint8 tensor with the bytes of each block: ``[out, blocks, bytes]``.
"""

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from minillm.kernels.linear.low_bit.layouts import AT_ONCE_ON_CPU, GROUP, SUPER, Layout, LowBit, pack_levels, pack_super

_AT_ONCE = 1 << 24  # weights converted at a time on a GPU, so that temporaries stay small next to the model


def _float16_values(raw: Tensor, at: int, count: int = 1) -> Tensor:
    """Return ``count`` float16 numbers of each block, the first at byte ``at``: ``[out, blocks, count]``."""
    return raw[..., at : at + 2 * count].contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Unpack 16 bytes to 32 levels, ``[out, blocks, 32]``.

    The low nibbles of all bytes come first, then their high nibbles.
    """
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """Unpack 4 bytes to their 32 bits, ``[out, blocks, 32]``: each is 0 or 1, the lowest bit of a byte first."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(-2)


# Levels [out, blocks, weights]; scales [out, blocks, …]; for the layout ``bytes``, also each block's own scale.
Parts = tuple[Tensor, Tensor, Tensor | None]


def _q4_0(raw: Tensor) -> Parts:
    return _nibbles(raw[..., 2:]), _float16_values(raw, 0), None


def _q4_1(raw: Tensor) -> Parts:
    return _nibbles(raw[..., 4:]), _float16_values(raw, 0, 2), None


def _q5_0(raw: Tensor) -> Parts:
    return _nibbles(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4, _float16_values(raw, 0), None


def _q5_1(raw: Tensor) -> Parts:
    return _nibbles(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4, _float16_values(raw, 0, 2), None


def _q8_0(raw: Tensor) -> Parts:
    return raw[..., 2:].contiguous().view(torch.int8), _float16_values(raw, 0), None


def _super_scales(raw: Tensor) -> Tensor:
    """Return the scales and minima of K-quants blocks, packed for the layout ``super``: see `pack_super`.

    Each group of 32 weights has a 6-bit scale and a 6-bit minimum (ggml's ``get_scale_min_k4``). The block has two
    float16 numbers: one multiplies all its scales, the other all its minima.
    """
    packed = raw[..., 4:16].int()
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), -1)
    units = _float16_values(raw, 0, 2)
    return pack_super(scales, mins, units[..., 0], units[..., 1])


def _pairs_of_groups(raw: Tensor) -> Tensor:
    """Unpack 128 bytes to 256 levels, ``[out, blocks, 4, 2, 32]``.

    Every 32 bytes have two groups of 32 levels: the low nibbles are the first group, and the high nibbles are the
    second.
    """
    runs = raw.unflatten(-1, (4, 1, GROUP))
    return torch.cat((runs & 15, runs >> 4), -2)


def _q4_k(raw: Tensor) -> Parts:
    return _pairs_of_groups(raw[..., 16:]).flatten(-3), _super_scales(raw), None


def _q5_k(raw: Tensor) -> Parts:
    group = torch.arange(8, dtype=torch.uint8, device=raw.device).view(4, 2, 1)
    fifth = (raw[..., None, None, 16:48] >> group) & 1
    return (_pairs_of_groups(raw[..., 48:]) | fifth << 4).flatten(-3), _super_scales(raw), None


def _q6_k(raw: Tensor) -> Parts:
    low = raw[..., :128].unflatten(-1, (2, 1, 64))  # 64 bytes for each half of the block
    low = torch.cat((low & 15, low >> 4), -2).unflatten(-1, (2, GROUP))  # [.., half, low or high nibbles, 2, 32]
    high = raw[..., 128:192].unflatten(-1, (2, 1, 1, GROUP))
    shifts = torch.tensor([[0, 2], [4, 6]], dtype=torch.uint8, device=raw.device)[..., None]
    levels = low | ((high >> shifts) & 3) << 4
    return levels.flatten(-4), raw[..., 192:208].contiguous().view(torch.int8), _float16_values(raw, 208)


def _iq4_xs(raw: Tensor) -> Parts:
    group = torch.arange(8, dtype=torch.int32, device=raw.device)
    high = (raw[..., 2:3].int() | raw[..., 3:4].int() << 8) >> 2 * group
    low = raw[..., 4:8].int().repeat_interleave(2, -1) >> 4 * (group % 2)
    scales = ((low & 15) | (high & 3) << 4) - 32
    return _nibbles(raw[..., 8:].unflatten(-1, (8, 16))).flatten(-2), scales.to(torch.int8), _float16_values(raw, 0)


_TYPES: dict[Type, tuple[Layout, Callable[[Tensor], Parts]]] = {
    Type.Q4_0: (Layout(4, "plain", zero=8), _q4_0),
    Type.Q4_1: (Layout(4, "offset"), _q4_1),
    Type.Q5_0: (Layout(5, "plain", zero=16), _q5_0),
    Type.Q5_1: (Layout(5, "offset"), _q5_1),
    Type.Q8_0: (Layout(8, "plain"), _q8_0),
    Type.Q4_K: (Layout(4, "super"), _q4_k),
    Type.Q5_K: (Layout(5, "super"), _q5_k),
    Type.Q6_K: (Layout(6, "bytes", zero=32, group=16), _q6_k),
    Type.IQ4_NL: (Layout(4, "plain", table=True), _q4_0),
    Type.IQ4_XS: (Layout(4, "bytes", table=True), _iq4_xs),
}


def low_bit(raw: Tensor, kind: Type, width: int) -> LowBit:
    """Convert a matrix of GGUF type ``kind`` to the kernels' layout.

    ``raw [out, bytes]`` uint8 are the bytes of its rows, each of ``width`` weights. Only some rows are converted at a
    time, which bounds the memory for temporaries.
    """
    layout, take_apart = _TYPES[kind]
    size = SUPER if layout.scales in ("super", "bytes") else GROUP
    rows = max(1, (AT_ONCE_ON_CPU if raw.device.type == "cpu" else _AT_ONCE) // width)
    slabs = []
    for slab in raw.split(rows):
        levels, scales, units = take_apart(slab.unflatten(1, (width // size, -1)))
        words, high = pack_levels(levels.flatten(1), layout.bits)
        if layout.scales in ("plain", "bytes"):
            scales = scales.flatten(1)
        slabs.append((words, high, scales.contiguous(), None if units is None else units.flatten(1)))
    planes = [None if part[0] is None else torch.cat(part) for part in zip(*slabs, strict=True)]
    assert planes[0] is not None
    assert planes[2] is not None
    return LowBit(layout, (raw.shape[0], width), planes[0], planes[1], planes[2], planes[3])
