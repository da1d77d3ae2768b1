"""Linear layers of low-bit matrices on a GPU: which kernel computes which number of tokens.

A layer's matrix may consist of several, one below the other, of different layouts: a file may store v finer than q and
k. Each computes its own columns of the output.

=============  ======================================================================================================
tokens         computed by
=============  ======================================================================================================
1, 2           `low_bit_matvec`: activations in whole numbers of 16 bits, products of bytes
up to 64       `low_bit_matmul`: weights become float16 in registers, the matrix unit does the rest
17 to 256      `low_bit_dot`, where the GPU has a matrix unit that four warps use together; of 8 bits up to 128
more           cuBLAS, for a part of the rows at a time, unpacked to scratch memory
=============  ======================================================================================================

Where both products of a gated layer are `low_bit_matmul`'s, the first hands the second its input as that reads it.

In float32 all but the first unpack, and so does a matrix whose tiles say that it is faster: `LowBit.tiles`. FP8 has
kernels of its own (`fp8_linear`), and is unpacked where they refuse. Where a model keeps a copy in 16 bits besides
(`minillm.kernels.LinearWeight.keep_copy`), cuBLAS multiplies that from `most_tokens_beside_a_copy` on.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minillm.kernels.linear import fp8 as fp8_linear
from minillm.kernels.linear.low_bit import few_tokens as matmul
from minillm.kernels.linear.low_bit import many_tokens as dot
from minillm.kernels.linear.low_bit import one_token as matvec
from minillm.kernels.linear.low_bit.few_tokens import FixedScale, HalfActivations
from minillm.kernels.linear.low_bit.layouts import FP8, UNPACKED, LowBit, bucket
from minillm.kernels.linear.low_bit.unpack import dequantise
from minillm.kernels.norm.activation import silu_mul_into
from minillm.kernels.norm.rms_norm import rms_norm

Norm = tuple[Tensor, float]  # weight, eps
MOST_FUSED = 64  # tokens; of `low_bit_dot` more
# Weights at a time, 64 MiB of them. Pieces that stay in the L2 take the GPU less time, and the host three times as
# much: some 100 us each, which 14 pieces a layer make 45 ms for an 8B model's prompt.
_UNPACKED = 1 << 25
# By bits: the most tokens of which products are at least as fast as cuBLAS's with weights that are in 16 bits already.
_MOST_BESIDE_A_COPY = {4: 64, 5: 32, 6: 16, 8: 16}


def linear(x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor | None, norm: Norm | None) -> Tensor:
    """``x [tokens, in] @ matrix.T + bias``, in ``out`` if given; with ``norm`` of RMSNorm's result."""
    if _is_for_fp8(x, parts):
        return fp8_linear.linear(x, parts[0], bias, out, norm)
    if out is None:
        out = x.new_empty(x.shape[0], sum(part.shape[0] for part in parts))
    return _compute(x, parts, bias, out, norm, add=False)


def gated_linear(x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, norm: Norm) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = linear(x, …)``."""
    if _is_for_fp8(x, parts):
        return fp8_linear.gated_linear(x, parts[0], bias, norm)
    # First of all: behind the pieces of weights it would take a part of their memory, and the next need more.
    out = x.new_empty(x.shape[0], sum(part.shape[0] for part in parts) // 2)
    if len(parts) > 1 or not _is_fused(x, parts):
        return silu_mul_into(out, linear(x, parts, bias, None, norm))
    return _multiply(x, parts, bias, out, norm, gated=True)


def linear_add(x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual += linear(x, …)``."""
    if _is_for_fp8(x, parts):
        return fp8_linear.linear_add(x, parts[0], bias, residual)
    return _compute(x, parts, bias, residual, None, add=True)


def hands_over(x: Tensor, parts: tuple[LowBit, ...], following: tuple[LowBit, ...]) -> bool:
    """Whether the gated product of so many tokens writes what the product behind it reads: `gated_halves`."""
    return len(parts) == 1 and _is_for_matmul(x, parts) and reads_halves(x, following)


def reads_halves(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    """Whether the product of so many tokens reads `HalfActivations` in the order of their columns."""
    return parts[0].order is None and _is_for_matmul(x, parts)  # an order all parts have, or none


def gated_halves(x: Tensor, matrix: LowBit, bias: Tensor | None, norm: Norm, by: FixedScale) -> HalfActivations:
    """`gated_linear`'s result, for `linear_of_halves`."""
    return matmul.gated_halves(matmul.halve_activations(x, norm, matrix.order), matrix, bias, by)


def linear_of_halves(
    x: HalfActivations, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor,
    *, gated: bool = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """``x @ matrix.T + bias``, in ``out`` or added to it; with a gate there is one part."""
    for place, part, bias_part, columns in _placed(parts, bias, out):
        matmul.matmul(x, part, bias_part, columns, gated=gated, add=add, part=place)
    return out


def _compute(
    x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor, norm: Norm | None, *, add: bool
) -> Tensor:
    if _is_fused(x, parts):
        return _multiply(x, parts, bias, out, norm, add=add)
    x = x if norm is None else rms_norm(x, *norm)
    if parts[0].order is not None:  # which all have
        x = x[:, parts[0].order]
    for part, bias_part, columns in columns_of(parts, bias, out):
        _unpacked(x, part, bias_part, columns, add)
    return out


def _multiply(
    x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor, norm: Norm | None,
    *, gated: bool = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """The product by the kernel of so many tokens; with a gate there is one part."""
    if not x.shape[0]:  # a chunk of a prompt of which no logits are wanted
        return out
    if x.shape[0] <= matvec.MOST_TOKENS:
        for place, part, bias_part, columns in _placed(parts, bias, out):
            matvec.product(x, part, bias_part, columns, norm, gated=gated, add=add, part=place)
        return out
    is_for_dot = dot.takes(x, parts)
    halves = matmul.halve_activations(x, norm, parts[0].order, by_eights=not is_for_dot)
    if not is_for_dot:
        return linear_of_halves(halves, parts, bias, out, gated=gated, add=add)
    for part, bias_part, columns in columns_of(parts, bias, out):
        dot.product(halves, part, bias_part, columns, gated=gated, add=add)
    return out


def _is_for_fp8(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    return len(parts) == 1 and parts[0].layout == FP8 and fp8_linear.takes(x, parts[0])


def _is_fused(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    """Whether no matrix is unpacked; where one is, all are."""
    if any(part.layout == FP8 for part in parts):  # beside others, or too many tokens for its own kernels
        return False
    tokens = x.shape[0]
    if tokens <= matvec.MOST_TOKENS or dot.takes(x, parts):
        return True
    is_short = tokens <= MOST_FUSED and x.dtype.itemsize == 2
    return is_short and all(part.tiles.get(bucket(tokens)) != UNPACKED for part in parts)


def _is_for_matmul(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    return x.shape[0] > matvec.MOST_TOKENS and _is_fused(x, parts) and not dot.takes(x, parts)


def columns_of(
    parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor
) -> Iterator[tuple[LowBit, Tensor | None, Tensor]]:
    """Each part with its elements of the bias and its columns of the output; with a gate there is one part."""
    start = 0
    for part in parts:
        end = start + part.shape[0]
        yield part, None if bias is None else bias[start:end], out[:, start:end]
        start = end


def _placed(
    parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor
) -> Iterator[tuple[int, LowBit, Tensor | None, Tensor]]:
    """`columns_of`, each with its place among the launches, from 1; 0 where it is alone."""
    for number, each in enumerate(columns_of(parts, bias, out), 1):
        yield number if len(parts) > 1 else 0, *each


def _unpacked(x: Tensor, matrix: LowBit, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """``x @ matrix.T + bias`` in ``out``, or with ``add`` added to it; cuBLAS writes to ``out``'s columns."""
    if add and bias is not None:
        out.add_(bias)
    for rows, weights in slabs(matrix, x):
        target = out[:, rows]
        if add:
            torch.addmm(target, x, weights.t(), out=target)
        elif bias is None:
            torch.mm(x, weights.t(), out=target)
        else:
            torch.addmm(bias[rows], x, weights.t(), out=target)


def slabs(matrix: LowBit, x: Tensor, at_once: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of the matrix after another, unpacked to numbers of ``x``'s dtype; each until the next is asked for.

    ``at_once``: weights.
    """
    num_rows, features = matrix.shape
    count = min(max(1, (at_once or _UNPACKED) // features), num_rows)
    scratch = x.new_empty(count, features)
    for start in range(0, num_rows, count):
        rows = slice(start, min(start + count, num_rows))
        slab = matrix if count == num_rows else matrix.rows(rows)
        yield rows, dequantise(slab, scratch[: rows.stop - start])


def unpacked(parts: tuple[LowBit, ...], dtype: torch.dtype) -> Tensor:
    """The weights ``[out, in]`` of matrices one below the other, in ``dtype``."""
    out = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype, device=parts[0].device)
    start = 0
    for part in parts:
        rows = out[start : start + part.shape[0]]
        if part.order is None:
            dequantise(part, rows)
        else:
            rows[:, part.order] = dequantise(part, torch.empty_like(rows))
        start += part.shape[0]
    return out


def most_tokens_beside_a_copy(parts: tuple[LowBit, ...], copy: Tensor) -> int:
    """The most tokens that low-bit matrices multiply where there is a copy in 16 bits: those of 4 bits 64.

    None of a small weight: its matmuls take as long as their launches, so fewer bytes save nothing. One H200, the 135m
    in Q4_1 / bfloat16: 1 sequence 2,070 / 2,450 tokens a second.
    """
    columns = copy.shape[-1]
    largest = 5_000_000 if columns <= 1536 else 2_500_000
    if copy.dtype == torch.bfloat16 and columns <= 4096 and copy.numel() <= largest:
        return 0
    return min(16 if part.layout.table else _MOST_BESIDE_A_COPY[part.layout.bits] for part in parts)


def embedding(token_ids: Tensor, matrix: LowBit, dtype: torch.dtype) -> Tensor:
    """Rows ``[tokens, in]`` of the matrix, unpacked."""
    out = torch.empty(token_ids.shape[0], matrix.shape[1], dtype=dtype, device=matrix.device)
    return dequantise(matrix, out, token_ids)
