"""Low-bit matrices times more than a few tokens, and their rows unpacked: for embeddings, and for cuBLAS.

`_matmul_kernel`: grid (out features / ROWS, splits of the input, tokens / TOKENS). A tile of ROWS x GROUPS groups of 32
weights becomes numbers of x's dtype in registers, as the dequantised matrix would be, and goes through the matrix unit
as the left operand. Bytes: the matrix, once for each TOKENS tokens. A matrix with few rows is split along the input as
well; `_sum_kernel` then adds the parts in their order, so results do not depend on chance.

`_dequantise_kernel`: grid (rows / ROWS, groups / GROUPS); reads the matrix or the chosen rows, writes them unpacked.
"""

import functools
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import INTERPRETED, dot, pdl_options, wait_for_inputs
from minillm.kernels.low_bit import GROUP, LowBit
from minillm.kernels.low_bit_tiles import _look_up, level_bytes, load_factors, load_levels


@triton.jit
def _bytes(words):
    """The four signed bytes of each word in order, float32: ``[rows, groups, 4, 2, 2]``."""
    first = ((words << 24) >> 24).to(tl.float32)
    second = ((words << 16) >> 24).to(tl.float32)
    third = ((words << 8) >> 24).to(tl.float32)
    fourth = (words >> 24).to(tl.float32)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _weights(levels, factors, ROWS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """The tile's weights ``[rows, groups * 32]`` in float32."""
    low, upper = level_bytes(levels[0], levels[1], levels[2], BITS, TABLE)
    first_scale, second_scale, zero, offset = factors
    zero, offset = zero[:, :, None, None, None], offset[:, :, None, None, None]
    first = first_scale[:, :, None, None, None] * (_bytes(low) - zero) + offset
    second = second_scale[:, :, None, None, None] * (_bytes(upper) - zero) + offset
    both = tl.join(first, second)  # [rows, groups, word, 2, 2, half]
    return tl.reshape(tl.permute(both, (0, 1, 5, 2, 3, 4)), [ROWS, GROUPS * 32])


def _code(bits: int, zero: int) -> str:
    """PTX that makes float16 weights of four bytes of the first plane: ``(level - zero) * scale + offset``.

    A level becomes a float16 number by its bits: ``0x6400 | level`` is 1,024 + level, and ``0x6400 | 16 * level`` is
    1,024 + 16 * level. Both differences that undo it are exact. (Kim et al. 2022 do so with bytes.) Inputs are the four
    bytes in a register, for 5 and 6 bits those of the higher plane, scales and offsets, two to a register; of 6 bits
    both halves'. Outputs: low halves, then high halves; of 8 bits one tensor only. Two bytes next to each other in a
    register are neighbours along the input, but the compiler chooses where the other two lie: they have another scale.
    """

    def pair(value: float) -> str:
        number = struct.unpack("<H", struct.pack("<e", value))[0]
        return f"0x{number:04x}{number:04x}"

    lines = ["{", ".reg .b32 u, h, t, k, m;"]
    if bits == 8:
        lines += ["xor.b32 u, $2, 0x80808080;", "mov.b32 h, 0x64646464;", f"mov.b32 k, {pair(1152 + zero)};"]
        for out, chosen in enumerate(("0x4140", "0x4342")):
            lines += [f"prmt.b32 t, u, h, {chosen};", "sub.rn.f16x2 t, t, k;"]
            lines += [f"fma.rn.f16x2 ${out}, t, ${3 + out}, ${5 + out};"]
        return "\n".join([*lines, "}"])
    first = 5 if bits == 4 else 6  # the number of the first scale's register
    lines += [f"mov.b32 m, {pair(1 / 16)};"]
    for each, chosen in enumerate(("0x4140", "0x4342")):
        lines += [f"prmt.b32 u, $4, 0, {chosen};"]
        if bits > 4:  # a byte for two bytes of the first plane: its lower half is the first one's
            lines += [
                f"prmt.b32 h, $5, 0, 0x444{2 * each};",
                f"shl.b32 t, h, {12 if bits == 6 else 14};",
                "or.b32 h, h, t;",
            ]
        for high, mask in ((False, "0x000F000F"), (True, "0x00F000F0")):
            lines += [f"lop3.b32 t, u, {mask}, 0x64006400, 0xEA;"]
            if bits > 4:
                shift = (6 if bits == 6 else 7) if high else 4
                kept = (0x0300 if bits == 6 else 0x0100) if high else (0x30 if bits == 6 else 0x10)
                lines += [f"shl.b32 k, h, {shift};", f"lop3.b32 t, k, 0x{kept:04x}{kept:04x}, t, 0xEA;"]
            if high:
                lines += [f"mov.b32 k, {pair(-64 - zero)};", "fma.rn.f16x2 t, t, m, k;"]
            else:
                lines += [f"mov.b32 k, {pair(1024 + zero)};", "sub.rn.f16x2 t, t, k;"]
            half = 2 if high and bits == 6 else 0  # scales of the high halves follow
            scale, offset = first + half + each, first + (4 if bits == 6 else 2) + half + each
            lines += [f"fma.rn.f16x2 ${2 * high + each}, t, ${scale}, ${offset};"]
    return "\n".join([*lines, "}"])


@triton.jit
def _spread(values, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """``[rows, groups]`` repeated for each of a group's bytes: ``[rows, groups * EACH]``."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, GROUPS, EACH]), [ROWS, GROUPS * EACH])


@triton.jit
def _half_weights(
    bytes_, high_bytes, first_scale, second_scale, first_offset, second_offset,
    BITS: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Weights of the low halves of ``bytes_`` and of the high ones, float16; of 8 bits the bytes' own, twice."""
    if CODE != "":
        if BITS == 8:
            low = tl.inline_asm_elementwise(
                CODE, "=r,=r,r,r,r,r,r", [bytes_, first_scale, first_offset], dtype=tl.float16, is_pure=True, pack=4
            )
            high = low
        elif BITS == 4:
            low, high = tl.inline_asm_elementwise(
                CODE, "=r,=r,=r,=r,r,r,r,r,r", [bytes_, first_scale, first_offset],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        elif BITS == 5:
            low, high = tl.inline_asm_elementwise(
                CODE, "=r,=r,=r,=r,r,r,r,r,r,r", [bytes_, high_bytes, first_scale, first_offset],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                CODE, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [bytes_, high_bytes, first_scale, second_scale, first_offset, second_offset],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    elif BITS == 8:
        level = bytes_.to(tl.int8, bitcast=True).to(tl.float32)
        low = ((level - ZERO) * first_scale.to(tl.float32) + first_offset.to(tl.float32)).to(tl.float16)
        high = low
    else:
        level = bytes_.to(tl.int32)
        first, second = level & 15, level >> 4
        if TABLE:
            first, second = (_look_up(first) << 24) >> 24, (_look_up(second) << 24) >> 24
        if BITS > 4:
            PLANES: tl.constexpr = BITS - 4
            above = high_bytes.to(tl.int32) >> (2 * PLANES * (tl.arange(0, bytes_.shape[1]) % 2))[None, :]
            first |= (above & ((1 << PLANES) - 1)) << 4
            second |= ((above >> PLANES) & ((1 << PLANES) - 1)) << 4
        low = (first - ZERO).to(tl.float32) * first_scale.to(tl.float32) + first_offset.to(tl.float32)
        high = (second - ZERO).to(tl.float32) * second_scale.to(tl.float32) + second_offset.to(tl.float32)
        low, high = low.to(tl.float16), high.to(tl.float16)
    return low, high


@triton.jit
def _matmul_kernel(
    out_ptr, parts_ptr, x_ptr, x_scales_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, bias_ptr,
    num_tokens, num_rows, num_groups, out_stride,
    ADD: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    EACH: tl.constexpr = 32 if BITS == 8 else 16  # bytes of a group in the first plane
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    lanes, places = tl.arange(0, GROUPS), tl.arange(0, GROUPS * EACH)
    group_of = places // EACH
    columns = group_of * 32 + places % EACH
    tiles = tl.cdiv(num_groups, GROUPS)
    each = tl.cdiv(tiles, SPLITS)
    begin = tl.program_id(1) * each
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    is_row, is_token = rows < num_rows, tokens < num_tokens
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * num_groups * 32 + columns[:, None]
    bytes_at = levels_ptr + rows.to(tl.int64)[:, None] * num_groups * EACH + places[None, :]
    for tile in tl.range(begin, min(begin + each, tiles), num_stages=STAGES):
        groups = tile * GROUPS + lanes
        is_place = tile * GROUPS + group_of < num_groups
        bytes_ = tl.load(bytes_at + tile * GROUPS * EACH, mask=is_row[:, None] & is_place[None, :], other=0)
        high_bytes = bytes_
        if BITS == 5:  # a byte for four bytes of the first plane
            fours = tile * GROUPS * 4 + tl.arange(0, GROUPS * 4)
            mask = is_row[:, None] & (fours < num_groups * 4)[None, :]
            high_bytes = _spread(
                tl.load(high_ptr + (rows * num_groups)[:, None] * 4 + fours[None, :], mask=mask, other=0),
                ROWS, GROUPS * 4, 4,
            )  # fmt: skip
            high_bytes = high_bytes >> (4 * (places // 2 % 2)).to(tl.uint8)[None, :]
        elif BITS == 6:  # a byte for two
            twos = tile * GROUPS * 8 + tl.arange(0, GROUPS * 8)
            mask = is_row[:, None] & (twos < num_groups * 8)[None, :]
            high_bytes = _spread(
                tl.load(high_ptr + (rows * num_groups)[:, None] * 8 + twos[None, :], mask=mask, other=0),
                ROWS, GROUPS * 8, 2,
            )  # fmt: skip
        first, second, zero, offset = load_factors(
            scales_ptr, units_ptr, rows, groups, num_rows, num_groups, SCALES, GROUP, 0
        )
        if SCALES == "zeros":
            offset = -zero * first
        first_scale = _spread((first * 64.0).to(tl.float16), ROWS, GROUPS, EACH)
        first_offset = _spread((offset * 64.0).to(tl.float16), ROWS, GROUPS, EACH)
        second_scale, second_offset = first_scale, first_offset
        if GROUP == 16:
            second_scale = _spread((second * 64.0).to(tl.float16), ROWS, GROUPS, EACH)
        low, high = _half_weights(
            bytes_, high_bytes, first_scale, second_scale, first_offset, second_offset, BITS, ZERO, TABLE, CODE
        )
        x_mask = is_token[None, :] & is_place[:, None]
        x = tl.load(x_at + tile * GROUPS * 32, mask=x_mask, other=0.0)
        total = dot(low, x, total)
        if BITS != 8:
            x = tl.load(x_at + tile * GROUPS * 32 + 16, mask=x_mask, other=0.0)
            total = dot(high, x, total)
    total *= tl.load(x_scales_ptr + tokens, mask=is_token, other=0.0)[None, :]
    mask = is_row[:, None] & is_token[None, :]
    if SPLITS > 1:
        at = (tl.program_id(1) * num_tokens + tokens.to(tl.int64))[None, :] * num_rows + rows[:, None]
        tl.store(parts_ptr + at, total, mask=mask)
    else:
        if BIAS:
            total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        at = out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
        if ADD:
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halve_kernel(
    out_ptr, scales_ptr, x_ptr, norm_ptr, num_columns, eps, NORM: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < num_columns
    x = tl.load(x_ptr + token * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / num_columns + eps)
        x *= tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    # A power of two, so that nothing is rounded; only what float16 could not hold is made smaller.
    largest = tl.max(tl.abs(x), 0)
    shrink = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 16384.0) / 16384.0)))
    tl.store(out_ptr + token * num_columns + columns, (x / shrink).to(tl.float16), mask=mask)
    # Weights are 64 times as large in the product. NaN and infinity stay.
    tl.store(scales_ptr + token, shrink / 64.0 + 0.0 * tl.sum(x, 0))


class HalfActivations(NamedTuple):
    """Activations ``[tokens, in]`` in float16, and the scale of each token, ``[tokens]`` float32."""

    x: Tensor
    scales: Tensor


def halve_activations(x: Tensor, norm: tuple[Tensor, float] | None = None) -> HalfActivations:
    """``x [tokens, in]``, with ``norm`` (weight, eps) normalised, in float16, whose range a scale extends."""
    tokens, columns = x.shape
    half, scales = x.new_empty(tokens, columns, dtype=torch.float16), x.new_empty(tokens, dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    width = triton.next_power_of_2(columns)
    _halve_kernel[(tokens,)](
        half, scales, x, weight, columns, eps, NORM=norm is not None, COLUMNS=width,
        num_warps=min(16, max(4, width // 512)), **pdl_options(x.device),
    )  # fmt: skip
    return HalfActivations(half, scales)


@triton.jit
def _sum_kernel(
    out_ptr, parts_ptr, bias_ptr, num_tokens, num_rows, out_stride,
    ADD: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    total = tl.load(parts_ptr + token * num_rows + rows, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + (split * num_tokens + token) * num_rows + rows, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + token * out_stride + rows
    if ADD:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x: HalfActivations,
    matrix: LowBit,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool = False,
    tile: tuple[int, int, int, int, int, int] | None = None,
) -> Tensor:
    """``x @ matrix.T + bias``, written to ``out [tokens, out]``, whose rows may lie apart, or added to it.

    ``tile``: rows, groups, tokens, splits, warps and stages of a program.
    """
    layout, (num_rows, columns) = matrix.layout, matrix.shape
    tokens = x.x.shape[0]
    rows, groups, width, splits, warps, stages = tile or _tile_for(tokens, num_rows, columns, out.device)
    parts = x.scales.new_empty(splits, tokens, num_rows) if splits > 1 else out
    pdl = pdl_options(out.device)
    levels, high, *others = (each.view(torch.uint8) if i < 2 else each for i, each in enumerate(_planes(matrix)))
    code = "" if INTERPRETED.value or layout.table else _code(layout.bits, layout.zero)
    _matmul_kernel[(triton.cdiv(num_rows, rows), splits, triton.cdiv(tokens, width))](
        out, parts, *x, levels, high, *others, matrix.scales if bias is None else bias,
        tokens, num_rows, columns // GROUP, out.stride(0),
        ADD=add, BIAS=bias is not None, **_constants(matrix), CODE=code,
        ROWS=rows, GROUPS=groups, TOKENS=width, SPLITS=splits, STAGES=stages, num_warps=warps, **pdl,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(num_rows, 1024), tokens)](
            out, parts, matrix.scales if bias is None else bias, tokens, num_rows, out.stride(0),
            ADD=add, BIAS=bias is not None, SPLITS=splits, ROWS=1024, num_warps=4, **pdl,
        )  # fmt: skip
    return out


def _planes(matrix: LowBit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels, high bits, scales and units, with something else where there are none."""
    scales = matrix.scales.view(torch.int32) if matrix.layout.scales in ("zeros", "offset") else matrix.scales
    high = matrix.levels if matrix.high is None else matrix.high
    return matrix.levels, high, scales, scales if matrix.units is None else matrix.units


def _constants(matrix: LowBit) -> dict[str, object]:
    layout = matrix.layout
    return {
        "BITS": layout.bits,
        "SCALES": layout.scales,
        "GROUP": layout.group,
        "ZERO": layout.zero,
        "TABLE": layout.table,
    }


def _tile_for(tokens: int, num_rows: int, columns: int, device: torch.device) -> tuple[int, int, int, int, int, int]:
    """Tall tiles where the multiprocessor has room for them, and programs for every multiprocessor."""
    width = max(16, triton.next_power_of_2(tokens))
    if _shared_bytes(device) >= 200_000:
        rows, width, warps, stages = 128, min(width, 256 if num_rows >= 8192 else 128), 8, 3
    else:
        rows, width, warps, stages = 64, min(width, 64), 4, 2
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(tokens, width)
    splits = 1
    while programs * splits < 200 and splits < 4 and columns // (splits * 2) >= 512:
        splits *= 2
    return rows, 4, width, splits, warps, stages


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 0)


@triton.jit
def _dequantise_kernel(
    out_ptr, index_ptr, levels_ptr, high_ptr, scales_ptr, units_ptr, num_out, num_rows, num_groups,
    INDEXED: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_place = places < num_out
    rows = places
    if INDEXED:
        rows = tl.load(index_ptr + places, mask=is_place, other=0).to(tl.int32)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    levels = load_levels(levels_ptr, high_ptr, rows, groups, num_rows, num_groups, BITS)
    factors = load_factors(scales_ptr, units_ptr, rows, groups, num_rows, num_groups, SCALES, GROUP, ZERO)
    weights = _weights(levels, factors, ROWS, GROUPS, BITS, TABLE)
    columns = tl.program_id(1) * GROUPS * 32 + tl.arange(0, GROUPS * 32)
    mask = is_place[:, None] & (columns < num_groups * 32)[None, :]
    at = places.to(tl.int64)[:, None] * num_groups * 32 + columns[None, :]
    tl.store(out_ptr + at, weights.to(out_ptr.dtype.element_ty), mask=mask)


def dequantise(matrix: LowBit, out: Tensor, index: Tensor | None = None) -> Tensor:
    """Write the matrix's rows, or those that ``index [rows]`` names, unpacked to ``out [rows, in]``, contiguous."""
    num_rows, columns = matrix.shape
    rows = 1 if index is not None else 16
    groups = min(16, triton.next_power_of_2(columns // GROUP))
    _dequantise_kernel[(triton.cdiv(out.shape[0], rows), triton.cdiv(columns // GROUP, groups))](
        out, matrix.levels if index is None else index, *_planes(matrix), out.shape[0], num_rows, columns // GROUP,
        INDEXED=index is not None, **_constants(matrix), ROWS=rows, GROUPS=groups,
        num_warps=1 if index is not None else 4, **pdl_options(out.device),
    )  # fmt: skip
    return out
