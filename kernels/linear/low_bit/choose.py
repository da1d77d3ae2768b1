"""Linear layers of low-bit matrices on a GPU: choose the kernel by the number of tokens.

A layer's matrix may consist of several *parts*, stacked by rows, with different layouts: a file may store v with more
bits than q and k. Each part computes its own columns of the output.

=============  ======================================================================================================
tokens         computed by
=============  ======================================================================================================
1, 2           `one_token`: activations in 16-bit integers, products of bytes
up to 64       `few_tokens`: weights are converted to float16 in registers, for the tensor cores
17 to 256      `many_tokens`, on GPUs with warp-group matmuls; with 8 bits up to 128
more           cuBLAS, on some rows at a time, dequantized to scratch memory
=============  ======================================================================================================

If `few_tokens` computes both matmuls of a gated layer, the first writes its result in the second's input layout.

In float32, only the first kernel is used; with more tokens the matrix is dequantized. It is also dequantized if tuning
found that faster: see `LowBit.tiles`. FP8 has its own kernels (`linear.fp8`), and is dequantized if they do not support
it. If a model also keeps a 16-bit copy (`minillm.kernels.LinearWeight.keep_copy`), cuBLAS multiplies the copy for more
tokens than `most_tokens_with_copy`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minillm.kernels.arguments import Norm
from minillm.kernels.linear import fp8 as fp8_linear
from minillm.kernels.linear.low_bit import few_tokens as matmul
from minillm.kernels.linear.low_bit import many_tokens as dot
from minillm.kernels.linear.low_bit import one_token as matvec
from minillm.kernels.linear.low_bit.few_tokens import FixedScale, Float16Activations
from minillm.kernels.linear.low_bit.layouts import FP8, UNPACKED, LowBit, bucket
from minillm.kernels.linear.low_bit.unpack import dequantize
from minillm.kernels.norm.activation import gate_mul_into
from minillm.kernels.norm.rms_norm import rms_norm

MOST_FUSED = 64  # maximum tokens of `few_tokens`; `many_tokens` takes more
# Weights to dequantize at a time, 64 MiB of them. Smaller slabs would stay in the L2, but their matmuls fill the GPU
# badly: with 16 MiB a prompt of 512 tokens takes an 8B model 23 ms instead of 19, with 128 MiB no less than with 64.
_UNPACKED = 1 << 25
_TILE = 256  # the number of rows in a slab is a multiple of this
# Bits -> the maximum tokens for which these kernels are at least as fast as cuBLAS with a 16-bit copy.
_MOST_BESIDE_A_COPY = {4: 64, 5: 32, 6: 16, 8: 16}


def product(
    x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor | None = None, norm: Norm | None = None,
    *, gated: int = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``x [tokens, in] @ matrix.T + bias``, after RMSNorm if ``norm`` is given: see `linear.matvec.product`."""
    if _is_for_fp8(x, parts):
        return fp8_linear.product(x, parts[0], bias, out, norm, gated=gated, add=add)
    is_fused = _is_fused(x, parts)
    # The output is allocated first. Later, it could take a part of the memory that dequantized slabs have freed, and a
    # larger slab would need new memory.
    if out is None:
        out = x.new_empty(x.shape[0], sum(part.shape[0] for part in parts) // (2 if gated else 1))
    if gated and (len(parts) > 1 or not is_fused):
        return gate_mul_into(out, product(x, parts, bias, None, norm), gated)
    if is_fused:
        return _multiply(x, parts, bias, out, norm, gated=gated, add=add)
    x = x if norm is None else rms_norm(x, *norm)
    if parts[0].order is not None:  # all parts have one, or none
        x = x[:, parts[0].order]
    for part, bias_part, columns in columns_of(parts, bias, out):
        _unpacked(x, part, bias_part, columns, add)
    return out


def name_of(x: Tensor, parts: tuple[LowBit, ...]) -> str:
    """Return the name of the kernel with which `product` computes this matmul."""
    if _is_for_fp8(x, parts):
        return "FP8"
    if not _is_fused(x, parts):
        return "dequantized"
    if x.shape[0] <= matvec.MOST_TOKENS:
        return "one_token"
    return "many_tokens" if dot.takes(x, parts) else "few_tokens"


def writes_next_input(x: Tensor, parts: tuple[LowBit, ...], following: tuple[LowBit, ...]) -> bool:
    """Return whether the gated matmul of ``x [tokens, in]`` can write the next matmul's input layout: see
    `gated_to_float16`.

    ``parts`` are the gated matrix, ``following`` is the matrix of the next matmul.
    """
    return len(parts) == 1 and _is_for_matmul(x, parts) and takes_float16(x, following)


def takes_float16(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    """Return whether a matmul of ``x [tokens, in]`` reads `Float16Activations`, with the columns of ``x`` in order."""
    return parts[0].order is None and _is_for_matmul(x, parts)  # all parts have an order, or none


def is_fp8_mlp(x: Tensor, parts: tuple[LowBit, ...], following: tuple[LowBit, ...]) -> bool:
    """Return whether `fp8.mlp` computes both matmuls of a gated layer for as many tokens as ``x`` has."""
    both = (*parts, *following)
    return x.shape[0] > fp8_linear.MOST_FUSED and len(both) == 2 and all(_is_for_fp8(x, (part,)) for part in both)


def gated_to_float16(
    x: Tensor, matrix: LowBit, bias: Tensor | None, norm: Norm | None, by: FixedScale, gated: int = True
) -> Float16Activations:
    """Compute a gated `product`, and store it in float16 with the fixed scale ``by``.

    The result is in the input layout of `linear_of_float16`.
    """
    return matmul.gated_to_float16(matmul.convert_to_float16(x, norm, matrix.order), matrix, bias, by, gated=gated)


def linear_of_float16(
    x: Float16Activations, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor,
    *, gated: int = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``x @ matrix.T + bias``. Write the result to ``out``, or add it to ``out`` if ``add``.

    With ``gated``, ``parts`` must have a single matrix.
    """
    for place, part, bias_part, columns in _placed(parts, bias, out):
        matmul.matmul(x, part, bias_part, columns, gated=gated, add=add, part=place)
    return out


def _multiply(
    x: Tensor, parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor, norm: Norm | None,
    *, gated: int = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the matmul with the low-bit kernel that is the fastest for this number of tokens.

    With ``gated``, ``parts`` must have a single matrix.
    """
    if not x.shape[0]:  # a prompt chunk without logits
        return out
    if x.shape[0] <= matvec.MOST_TOKENS:
        for place, part, bias_part, columns in _placed(parts, bias, out):
            matvec.product(x, part, bias_part, columns, norm, gated=gated, add=add, part=place)
        return out
    is_for_dot = dot.takes(x, parts)
    activations = matmul.convert_to_float16(x, norm, parts[0].order, by_eights=not is_for_dot)
    if not is_for_dot:
        return linear_of_float16(activations, parts, bias, out, gated=gated, add=add)
    for part, bias_part, columns in columns_of(parts, bias, out):
        dot.product(activations, part, bias_part, columns, gated=gated, add=add)
    return out


def _is_for_fp8(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    return len(parts) == 1 and parts[0].layout == FP8 and fp8_linear.takes(x, parts[0])


def _is_fused(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    """Return whether low-bit kernels compute this matmul. Otherwise all parts are dequantized."""
    if any(part.layout == FP8 for part in parts):  # mixed with other layouts, or too many tokens for its own kernels
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
    """Yield each part with its elements of the bias and its columns of the output."""
    start = 0
    for part in parts:
        end = start + part.shape[0]
        yield part, None if bias is None else bias[start:end], out[:, start:end]
        start = end


def _placed(
    parts: tuple[LowBit, ...], bias: Tensor | None, out: Tensor
) -> Iterator[tuple[int, LowBit, Tensor | None, Tensor]]:
    """Yield a tuple for each part: its launch number, then the three values that `columns_of` yields.

    Launch numbers begin at 1. A single part has number 0.
    """
    for number, each in enumerate(columns_of(parts, bias, out), 1):
        yield number if len(parts) > 1 else 0, *each


def _unpacked(x: Tensor, matrix: LowBit, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """Compute ``x @ matrix.T + bias`` with cuBLAS, on some dequantized rows at a time.

    Write the result to ``out``, or add it if ``add``.
    """
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
    """Yield the matrix in slabs: a slice of its rows, and these rows dequantized to x's dtype.

    All slabs use the same memory, so each is valid until the next one is yielded. A slab has about ``at_once`` weights,
    in whole tiles of rows. (cuBLAS takes twice the time if a slab of the output does not begin at a multiple of 16
    bytes.)
    """
    num_rows, features = matrix.shape
    count = min(max(_TILE, (at_once or _UNPACKED) // features // _TILE * _TILE), num_rows)
    scratch = x.new_empty(count, features)
    for start in range(0, num_rows, count):
        rows = slice(start, min(start + count, num_rows))
        slab = matrix if count == num_rows else matrix.rows(rows)
        yield rows, dequantize(slab, scratch[: rows.stop - start])


def unpacked(parts: tuple[LowBit, ...], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weights ``[out, in]`` of matrices stacked by rows, in ``dtype``."""
    out = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype, device=parts[0].device)
    start = 0
    for part in parts:
        rows = out[start : start + part.shape[0]]
        if part.order is None:
            dequantize(part, rows)
        else:
            rows[:, part.order] = dequantize(part, torch.empty_like(rows))
        start += part.shape[0]
    return out


def most_tokens_with_copy(parts: tuple[LowBit, ...], copy: Tensor) -> int:
    """Return the maximum number of tokens for which low-bit kernels are used although there is a 16-bit copy.

    The result is 64 for 4 bits. It is 0 for a small weight: its matmuls take as long as their launches, so reading
    fewer bytes saves nothing. On one H200, the 135m in Q4_1 decodes 2,070 tokens a second, and in bfloat16 2,450.
    """
    columns = copy.shape[-1]
    largest = 5_000_000 if columns <= 1536 else 2_500_000
    if copy.dtype == torch.bfloat16 and columns <= 4096 and copy.numel() <= largest:
        return 0
    return min(16 if part.layout.table else _MOST_BESIDE_A_COPY[part.layout.bits] for part in parts)


def embedding(token_ids: Tensor, matrix: LowBit, dtype: torch.dtype) -> Tensor:
    """Return the matrix's rows ``token_ids``, dequantized to ``dtype``: ``[tokens, in]``."""
    out = torch.empty(token_ids.shape[0], matrix.shape[1], dtype=dtype, device=matrix.device)
    return dequantize(matrix, out, token_ids)
