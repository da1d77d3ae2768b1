"""Layouts of matrices of 4 to 8 bits per weight in memory, with their packing and dequantization.

A row is divided into groups of 32 weights along the input. A weight is ``scale * (level - zero) + offset``; levels are
integers, or FP8 numbers. `Layout` says where scales, zeros and offsets come from. In memory, a weight takes as many
bits as in the stored formats that the layout is for:

=========  ========================================================================  =====================
layout     levels; scales                                                            stored formats
=========  ========================================================================  =====================
``plain``  one scale per group, one zero for all                                     Q4_0, Q5_0, Q8_0, IQ4_NL, int8
``zeros``  a scale and a zero per group                                              AWQ, GPTQ
``offset`` a scale and an offset per group                                           Q4_1, Q5_1
``super``  256 weights share a scale and an offset; 8 groups have 6-bit factors      Q4_K, Q5_K
``bytes``  256 weights share a scale; groups of 16 or 32 have 8-bit factors          Q6_K, IQ4_XS
``float``  levels of float8_e4m3fn; one scale per row                                FP8
=========  ========================================================================  =====================

Levels of up to 6 bits are stored in two planes: one of nibbles, and a *higher plane* of the bits above them. A 32-bit
word of nibbles has eight weights adjacent along the input, the first four in the low nibbles of its bytes and the next
four in the high nibbles. A word of 8-bit levels has four weights. The four are in bytes 0, 2, 1, 3. One mask extracts
four integers in bytes from a word. A mask and the exponent bits of 1,024 extract two adjacent weights as two float16.
The higher plane has the same order, for shifts of whole words: see `_high_shifts`. FP8 levels are stored row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

GROUP = 32  # weights
SUPER = 256  # weights that share a scale of their groups' scales
LARGEST_FP8 = 448.0  # of float8_e4m3fn
# Weights that a CPU packs or dequantizes at a time: their float32 values stay in its cache, and are few enough that the
# heap reuses their memory (`minillm.system.compact_heap`).
_ROUNDED_AT_ONCE = 1 << 22  # weights
AT_ONCE_ON_CPU = 1 << 17

Scales = Literal["plain", "zeros", "offset", "super", "bytes", "float"]


@dataclass(frozen=True)
class Layout:
    """The storage layout of a low-bit matrix. It is hashable, because each layout has its own compiled kernels."""

    bits: int  # per level: 4, 5, 6 or 8
    scales: Scales
    zero: int = 0  # subtracted from every level
    group: int = GROUP  # weights that share a scale: 16 (``bytes`` only), a multiple of 32, or 0 for the whole row
    table: bool = False  # a nibble is an index into `IQ4_TABLE`

    @property
    def words_per_group(self) -> int:
        """Number of 32-bit words per group in `LowBit.levels`."""
        return 8 if self.bits == 8 else 4

    @property
    def block(self) -> int:
        """Number of adjacent weights of a row that sharding must keep together."""
        return SUPER if self.scales in ("super", "bytes") else max(self.group, GROUP)


FP8 = Layout(8, "float", group=0)
# The levels of IQ4_NL and IQ4_XS (llama.cpp's ``kvalues_iq4nl``).
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class LowBit:
    """A low-bit matrix ``[out, in]``: its packed levels and scales."""

    layout: Layout
    shape: tuple[int, int]
    # [out, in / 32 * words_per_group] int32, 8-bit levels plus 128; ``float``: [out, in] float8_e4m3fn
    levels: Tensor
    high: Tensor | None  # [out, in / 32 * (bits - 4)] int32
    # ``plain``: [out, groups], a floating dtype. ``zeros``, ``offset``: [out, groups, 2] float16. ``super``: [out,
    # in / 256, 4] int32, see `pack_super`. ``bytes``: [out, in / group] int8. ``float``: [out, 1] float32.
    scales: Tensor
    units: Tensor | None = None  # ``bytes``: [out, in / 256] float16, the scales of the scales
    # [in] int32, the column of x that each column multiplies, if groups are not adjacent in x; None for FP8
    order: Tensor | None = None
    # Tile sizes measured on this card, by `bucket` of tokens: see `kernels.linear.low_bit.tuning`.
    tiles: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.levels.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors with levels and scales."""
        return sum(each.nbytes for each in (self.levels, self.high, self.scales, self.units) if each is not None)

    def rows(self, index: slice | Tensor) -> LowBit:
        """Return the matrix of the rows that ``index`` selects."""
        taken = [None if each is None else each[index] for each in (self.levels, self.high, self.scales, self.units)]
        assert taken[0] is not None
        return replace(
            self,
            shape=(taken[0].shape[0], self.shape[1]),
            levels=taken[0], high=taken[1], scales=taken[2], units=taken[3],  # type: ignore[arg-type]
        )  # fmt: skip


UNPACKED = ()  # a tile that means: dequantize the matrix first, because that is faster


def bucket(tokens: int) -> int:
    """Return the bucket of ``tokens``: the largest number of tokens that use the same tile. (Tensor cores take eight
    tokens at a time.)
    """
    return tokens if tokens <= 2 else max(8, 1 << (tokens - 1).bit_length())


def concatenated(matrices: list[LowBit | None]) -> tuple[LowBit, ...]:
    """Stack matrices by rows. Adjacent matrices of one layout become one matrix.

    Return an empty tuple if a matrix is missing, or if the matrices read the columns of x in different orders.
    """
    result: list[LowBit] = []
    for each in matrices:
        if each is None or (result and not _have_one_order(result[-1], each)):
            return ()
        if result and result[-1].layout == each.layout:
            result[-1] = _stacked(result[-1], each)
        else:
            result.append(each)
    return tuple(result)


def _have_one_order(first: LowBit, second: LowBit) -> bool:
    if first.order is None or second.order is None:
        return first.order is second.order
    return torch.equal(first.order, second.order)


def rows_of(matrices: tuple[LowBit, ...], rows: slice) -> list[LowBit]:
    """Return the given rows of ``matrices`` stacked by rows: a slice of each matrix that has any of these rows."""
    found, start = [], 0
    for each in matrices:
        first, end = max(0, rows.start - start), min(each.shape[0], rows.stop - start)
        if first < end:
            found.append(each.rows(slice(first, end)))
        start += each.shape[0]
    return found


def expanded(matrices: tuple[LowBit, ...]) -> Tensor:
    """Return the dequantized weights ``[out, in]`` float32 of matrices stacked by rows."""
    result = torch.empty(sum(each.shape[0] for each in matrices), matrices[0].shape[1], device=matrices[0].device)
    start = 0
    for each in matrices:
        step = max(1, AT_ONCE_ON_CPU // each.shape[1])  # in parts: all levels would take more memory than the result
        for first in range(0, each.shape[0], step):
            some = dequantize(each.rows(slice(first, first + step)))
            result[start + first : start + first + some.shape[0]] = some
        start += each.shape[0]
    return result


def padded(matrix: LowBit, rows: int) -> LowBit:
    """Append rows of zeros, so that the matrix has ``rows`` rows."""
    missing = rows - matrix.shape[0]
    if not missing:
        return matrix
    planes = (matrix.levels, matrix.high, matrix.scales, matrix.units)
    zeros = [None if each is None else each.new_zeros(missing, *each.shape[1:]) for each in planes]
    return _stacked(matrix, LowBit(matrix.layout, (missing, matrix.shape[1]), *zeros))  # type: ignore[arg-type]


def _stacked(first: LowBit, second: LowBit) -> LowBit:
    def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return None if one is None or other is None else torch.cat((one, other))

    return replace(
        first,
        shape=(first.shape[0] + second.shape[0], first.shape[1]),
        levels=torch.cat((first.levels, second.levels)), high=both(first.high, second.high),
        scales=torch.cat((first.scales, second.scales)), units=both(first.units, second.units),
    )  # fmt: skip


def random_matrix(layout: Layout, shape: tuple[int, int], deviation: float, generator: torch.Generator) -> LowBit:
    """Return a matrix of random levels. Its weights have mean zero and about ``deviation`` as standard deviation."""
    (out, width), device = shape, generator.device

    def random(low: int, high: int, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=device, dtype=dtype)

    def unit(value: float, *size: int) -> Tensor:
        return torch.full(size, value, dtype=torch.float16, device=device)

    if layout == FP8:
        weights = torch.randn(shape, generator=generator, device=device)
        return LowBit(FP8, shape, (weights * 32).to(torch.float8_e4m3fn), None, unit(deviation / 32, out, 1).float())
    words = random(-(1 << 31), 1 << 31, out, width // GROUP * layout.words_per_group)
    high, units = None, None
    if layout.bits in (5, 6):
        high = random(-(1 << 31), 1 << 31, out, width // GROUP * (layout.bits - 4))
    step = deviation / (0.289 * (1 << layout.bits))  # levels are uniform
    if layout.scales == "super":
        parts = random(32, 64, out, width // SUPER, 8)
        middle = step / 48 * ((1 << layout.bits) - 1) / 2
        scales = pack_super(parts, parts, unit(step / 48, out, width // SUPER), unit(middle, out, width // SUPER))
    elif layout.scales == "bytes":
        scales = random(64, 128, out, width // layout.group, dtype=torch.int8)
        units = unit(step / 96, out, width // SUPER)
    else:
        assert layout.scales == "plain", layout
        scales = unit(step, out, width // (layout.group or width))
    return LowBit(layout, shape, words, high, scales, units)


_BYTES = (0, 16, 8, 24)  # shifts of four adjacent weights in a word


def unpack_levels(matrix: LowBit) -> Tensor:
    """Return the levels ``[out, in]`` int32, from which zeros are not yet subtracted. FP8 levels are returned as they
    are.
    """
    out, width = matrix.shape
    if matrix.layout == FP8:
        return matrix.levels
    shifts = torch.tensor(_BYTES, dtype=torch.int32, device=matrix.device)
    if matrix.layout.bits == 8:
        return ((matrix.levels[..., None] >> shifts) & 255).view(out, width) - 128
    words = matrix.levels.view(out, width // GROUP, 4, 1, 1)  # [.., .., word, half, weight]
    levels = (words >> (shifts + 4 * torch.arange(2, dtype=torch.int32, device=matrix.device)[:, None])) & 15
    if matrix.high is not None:
        bits = matrix.layout.bits - 4
        high = matrix.high.view(out, width // GROUP, bits, 1, 1, 1)
        each = (high >> _high_shifts(bits, matrix.device)) & ((1 << bits) - 1)
        levels |= each.view_as(levels) << 4
    levels = levels.reshape(out, width)
    if matrix.layout.table:
        levels = torch.tensor(IQ4_TABLE, dtype=torch.int32, device=words.device)[levels.long()]
    return levels


def pack_levels(levels: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Pack ``levels [out, in]``. Return the words of `LowBit.levels` and `LowBit.high`.

    Levels are -128 to 127 with 8 bits, else 0 to ``2^bits - 1`` (also if they are indices into the table).
    """
    out, width = levels.shape
    shifts = torch.tensor(_BYTES, dtype=torch.int32, device=levels.device)
    if bits == 8:
        return ((levels.int() + 128).view(out, -1, 4) << shifts).sum(-1, dtype=torch.int32), None
    split = levels.to(torch.int32).view(out, width // GROUP, 4, 2, 4)  # group, word, half, weight
    halves = shifts + 4 * torch.arange(2, dtype=torch.int32, device=levels.device)[:, None]
    words = ((split & 15) << halves).sum((3, 4), dtype=torch.int32).flatten(1)
    if bits == 4:
        return words, None
    each = (split >> 4).view(out, width // GROUP, bits - 4, 4 // (bits - 4), 2, 4)
    high = (each << _high_shifts(bits - 4, levels.device)).sum((3, 4, 5), dtype=torch.int32)
    return words, high.flatten(1)


def _high_shifts(bits: int, device: torch.device) -> Tensor:
    """Return how far to shift a word of the higher plane to get the upper bits of each weight.

    ``bits`` is the number of upper bits of a weight. One word of the higher plane has the upper bits for ``4 // bits``
    words of nibbles. The result is ``[4 // bits, 2, 4]``. Its dimensions are: the word of nibbles; low or high nibbles
    of this word; the four nibbles.
    """
    word, half, at = (torch.arange(size, dtype=torch.int32, device=device) for size in (4 // bits, 2, 4))
    return 4 * bits * word[:, None, None] + 2 * bits * half[:, None] + bits * (at >> 1) + 16 * (at & 1)


def pack_super(scales: Tensor, mins: Tensor, unit: Tensor, min_unit: Tensor) -> Tensor:
    """Pack 6-bit ``scales`` and ``mins [out, supers, 8]``, and their float16 units, into words ``[out, supers, 4]``.

    The words are: the low 4 bits of the scales; those of the mins; the high 2 bits of both; both units.
    """
    at = torch.arange(8, dtype=torch.int32, device=scales.device)
    scales, mins = scales.int(), mins.int()
    low = ((scales & 15) << 4 * at).sum(-1, dtype=torch.int32)
    low_mins = ((mins & 15) << 4 * at).sum(-1, dtype=torch.int32)
    high = (((scales >> 4) << 2 * at) | ((mins >> 4) << (16 + 2 * at))).sum(-1, dtype=torch.int32)
    units = torch.stack((unit, min_unit), -1).half().contiguous().view(torch.int32).squeeze(-1)
    return torch.stack((low, low_mins, high, units), -1)


def in_eight_bits(weight: Tensor) -> LowBit:
    """Quantize a matrix ``[out, in]`` to 8 bits. Each group of 32 has one scale, from its largest weight."""
    out, width = weight.shape
    parts = [_in_eight_bits(rows) for rows in weight.split(max(1, _ROUNDED_AT_ONCE // max(1, width)))]
    words, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return LowBit(Layout(8, "plain"), (out, width), words, None, scales)


def _in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words and scales of `in_eight_bits` for some of the matrix's rows."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).half()
    levels = torch.where(scales[..., None] == 0, 0.0, groups / scales[..., None].float()).round_().clamp_(-127, 127)
    return pack_levels(levels.flatten(1), 8)[0], scales


def in_fp8(weight: Tensor) -> LowBit:
    """Quantize a matrix ``[out, in]`` to FP8.

    Each row has one scale, from its largest weight; a NaN makes the row NaN.
    """
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST_FP8
    levels = (wide / torch.where(scales == 0, 1.0, scales)).to(torch.float8_e4m3fn)
    return LowBit(FP8, (weight.shape[0], weight.shape[1]), levels, None, scales)


def factors(matrix: LowBit, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``scales``, ``zeros`` and ``offsets`` of every group, each ``[out, groups]``, in ``dtype``.

    Groups are of 16 or 32 weights; in FP8 a row is one group.
    """
    layout, (out, width) = matrix.layout, matrix.shape
    groups = 1 if layout == FP8 else width // min(layout.group or width, GROUP)
    none = torch.zeros(1, 1, dtype=dtype, device=matrix.device).expand(out, groups)

    def spread(values: Tensor) -> Tensor:
        wide, times = values.to(dtype), groups // values.shape[1]
        return wide if times == 1 else wide.repeat_interleave(times, 1)

    if layout.scales in ("zeros", "offset"):
        scales, others = (spread(each) for each in matrix.scales.unbind(-1))
        return (scales, others, none) if layout.scales == "zeros" else (scales, none, others)
    if layout.scales == "super":
        low, low_mins, high, units = matrix.scales.unbind(-1)
        at = torch.arange(8, dtype=torch.int32, device=matrix.device)
        unit, min_unit = units.contiguous().view(torch.float16).view(out, -1, 2).to(dtype).unbind(-1)
        parts = (low[..., None] >> 4 * at) & 15 | ((high[..., None] >> 2 * at) & 3) << 4
        mins = (low_mins[..., None] >> 4 * at) & 15 | ((high[..., None] >> (16 + 2 * at)) & 3) << 4
        return (parts * unit[..., None]).flatten(1), none, (mins * -min_unit[..., None]).flatten(1)
    zeros = none + layout.zero
    if layout.scales == "bytes":
        assert matrix.units is not None
        return spread(matrix.units) * spread(matrix.scales), zeros, none
    return spread(matrix.scales), zeros, none


def dequantize(matrix: LowBit, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights ``[out, in]`` in ``dtype``, with columns in the order of x.

    The weights are computed in the wider of ``dtype`` and float32.
    """
    wide = torch.promote_types(dtype, torch.float32)
    scales, zeros, offsets = (each[..., None] for each in factors(matrix, wide))
    levels = unpack_levels(matrix).to(wide).view(matrix.shape[0], scales.shape[1], -1)
    weights = (scales * (levels - zeros) + offsets).flatten(1).to(dtype)
    if matrix.order is None:
        return weights
    result = torch.empty_like(weights)
    result[:, matrix.order] = weights
    return result
