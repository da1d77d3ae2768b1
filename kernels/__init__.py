"""Every op of the model and the sampler. Ops take plain tensors: no sequence, no engine, no configuration.

`minillm.kernels.reference` specifies each public op. `minillm.kernels.gpu` or `minillm.kernels.cpu` computes an op,
depending on the device of the op's first tensor.
"""

import sys
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import cpu, reference
from minillm.kernels.arguments import (
    GELU,
    DecodeInputs,
    Field,
    HeadNorms,
    KVCache,
    LayerCache,
    Norm,
    Pages,
    RotaryInputs,
    SamplingInputs,
    Search,
    SearchField,
)
from minillm.kernels.attention.plan import AttentionShape, Costs, Plan, WorkList, plan_attention
from minillm.kernels.cpu import HostPlan, Rows
from minillm.kernels.decode_state import reference as decode_state
from minillm.kernels.linear.low_bit.layouts import FP8, LowBit, dequantize

if torch.cuda.is_available():  # Triton is imported only if a GPU can run it
    from minillm.kernels import gpu
    from minillm.kernels.attention import decode as decode_attention
    from minillm.kernels.launch import finds_variants
    from minillm.kernels.linear import fp8 as fp8_linear
    from minillm.kernels.linear import invariant, matvec
    from minillm.kernels.linear.low_bit import bound as low_bit_bound
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

if TYPE_CHECKING:
    from minillm.kernels.linear.low_bit.few_tokens import FixedScale

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _op(contract: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return an op with the name of ``contract``.

    It calls the GPU's or the CPU's function of that name, depending on the device of its first tensor.
    """
    on_cpu = getattr(cpu, contract.__name__)
    on_gpu = getattr(gpu, contract.__name__) if torch.cuda.is_available() else on_cpu

    @wraps(contract)
    def op(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (on_gpu if args[0].is_cuda else on_cpu)(*args, **kwargs)  # type: ignore[attr-defined]

    return op


rms_norm = _op(reference.rms_norm)
norm_add = _op(reference.norm_add)
silu_mul = _op(reference.silu_mul)
gelu_mul = _op(reference.gelu_mul)
prefix_attention = _op(reference.prefix_attention)
prefill_attention = _op(reference.prefill_attention)
block_copy = _op(reference.block_copy)
gather_blocks = _op(reference.gather_blocks)
scatter_blocks = _op(reference.scatter_blocks)
sample = _op(reference.sample)
sample_with_logprobs = _op(reference.sample_with_logprobs)
log_probabilities = _op(reference.log_probabilities)
top_log_probabilities = _op(reference.top_log_probabilities)
begin_decode = _op(decode_state.begin_decode)
penalize = _op(decode_state.penalize)
mask_logits = _op(reference.mask_logits)
end_decode = _op(decode_state.end_decode)
choose_beams = _op(decode_state.choose_beams)
fork_rows = _op(decode_state.fork_rows)


def plan_step(rope: RotaryInputs, decodes: Pages, num_heads: int) -> HostPlan | None:
    """On a CPU, compute the inputs that all layers of a step share: see `cpu.plan_step`.

    On a GPU, return None, because GPU kernels need no plan.
    """
    return None if decodes.k.is_cuda else cpu.plan_step(rope, decodes, num_heads)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryInputs,
    cache: LayerCache,
    norms: HeadNorms | None = None,
    plan: HostPlan | None = None,
) -> None:
    """Rotate q in place, and write rotated k, and v, to their blocks: see `reference.rotary_write_kv`.

    ``plan`` is the result of `plan_step` for this step, if there is one.
    """
    if q.is_cuda:
        gpu.rotary_write_kv(q, k, v, rope, cache, norms)
    else:
        cpu.rotary_write_kv(q, k, v, rope, cache, norms, plan)


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float, plan: HostPlan | None = None) -> Tensor:
    """Compute decode attention, one query per sequence: see `reference.paged_attention`.

    ``plan`` is the result of `plan_step` for this step, if there is one.
    """
    if q.is_cuda:
        return gpu.paged_attention(q, pages, softmax_scale)
    return cpu.paged_attention(q, pages, softmax_scale, plan)


LOW_BIT = "low-bit"  # the name of a `Matmul` that chooses its kernel itself


class Matmul(NamedTuple):
    """One way to multiply by a weight, and the maximum number of tokens to use it for. See `LinearWeight.matmuls`."""

    most_tokens: int
    name: str
    compute: Callable[[Tensor, "LinearWeight", Tensor | None, Norm | None, int, bool], Tensor]  # see `multiply`


class LinearWeight:
    """A weight ``[out, in]`` and optional bias ``[out]``, in the layout that `linear` reads fastest.

    The weight is a tensor, or on a GPU one or several low-bit matrices stacked by rows. `keep_copy` adds a 16-bit copy
    of low-bit matrices for matmuls of many tokens.
    """

    def __init__(self, weight: Tensor | tuple[LowBit, ...], bias: Tensor | None = None) -> None:
        self.parts: tuple[LowBit, ...] = ()
        self.max_low_bit_tokens = -1  # matmuls of up to this many tokens use the low-bit matrices
        self.gated_scale: FixedScale | None = None  # of the gated MLP's result, see `bound_gated`
        self.attended_scale: FixedScale | None = None  # of attention's result, if this is o: see `bound_attended`
        self.gate: int = True  # the activation of gate and up, if this is their weight: True for SiLU, or `GELU`
        self.packed, self.bias = None, bias
        if isinstance(weight, tuple):
            self.parts, self.weight = weight, weight[0].levels.new_empty(0)
            self.max_low_bit_tokens = sys.maxsize
            self.out_features, self.in_features = sum(part.shape[0] for part in weight), weight[0].shape[1]
            return
        self.out_features, self.in_features = weight.shape
        self.packed = cpu.packed_linear(weight, bias)
        self.weight = weight if self.packed is None else weight.new_empty(0)  # kept in one layout only

    @classmethod
    def in_8_bits(
        cls, weight: Callable[[], Rows], shape: tuple[int, int], bias: Tensor | None, stored: tuple[LowBit, ...] = ()
    ) -> "LinearWeight":
        """Return a weight that a CPU keeps in 8 bits. ``weight`` returns its float32 rows: see `cpu.packed_int8`."""
        packed = cpu.packed_int8(weight, shape, bias, stored)
        if packed is None:
            return cls(weight()(slice(0, shape[0])), bias)
        return cls._by(packed, shape, bias)

    @classmethod
    def in_4_bits(cls, stored: tuple[LowBit, ...], bias: Tensor | None) -> "LinearWeight | None":
        """Return a weight that a CPU keeps in 4 bits, from 4-bit matrices stacked by rows: see `cpu.packed_int4`.

        Return None if this torch cannot multiply such matrices.
        """
        packed = cpu.packed_int4(stored, bias)
        if packed is None:
            return None
        return cls._by(packed, (sum(part.shape[0] for part in stored), stored[0].shape[1]), bias)

    @classmethod
    def _by(cls, packed: cpu.PackedLinear, shape: tuple[int, int], bias: Tensor | None) -> "LinearWeight":
        self = cls(torch.empty(shape[0], 0), bias)
        self.packed, self.in_features = packed, shape[1]
        return self

    def copied_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that `keep_copy` would allocate for ``dtype``.

        The result is 0 without low-bit matrices, and for FP8, which gains nothing from a copy.
        """
        is_copied = bool(self.parts) and all(part.layout != FP8 for part in self.parts)
        return self.out_features * self.in_features * dtype.itemsize if is_copied else 0

    def keep_copy(self, dtype: torch.dtype) -> None:
        """Keep a copy of low-bit matrices in ``dtype``, for matmuls of many tokens, which are faster with the copy."""
        if self.copied_bytes(dtype):
            self.weight = low_bit_linear.unpacked(self.parts, dtype)
            self.max_low_bit_tokens = low_bit_linear.most_tokens_with_copy(self.parts, self.weight)
            self.__dict__.pop("matmuls", None)

    def bound_gated(self, norm_weight: Tensor) -> None:
        """Choose the fixed scale with which `mlp` stores its gated result, ``silu(gate) * up``, in float16.

        This weight is the low-bit matrix of gate and up. `mlp` applies it after RMSNorm with ``norm_weight``.
        """
        if len(self.parts) == 1 and self.parts[0].layout != FP8:
            self.gated_scale = low_bit_bound.scale_of_gated(self.parts[0], self.bias, norm_weight)

    def bound_attended(self, qkv: "LinearWeight", norm_weight: Tensor) -> None:
        """Choose the fixed scale with which `attend_add` stores attention's result in float16. This weight is its
        ``o``.

        ``qkv`` is the low-bit projection to q, k and v, applied after RMSNorm with ``norm_weight``. Its first rows are
        those of q, as many as this weight has columns. The other rows are half k, half v.
        """
        if self.parts and qkv.parts and all(part.layout != FP8 for part in (*self.parts, *qkv.parts)):
            num_values = (qkv.out_features - self.in_features) // 2
            self.attended_scale = low_bit_bound.scale_of_attended(qkv.parts, qkv.bias, norm_weight, num_values)

    @cached_property
    def matmuls(self) -> list[Matmul]:
        """The ways to multiply by this weight, in order of their maximum numbers of tokens. The last has no maximum."""
        low_bit = [Matmul(self.max_low_bit_tokens, LOW_BIT, _by_parts)] if self.parts else []
        if self.max_low_bit_tokens == sys.maxsize:
            return low_bit
        if self.packed is not None:
            return [Matmul(sys.maxsize, "packed for the CPU", _by_packed)]
        return [*low_bit, *_matmuls_of(self.weight)]

    def kernel_name(self, x: Tensor) -> str:
        """Return the name of the kernel that multiplies ``x [tokens, in]`` by this weight."""
        name = self._matmul(x.shape[0]).name
        return low_bit_linear.name_of(x, self.parts) if name == LOW_BIT else name

    def _matmul(self, tokens: int) -> Matmul:
        return next(each for each in self.matmuls if tokens <= each.most_tokens)

    def multiply(
        self, x: Tensor, out: Tensor | None = None, norm: Norm | None = None, *, gated: int = False, add: bool = False
    ) -> Tensor:
        """Return ``x [tokens, in] @ weight.T + bias``, after RMSNorm with ``norm`` (weight, eps) if given.

        ``gated``: the weight is gate and up, and the result is ``silu(gate) * up`` (``gelu(gate) * up`` if `gate` is
        `GELU`). If ``out`` is given, the result is written to it, or added to it if ``add``.
        """
        return self._matmul(x.shape[0]).compute(x, self, out, norm, gated and self.gate, add)

    @property
    def kind(self) -> Hashable:
        """All that the choice of kernels depends on, except the input."""
        parts = tuple((part.layout, part.shape, part.order is None) for part in self.parts)
        optional = self.bias, self.gated_scale, self.attended_scale
        shape = self.out_features, self.in_features, self.weight.shape
        return *shape, self.weight.dtype, parts, self.gate, *(each is None for each in optional)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that a matmul of one token reads."""
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        return self.weight.nbytes if self.packed is None else self.packed.num_bytes


def _by_parts(x: Tensor, weight: LinearWeight, out: Tensor | None, norm: Norm | None, gated: int, add: bool) -> Tensor:
    return low_bit_linear.product(x, weight.parts, weight.bias, out, norm, gated=gated, add=add)


def _by_matvec(x: Tensor, weight: LinearWeight, out: Tensor | None, norm: Norm | None, gated: int, add: bool) -> Tensor:
    return matvec.product(x, weight.weight, weight.bias, out, norm, gated=gated, add=add)


def _by_tensor_cores(
    x: Tensor, weight: LinearWeight, out: Tensor | None, norm: Norm | None, gated: int, add: bool
) -> Tensor:
    x = x if norm is None else rms_norm(x, *norm)
    if out is None:
        out = x.new_empty(x.shape[0], weight.out_features // (2 if gated else 1))
    return invariant.product(x, weight.weight, weight.bias, out, gated=gated, add=add)


def _gated(gate_up: Tensor, gated: int) -> Tensor:
    return gelu_mul(gate_up) if gated == GELU else silu_mul(gate_up)


def _by_packed(x: Tensor, weight: LinearWeight, out: Tensor | None, norm: Norm | None, gated: int, add: bool) -> Tensor:
    packed = weight.packed
    assert packed is not None
    if out is not None and add and packed.add_to is not None:
        return packed.add_to(out, x)
    result = packed.apply(x if norm is None else rms_norm(x, *norm))
    if out is None:
        return _gated(result, gated) if gated else result
    return out.add_(result) if add else out.copy_(result)


def _by_library(
    x: Tensor, weight: LinearWeight, out: Tensor | None, norm: Norm | None, gated: int, add: bool
) -> Tensor:
    x, matrix, bias = x if norm is None else rms_norm(x, *norm), weight.weight, weight.bias
    if x.is_cuda and finds_variants():  # the library's own kernels are compiled, and results are not used
        result = x.new_empty(x.shape[0], weight.out_features) if out is None else out
        return _gated(result, gated) if gated else result
    if out is None:
        result = functional.linear(x, matrix, bias)
        return _gated(result, gated) if gated else result
    if add:
        out.addmm_(x, matrix.t())  # the library adds for free
        return out if bias is None else out.add_(bias)
    return torch.mm(x, matrix.t(), out=out) if bias is None else torch.addmm(bias, x, matrix.t(), out=out)


def _matmuls_of(weight: Tensor) -> list[Matmul]:
    """Return the ways to multiply by a weight ``[out, in]`` of 16 or 32 bits."""
    library = Matmul(sys.maxsize, "cuBLAS" if weight.is_cuda else "torch", _by_library)
    if not weight.is_cuda:
        return [library]
    few = [Matmul(invariant.MOST_FEW, "tensor cores", _by_tensor_cores)] if invariant.is_fast(weight) else []
    return [Matmul(matvec.most_tokens(weight), "matvec", _by_matvec), *few, library]


def _is_by_parts(x: Tensor, weight: LinearWeight) -> bool:
    """Return whether a matmul with ``x [tokens, in]`` reads the low-bit matrices, and not their 16-bit copy."""
    return x.shape[0] <= weight.max_low_bit_tokens


def embedding(token_ids: Tensor, table: Tensor | LowBit, dtype: torch.dtype) -> Tensor:
    """Look up rows ``[tokens, hidden]`` of ``table [vocab, hidden]``.

    Rows of a low-bit table are dequantized to ``dtype``. Rows of a tensor keep the tensor's dtype.
    """
    if isinstance(table, Tensor):
        return functional.embedding(token_ids, table)
    if table.device.type == "cpu":
        return dequantize(table.rows(token_ids), dtype)
    return low_bit_linear.embedding(token_ids, table, dtype)


def linear(x: Tensor, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """Return ``x [rows, in] @ weight.T + bias``. If ``out`` is given, the result is written to it."""
    return weight.multiply(x, out)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """Compute RMSNorm, then `linear`: see `reference.norm_linear`. If ``out`` is given, the result is written to it."""
    return weight.multiply(x, out, (norm_weight, eps))


def norm_gated_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: LinearWeight) -> Tensor:
    """Compute RMSNorm, the fused projection to gate and up, and gating: see `reference.norm_gated_linear`."""
    return weight.multiply(x, None, None if norm_weight is None else (norm_weight, eps), gated=True)


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
    """Compute ``residual += linear(x, weight)``, in place: see `reference.linear_add`."""
    return weight.multiply(x, residual, add=True)


def attend_add(
    q: Tensor, pages: Pages, softmax_scale: float, o: LinearWeight, residual: Tensor, plan: HostPlan | None = None
) -> Tensor:
    """Compute `paged_attention`, then `linear_add`: see `reference.attend_add`.

    ``plan`` is the result of `plan_step` for this step, if there is one.
    """
    scale = o.attended_scale
    if scale is not None and _is_by_parts(q, o) and low_bit_linear.takes_float16(q, o.parts):
        activations = decode_attention.attention_to_float16(q, pages, softmax_scale, scale)
        if activations is not None:
            return low_bit_linear.linear_of_float16(activations, o.parts, o.bias, residual, add=True)
    return linear_add(paged_attention(q, pages, softmax_scale, plan).flatten(1), o, residual)


def mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up: LinearWeight,
    down: LinearWeight,
    residual: Tensor | None,
) -> Tensor:
    """Compute `norm_gated_linear`, then the matmul with ``down``: see `reference.mlp`.

    Add the result to ``residual`` in place. Without a residual, return the result as a new tensor.
    """
    scale, norm = gate_up.gated_scale, None if norm_weight is None else (norm_weight, eps)
    if scale is not None and _writes_next_input(x, gate_up, down):
        out = x.new_empty(x.shape[0], down.out_features) if residual is None else residual
        activations = low_bit_linear.gated_to_float16(x, gate_up.parts[0], gate_up.bias, norm, scale, gate_up.gate)
        return low_bit_linear.linear_of_float16(activations, down.parts, down.bias, out, add=residual is not None)
    if gate_up.parts and low_bit_linear.is_fp8_mlp(x, gate_up.parts, down.parts):
        parts = gate_up.parts[0], gate_up.bias, down.parts[0], down.bias
        return fp8_linear.mlp(x, norm, *parts, residual, gate_up.gate)
    gated = norm_gated_linear(x, norm_weight, eps, gate_up)  # [tokens, intermediate]
    return linear(gated, down) if residual is None else linear_add(gated, down, residual)


def _writes_next_input(x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> bool:
    by_parts = _is_by_parts(x, gate_up) and _is_by_parts(x, down)
    return by_parts and low_bit_linear.writes_next_input(x, gate_up.parts, down.parts)


class Ops(NamedTuple):
    """The model's ops in which the order of summation may depend on the batch: matmuls and attention.

    There are two sets. `FASTEST` chooses the order of summation by the number of tokens. So the last digits of a
    token's result depend on the rest of the batch. `minillm.kernels.deterministic.OPS` is batch-invariant: it always
    adds in the same order. It needs a GPU.
    """

    linear: Callable[..., Tensor]
    norm_linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    attend_add: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    prefill_attention: Callable[..., Tensor]


FASTEST = Ops(linear, norm_linear, linear_add, mlp, attend_add, paged_attention, prefill_attention)
