"""Unpack quantized matrices of safetensors to levels. Then dequantize the levels, or pack them for the low-bit kernels.

A level is a weight's quantized integer. A weight is ``scale * (level - zero)``. A group of weights that are adjacent
along the input shares a scale and a zero. `kernels.linear.low_bit.layouts` describes the kernels' layouts. The stored
tensors of a matrix ``[out, in]`` are:

==================  ==========================================================================================
gptq                qweight ``[in / n, out]``, qzeros ``[groups, out / n]``, scales ``[groups, out]``, g_idx ``[in]``
awq                 qweight ``[in, out / 8]``, qzeros ``[groups, out / 8]``, scales ``[groups, out]``
packed              weight_packed ``[out, in / n]``, weight_scale ``[out, groups]``, zeros ``[out / n, groups]``
int8                weight ``[out, in]``, weight_scale and weight_zero_point ``[out, groups]`` or a single number
fp8                 weight ``[out, in]``, weight_scale ``[out, 1]``, a single number, or one number per block
==================  ==========================================================================================

A packed int32 word has ``n`` levels of 32 / n bits, the first in the lowest bits. AWQ permutes the eight levels of a
word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels import LowBit
from minillm.kernels.linear.low_bit.layouts import FP8, GROUP, Layout, pack_levels
from minillm.weights.quantized import BITS, Quantization, Quantized

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of column 0, 1, 2, …
# The last name components of a quantized matrix's tensors: the tensor with the levels, and all others.
FIRST = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight", "fp8": "weight"}
OTHERS = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"),
    *("weight_g_idx", "input_scale", "activation_scale", "input_zero_point", "k_scale", "v_scale"),
)


@dataclass(frozen=True)
class Levels:
    """A matrix's levels ``[out, in]`` int32, scales and zeros ``[out, groups]``, and each column's group ``[in]``."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor | None  # None if each group is a run of adjacent columns, and all are equally long

    def numbers(self) -> Tensor:
        """Return the dequantized weights ``[out, in]`` float32."""
        width, count = self.levels.shape[1], self.scales.shape[1]
        groups = torch.arange(width, device=self.levels.device) // (width // count)
        groups = groups if self.groups is None else self.groups
        return (self.levels - self.zeros[:, groups]) * self.scales.float()[:, groups]

    def low_bit(self, bits: int, rows: slice, columns: slice) -> LowBit | None:
        """Return some rows and columns in the kernels' layout ``zeros``, or None if it cannot represent them.

        If groups are not runs of adjacent columns (``desc_act``, ``actorder``), the columns are reordered. This needs
        all columns, and groups of equal size. The layout cannot represent a group size that is not a multiple of 32, a
        group split by ``columns``, or a scale that is not exact in float16.
        """
        width, count = self.levels.shape[1], self.scales.shape[1]
        size, scales = width // count, self.scales.half()
        unit = GROUP if count == 1 else size  # a row with a single scale can be split anywhere
        if width % GROUP or unit % GROUP or columns.start % unit or columns.stop % unit:
            return None
        if not torch.equal(scales.float(), self.scales.float()):
            return None
        shift, order = 128 if bits == 8 else 0, None
        taken = slice(columns.start // size, max(1, columns.stop // size))
        levels = self.levels[rows, columns] - shift
        if self.groups is not None:
            if levels.shape[1] != width or bool((self.groups.bincount(minlength=count) != size).any()):
                return None
            order = self.groups.argsort(stable=True)
            levels = levels[:, order]
        words, high = pack_levels(levels, bits)
        factors = torch.stack((scales, (self.zeros - shift).half()), -1)[rows, taken].contiguous()
        return LowBit(
            Layout(bits, "zeros", group=0 if count == 1 else size),
            (levels.shape[0], levels.shape[1]),
            words,
            high,
            factors,
            order=None if order is None else order.int(),
        )


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _words(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words ``[rows, words]`` to levels ``[rows, words * 32 / bits]``."""
    _need(packed.dtype == torch.int32 and packed.dim() == 2, "packed levels are not a matrix of int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def recognized(
    config: Quantization, parts: Mapping[str, tuple[int, ...]], in_fp8: bool, weight_shape: tuple[int, ...] = ()
) -> tuple[Quantized, tuple[int, ...]]:
    """Determine a quantized matrix's storage format and shape ``[out, in]`` from the shapes of its stored tensors.

    Args:
        parts: the last component of a stored tensor's name, such as "qweight" -> its shape.
        in_fp8: whether the tensor ``weight``, if there is one, is FP8 rather than int8.
        weight_shape: the content of the tensor ``weight_shape``; empty if there is no such tensor.

    Raises:
        ValueError: the shapes match no supported layout.
    """
    if first := parts.get("qweight"):
        zeros, scales = (_matrix(parts, name) for name in ("qzeros", "scales"))
        _need(len(first) == 2 and scales[1] > 0, "its qweight is not a matrix")
        bits = _supported(32 * zeros[1] / scales[1])
        if first[1] != scales[1]:  # words along the output
            _need(bits == 4, "AWQ has 4 bits only")
            return Quantized("awq", bits), (first[1] * 8, first[0])
        return Quantized("gptq", bits, config.zero_offset), (first[1], first[0] * 32 // bits)
    if first := parts.get("weight_packed"):
        _need(len(first) == 2, "its weight_packed is not a matrix")
        fitting = [bits for bits in (*config.bits, *BITS) if not weight_shape or _words_of(weight_shape, bits) == first]
        _need(bool(fitting), f"words {list(first)} hold no matrix {list(weight_shape)} of 4 or 8 bits")
        return Quantized("packed", fitting[0]), weight_shape or (first[0], first[1] * 32 // fitting[0])
    shape = parts["weight"]
    if not in_fp8:
        return Quantized("int8"), shape
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale") or ()
    return Quantized("fp8", block=_block(config, shape, scale)), shape


def _matrix(parts: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    _need(name in parts, f"it has no {name}")
    _need(len(parts[name]) == 2, f"its {name} is not a matrix")
    return parts[name]


def _supported(bits: float) -> int:
    _need(bits in BITS, f"its levels have {bits:g} bits; supported: 4, 8")
    return int(bits)


def _words_of(shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Return the shape of a tensor of int32 words that contains a matrix of ``shape`` with ``bits`` bits per level."""
    return shape[0], -(-shape[1] * bits // 32)


def _block(config: Quantization, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the size (rows, columns) of the blocks that share an FP8 scale.

    Return None if the matrix has one scale per row or a single scale. ``scale`` is the shape of the scales.
    """
    if len(shape) != 2 or len(scale) != 2 or math.prod(scale) in (1, shape[0]):
        return None
    for high, wide in config.blocks:
        if scale == (-(-shape[0] // high), -(-shape[1] // wide)):
            return high, wide
    fits = min(scale) > 0 and not shape[0] % scale[0] and not shape[1] % scale[1]
    _need(fits, f"its scales {list(scale)} do not fit blocks of a matrix {list(shape)}")
    return shape[0] // scale[0], shape[1] // scale[1]


def unpack(form: Quantized, shape: tuple[int, ...], read: Callable[[str], Tensor | None]) -> Levels:
    """Unpack a quantized matrix of ``shape`` and storage format ``form``.

    Args:
        read: returns a stored tensor of the matrix by the last component of its name, or None if there is none.

    Raises:
        ValueError: tensors are missing or do not fit together.
    """

    def found(name: str) -> Tensor:
        tensor = read(name)
        if tensor is None:
            raise ValueError(f"it has no {name}")
        return tensor

    (out, width), bits, first = shape, form.bits, found(FIRST[form.method])
    groups = read("weight_g_idx" if form.method in ("packed", "int8") else "g_idx")
    if form.method in ("gptq", "awq"):
        scales, raw_zeros = found("scales").t(), _words(found("qzeros"), bits)
        if form.method == "awq":
            order = torch.tensor(_AWQ_ORDER, device=first.device)
            levels, raw_zeros = (
                each.unflatten(1, (-1, 8))[..., order].flatten(1) for each in (_words(first, 4), raw_zeros)
            )
            levels = levels.t()
        else:
            levels = _words(first.t(), bits)
        zeros = (raw_zeros.t() + form.zero_offset) & ((1 << bits) - 1)
    else:
        scales = _by_rows(found("weight_scale"), out)
        half, stored = 1 << (bits - 1), read("weight_zero_point")
        if form.method == "packed":
            levels = _words(first, bits)[:, :width]
        else:
            _need(first.dtype == torch.int8, "its levels are not int8")
            levels = first.int() + half
        if stored is None:
            zeros = torch.full_like(scales, half, dtype=torch.int32)
        elif stored.dtype == torch.int32:
            zeros = _words(stored.t(), bits).t()[:out]
        else:
            _need(stored.dtype == torch.int8, "its zeros are neither int8 nor int32")
            zeros = (stored.int() + half).reshape(-1, scales.shape[1]).expand(out, -1)
    count = scales.shape[1] if scales.dim() == 2 else 0
    _need(levels.shape == shape, f"its levels are {list(levels.shape)}, not {list(shape)}")
    _need(scales.is_floating_point() and count > 0 and scales.shape[0] == out, "its scales do not fit")
    _need(zeros.shape == scales.shape, "its zeros do not fit")
    if groups is not None:
        _need(groups.shape == (width,) and not groups.is_floating_point(), "its g_idx does not fit")
        groups = groups.long()
        _need(width == 0 or 0 <= int(groups.min()) <= int(groups.max()) < count, "its g_idx has no such group")
        runs = torch.arange(width, device=groups.device) // max(1, width // count)
        groups = None if width % count == 0 and torch.equal(groups, runs) else groups
    _need(groups is not None or width % count == 0, f"rows of {width} cannot be {count} groups")
    return Levels(levels, scales, zeros, groups)


def _by_rows(scales: Tensor, out: int) -> Tensor:
    """Expand scales to ``[out, groups]``. They may be stored per matrix, per row or per block of rows."""
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    _need(scales.dim() == 2 and scales.shape[0] > 0, "its scales are not a matrix")
    rows, rest = divmod(out, scales.shape[0])
    return scales if rest else scales.repeat_interleave(rows, 0)


def fp8_planes(form: Quantized, read: Callable[[str], Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return the FP8 levels ``[out, in]`` and the float32 scales of a matrix.

    The scales are ``[out, 1]``. If blocks of the matrix have scales, these are expanded to ``[out, in]``. Raises
    ValueError if scales are missing or do not fit.
    """
    first, inverse = read("weight"), read("weight_scale_inv")
    scale = read("weight_scale") if inverse is None else inverse
    if first is None or scale is None:
        raise ValueError("it has no weight_scale")
    _need(scale.is_floating_point(), "its scales are not numbers")
    (rows, columns), scale = first.shape, scale.float()
    if form.block is not None:
        high, wide = form.block
        _need(scale.shape == (-(-rows // high), -(-columns // wide)), "its scales do not fit")
        scale = scale.repeat_interleave(min(high, rows), 0)[:rows].repeat_interleave(min(wide, columns), 1)[:, :columns]
    else:
        _need(scale.numel() in (1, rows), "its scales do not fit")
        scale = scale.reshape(-1, 1).expand(rows, 1)
    return first, scale


def fp8_matrix(levels: Tensor, scales: Tensor) -> LowBit:
    """Combine FP8 levels ``[out, in]`` and scales ``[out, 1]`` to a matrix in the kernels' layout ``float``."""
    return LowBit(FP8, (levels.shape[0], levels.shape[1]), levels.contiguous(), None, scales.contiguous())
