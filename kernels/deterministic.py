"""Batch-invariant ops: a token's result is bitwise the same whatever else is in the batch. See `Ops`.

Matmuls are those of `minillm.kernels.linear.invariant`, attention is that of `minillm.kernels.attention.invariant`.
Norms, rotary and the sampler always compute row by row. A norm is not fused with a matmul here, because its sum of
squares would be added in the order of the matmul's tile. Low-bit matrices use `linear.low_bit.many_tokens` for any
number of tokens; how it splits the input depends only on the matrix's shape. If that kernel does not support a matrix,
the matrix is dequantized, some rows at a time.
"""

from torch import Tensor

from minillm.kernels import LinearWeight, Ops
from minillm.kernels.arguments import Norm, Pages
from minillm.kernels.attention import invariant as attention
from minillm.kernels.compat import has_wgmma
from minillm.kernels.cpu import HostPlan
from minillm.kernels.linear.invariant import product
from minillm.kernels.linear.low_bit import many_tokens as dot
from minillm.kernels.linear.low_bit.choose import columns_of, slabs
from minillm.kernels.linear.low_bit.few_tokens import convert_to_float16
from minillm.kernels.linear.low_bit.layouts import FP8, LowBit
from minillm.kernels.norm.activation import gate_mul
from minillm.kernels.norm.rms_norm import rms_norm

_MOST_BY_DOT = 256  # tokens at a time


def linear(x: Tensor, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """Compute `minillm.kernels.linear`, batch-invariant."""
    return _compute(x, weight, _target(x, weight, out), None)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """Compute `minillm.kernels.norm_linear`, batch-invariant."""
    return _compute(x, weight, _target(x, weight, out), (norm_weight, eps))


def norm_gated_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: LinearWeight) -> Tensor:
    """Compute `minillm.kernels.norm_gated_linear`, batch-invariant."""
    norm = None if norm_weight is None else (norm_weight, eps)
    if weight.parts and (len(weight.parts) > 1 or not _is_for_dot(x, weight.parts)):
        return gate_mul(_compute(x, weight, _target(x, weight, None), norm), weight.gate)
    return _compute(x, weight, x.new_empty(x.shape[0], weight.out_features // 2), norm, gated=weight.gate)


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
    """Compute `minillm.kernels.linear_add`, batch-invariant."""
    return _compute(x, weight, residual, None, add=True)


def mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up: LinearWeight,
    down: LinearWeight,
    residual: Tensor | None,
) -> Tensor:
    """Compute `minillm.kernels.mlp`, batch-invariant."""
    gated = norm_gated_linear(x, norm_weight, eps, gate_up)
    return linear(gated, down) if residual is None else linear_add(gated, down, residual)


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float, plan: HostPlan | None = None) -> Tensor:
    """Compute `minillm.kernels.paged_attention`, batch-invariant."""
    return attention.paged_attention(q, pages, softmax_scale)


def attend_add(
    q: Tensor, pages: Pages, softmax_scale: float, o: LinearWeight, residual: Tensor, plan: HostPlan | None = None
) -> Tensor:
    """Compute `minillm.kernels.attend_add`, batch-invariant."""
    return linear_add(paged_attention(q, pages, softmax_scale).flatten(1), o, residual)


def _target(x: Tensor, weight: LinearWeight, out: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.out_features) if out is None else out


def _compute(
    x: Tensor, weight: LinearWeight, out: Tensor, norm: Norm | None, *, gated: int = False, add: bool = False
) -> Tensor:
    if not x.shape[0]:
        return out
    if weight.parts and _is_for_dot(x, weight.parts):
        return _by_dot(x, weight, out, norm, gated=gated, add=add)
    x = x if norm is None else rms_norm(x, *norm)
    if not weight.parts:
        return product(x, weight.weight, weight.bias, out, gated=gated, add=add)
    if weight.parts[0].order is not None:  # all parts have one, or none has
        x = x[:, weight.parts[0].order]
    for part, bias, columns in columns_of(weight.parts, weight.bias, out):
        for rows, weights in slabs(part, x):
            product(x, weights, None if bias is None else bias[rows], columns[:, rows], add=add)
    return out


def _is_for_dot(x: Tensor, parts: tuple[LowBit, ...]) -> bool:
    return has_wgmma(x.device) and x.element_size() == 2 and all(part.layout != FP8 for part in parts)


def _by_dot(x: Tensor, weight: LinearWeight, out: Tensor, norm: Norm | None, *, gated: int, add: bool) -> Tensor:
    for some, target in zip(x.split(_MOST_BY_DOT), out.split(_MOST_BY_DOT), strict=True):
        activations = convert_to_float16(some, norm, weight.parts[0].order, by_eights=False)
        for part, bias, columns in columns_of(weight.parts, weight.bias, target):
            tile = dot.tile_for(part.layout, some.shape[0], part.shape[0], gated)
            tile = tile._replace(parts=dot.parts_for(part.shape[0], gated))
            dot.product(activations, part, bias, columns, gated=gated, add=add, tile=tile)
    return out


OPS = Ops(linear, norm_linear, linear_add, mlp, attend_add, paged_attention, attention.prefill_attention)
