"""Linear layers on a CPU with weights in 8 bits, multiplied by FBGEMM, or in 4 bits, multiplied by torch.

    weight[n, k] = scale[n] * level[n, k]              levels of 8 bits, a scale for each row
    x[k] = peak / 63 * (high[k] + low[k] / 126)        high, low: 7 bits each; peak: the row's largest number

FBGEMM's integer matmul is exact. The high and low parts of one row of activations are multiplied as two rows. Two rows
take little longer than one, because the weights must be read in any case. (The parts have 7 bits, because without VNNI
the sum of two 8-bit products overflows.) FBGEMM quantizes activations by their minimum and maximum; two additional
columns hold -64 and 63, so that its rounding changes nothing.

The error is in the weights: half a level, 2^-8 of a row's largest weight. It matters for large activations. For nearly
any input, the large activations are in the same few columns. For these columns, the remainders of the rounded weights
are stored as additional columns. The first input determines which columns these are.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from threading import get_ident

import torch
from torch import Tensor

from minillm.kernels.cpu.linear import FBGEMM, PackedLinear, scalar
from minillm.kernels.linear.low_bit.layouts import AT_ONCE_ON_CPU, GROUP, LowBit, factors, rows_of, unpack_levels

Rows = Callable[[slice], Tensor]  # rows of a weight [out, in] in float32
_LEVELS = 127  # a weight's levels are -127 to 127
_HIGH = 63  # maximum of an activation's high part
_LOW = 2 * _HIGH  # steps of the low part per step of the high part
_LIMITS = (-_HIGH - 1.0, float(_HIGH))  # minimum and maximum of both parts
_FINER = 2 * _LEVELS  # steps of a weight's remainder per level
_FINER_COLUMNS = 12  # one of this many columns gets an additional column of remainders
_SMALLEST = 1e-36  # smaller activations count as zero
# Maximum multiplications, and rows, of 4-bit matmuls. Below them, the two parts of activations in 8 bits cost more.
_MOST_BY_4_BITS, _MOST_ROWS_BY_4_BITS = 1 << 24, 16
_ROWS_OF_4_BITS = 64  # maximum rows that torch packs together
_MOST_ROWS = 512  # rows of activations to multiply at a time
_KEPT_ROWS = 32  # scratch buffers for up to this many rows are kept


def packed_int8(
    weight: Callable[[], Rows], shape: tuple[int, int], bias: Tensor | None, stored: tuple[LowBit, ...] = ()
) -> PackedLinear | None:
    """Pack a float32 weight ``[out, in]`` in 8 bits. Return None if this torch cannot multiply such weights.

    The weight is packed at its first matmul. That matmul itself is exact. Its input should resemble later inputs,
    because the columns in which it is large get 16 bits.

    Args:
        weight: called at the first matmul. It returns a function that loads rows, so that only some rows are float32 at
            a time.
        stored: the same weight as low-bit matrices, if there are any. 4-bit matrices are also kept as they are, for
            matmuls of one or a few rows.
    """
    if torch.backends.quantized.engine not in FBGEMM or not hasattr(torch, "_make_per_channel_quantized_tensor"):
        return None
    out_features, in_features = shape
    linear = _Int8Linear(weight, shape, bias)
    columns = in_features + _num_finer(in_features) + len(_LIMITS)
    packed = PackedLinear(linear, out_features * columns, linear.add_to)
    in_4_bits = packed_int4(stored, bias)
    if in_4_bits is None:
        return packed
    most_rows = max(1, min(_MOST_ROWS_BY_4_BITS, _MOST_BY_4_BITS // (out_features * in_features)))
    return _by_rows(in_4_bits, packed, most_rows)


def _usable(scales: Tensor) -> Tensor:
    """Return ``scales [rows]`` as ``[rows, 1]``, with 1 in place of infinity and NaN."""
    return torch.where(scales.isfinite(), scales, 1.0)[:, None]


class _Int8Linear:
    """``x @ weight.T + bias`` with a weight in 8 bits, which is packed at the first call."""

    def __init__(self, weight: Callable[[], Rows], shape: tuple[int, int], bias: Tensor | None) -> None:
        self._out_features, self._in_features = shape
        self._width = shape[1] + _num_finer(shape[1])
        self._weight: Callable[[], Rows] | None = weight
        self._bias = bias
        self._packed: torch.ScriptObject | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, self._out_features)
        if self._weight is not None:
            return self._pack(self._weight(), x)
        if x.shape[0] == 1:
            result = torch.mm(*self._one(x))
        elif x.shape[0] <= _MOST_ROWS:
            result = self._several(x)
        else:
            return torch.cat([self(rows) for rows in x.split(_MOST_ROWS)])
        return result if self._bias is None else result.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Compute ``residual += x @ weight.T + bias``."""
        if x.shape[0] != 1 or self._weight is not None:
            return residual.add_(self(x))
        residual.addmm_(*self._one(x))
        return residual if self._bias is None else residual.add_(self._bias)

    def _pack(self, weight: Rows, x: Tensor) -> Tensor:
        """Pack the weight in 8 bits. Return the result of the first matmul, for its input ``x``.

        In the columns in which ``x`` is large, also pack the rounding errors of the weights in 8 bits.
        """
        scales = torch.empty(self._out_features)
        product = x.new_empty(x.shape[0], self._out_features)
        levels = torch.zeros(self._out_features, self._width + len(_LIMITS), dtype=torch.int8)
        errors = torch.zeros(self._in_features)
        at_once = max(1, AT_ONCE_ON_CPU // self._in_features)
        slabs = [slice(first, first + at_once) for first in range(0, self._out_features, at_once)]
        for rows in slabs:
            some = weight(rows)
            torch.mm(x, some.t(), out=product[:, rows])
            largest = torch.maximum(some.amax(1), -some.amin(1))
            # Rows of zeros get an arbitrary scale. Rows with NaN or infinity have it as scale: their results are NaN.
            scales[rows] = torch.where(largest == 0, 1.0, largest / _LEVELS)
            scale = _usable(scales[rows])
            exact = (some / scale).nan_to_num_(0.0, 0.0, 0.0)
            rounded = exact.round()
            levels[rows, : self._in_features] = rounded
            errors += exact.sub_(rounded).mul_(scale).square_().sum(0)
        finer = (
            errors.mul_(x.square().mean(0)).nan_to_num_().topk(self._width - self._in_features).indices.sort().values
        )
        for rows in slabs:
            remainder = (weight(rows)[:, finer] / _usable(scales[rows])).nan_to_num_(0.0, 0.0, 0.0)
            remainder.sub_(levels[rows].index_select(1, finer)).mul_(_FINER).round_().clamp_(-_LEVELS, _LEVELS)
            levels[rows, self._in_features : self._width] = remainder
        zeros = torch.zeros(self._out_features, dtype=torch.long)
        scales = torch.where(scales.isfinite(), scales / _HIGH, math.nan).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 announces their removal, without an alternative
            quantized = torch._make_per_channel_quantized_tensor(levels, scales, zeros, 0)
        del levels
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._finer, self._weight = finer, None
        return product if self._bias is None else product.add_(self._bias)

    def _one(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors ``[1, 2]`` and integer sums ``[2, out]``, for the high and low part of one row of activations.

        The matmul of factors and sums is the result of the layer, without the bias.
        """
        least, most = torch.aminmax(x)
        low, high = least.item(), most.item()
        if not -math.inf < low <= high < math.inf:
            return x.new_full((1, 2), math.nan), x.new_zeros(2, self._out_features)
        peak = max(-low, high, _SMALLEST)
        scratch = self._scratch(1)
        torch.mul(x, _HIGH / peak, out=scratch.given)
        return torch.mul(_parts(), peak), self._multiply(scratch)

    def _several(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        peak = x.abs().amax(1, keepdim=True)  # an infinity norm takes six times as long
        finite = math.isfinite(peak.sum().item())
        if not finite:  # row by row, because FBGEMM takes its limits over all rows and would spread a NaN
            wrong = ~peak.isfinite()
            x, peak = x.masked_fill(wrong, 0.0), peak.masked_fill(wrong, 1.0)
        peak.clamp_(min=_SMALLEST)
        scratch = self._scratch(count)
        torch.mul(x, torch.div(scalar(float(_HIGH)), peak), out=scratch.given)
        both = self._multiply(scratch)
        result = torch.add(both[:count], both[count:], alpha=1 / _LOW).mul_(peak)
        return result if finite else result.masked_fill_(wrong, math.nan)

    def _scratch(self, rows: int) -> "_Scratch":
        shape = (rows, self._in_features, self._width)
        return _kept_scratch(get_ident(), *shape) if rows <= _KEPT_ROWS else _Scratch(*shape)

    def _multiply(self, scratch: "_Scratch") -> Tensor:
        torch.mul(scratch.given.index_select(1, self._finer), scalar(1 / _FINER), out=scratch.finer)
        torch.round(scratch.row, out=scratch.high)
        torch.sub(scratch.row, scratch.high, out=scratch.low).mul_(scalar(float(_LOW)))
        # As in `linear._multiply_float16`, skips the lookup of `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            product: Tensor = torch.ops.quantized.linear_dynamic.op(scratch.buffer, self._packed, True)
        return product


class _Scratch:
    """A buffer for the activations of a matmul, and its views.

    Views are created once: creating one takes as long as computing one more row of activations.
    """

    @torch.inference_mode(False)  # tensors of inference mode cannot be written outside it
    def __init__(self, rows: int, in_features: int, width: int) -> None:
        self.row = torch.empty(rows, width)
        self.given, self.finer = self.row.split_with_sizes((in_features, width - in_features), 1)
        self.buffer = torch.empty(2 * rows, width + len(_LIMITS))  # the high parts, then the low parts
        parts, limits = self.buffer.split_with_sizes((width, len(_LIMITS)), 1)
        limits.copy_(_limits())
        self.high, self.low = parts.split(rows)


@lru_cache(maxsize=32)
def _kept_scratch(thread: int, rows: int, in_features: int, width: int) -> _Scratch:
    """Return a thread's buffer for matmuls of this shape. The result is cached, so all layers share it."""
    return _Scratch(rows, in_features, width)


def _takes_4_bits(parts: tuple[LowBit, ...]) -> bool:
    """Return whether torch can multiply these matrices, stacked by rows, in 4 bits."""
    fit = all(part.layout.bits == 4 and not part.layout.table and part.order is None for part in parts)
    return bool(parts) and fit and sum(part.shape[0] for part in parts) % 16 == 0


def packed_int4(parts: tuple[LowBit, ...], bias: Tensor | None) -> PackedLinear | None:
    """Pack 4-bit matrices, stacked by rows, for torch's 4-bit matmul. Return None if torch cannot multiply them.

    Activations are rounded to bfloat16. Weights take 5 bits each, including their scales.

    A matmul of one row takes as long as reading these bytes. With many rows, this matmul takes 1.2 to 3 times as long
    as an 8-bit matmul.
    """
    if not _takes_4_bits(parts):
        return None
    out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
    at_once = out_features
    if _packs_by_rows():
        at_once = max(1, AT_ONCE_ON_CPU // in_features // _ROWS_OF_4_BITS) * _ROWS_OF_4_BITS
    held = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
    # torch expects [in / group, out, 2], and a weight is (level - 8) * scale + zero.
    pairs = torch.empty(in_features // GROUP, out_features, 2, dtype=torch.bfloat16)
    for first in range(0, out_features, at_once):
        rows = slice(first, min(first + at_once, out_features))
        some = rows_of(parts, rows)
        held[rows] = _pack_4_bits(torch.cat([unpack_levels(part) for part in some]))
        scales, level_zeros, offsets = (torch.cat(each) for each in zip(*map(factors, some), strict=True))
        pairs[:, rows] = torch.stack((scales, offsets + (8 - level_zeros) * scales), 2).transpose(0, 1)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def apply(x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, out_features)
        product: Tensor = multiply(x.bfloat16(), held, GROUP, pairs).float()
        return product if bias is None else product.add_(bias)

    def add_to(residual: Tensor, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return residual
        residual.add_(multiply(x.bfloat16(), held, GROUP, pairs))
        return residual if bias is None else residual.add_(bias)

    return PackedLinear(apply, held.nbytes + pairs.nbytes, add_to, (held, pairs))


def _pack_4_bits(levels: Tensor) -> Tensor:
    """Pack ``levels [out, in]`` into bytes ``[out, in / 2]`` for torch's 4-bit matmul."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return packed


@cache
def _packs_by_rows() -> bool:
    """Return whether torch packs each run of 64 rows independently, so that a matrix can be packed in pieces."""
    levels = torch.arange(3 * _ROWS_OF_4_BITS * GROUP, dtype=torch.int32).mul_(7).remainder_(16).view(-1, GROUP)
    return torch.equal(_pack_4_bits(levels), torch.cat([_pack_4_bits(each) for each in levels.split(_ROWS_OF_4_BITS)]))


def _by_rows(few: PackedLinear, many: PackedLinear, most_rows: int) -> PackedLinear:
    """Combine two layouts of one weight. Matmuls of at most ``most_rows`` rows use ``few``, and larger matmuls use
    ``many``.
    """
    add_few, add_many = few.add_to, many.add_to
    assert add_few is not None
    assert add_many is not None

    def apply(x: Tensor) -> Tensor:
        return few.apply(x) if x.shape[0] <= most_rows else many.apply(x)

    def add_to(residual: Tensor, x: Tensor) -> Tensor:
        return add_few(residual, x) if x.shape[0] <= most_rows else add_many(residual, x)

    return PackedLinear(apply, few.num_bytes, add_to, few.in_4_bits)


@cache
def _limits() -> Tensor:
    return torch.tensor(_LIMITS)


@cache
def _parts() -> Tensor:
    return torch.tensor([[1.0, 1 / _LOW]])


def _num_finer(in_features: int) -> int:
    return -(-in_features // _FINER_COLUMNS)
