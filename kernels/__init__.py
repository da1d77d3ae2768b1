"""Every op of the model and the sampler, on tensors alone: no sequence, no engine, no configuration.

Each public op has one contract, stated in `minillm.kernels.reference`. Where its tensors lie decides what computes it:
Triton on a GPU, `minillm.kernels.cpu` on a CPU where that has a faster version, the reference for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import cpu, reference
from minillm.kernels.arguments import DecodeInputs, Field
from minillm.kernels.cpu import HostPlan
from minillm.kernels.prefix_plan import AttentionShape, Costs, Plan, WorkList, plan_attention
from minillm.kernels.reference import log_probabilities

if torch.cuda.is_available():  # Triton is not imported where nothing can run it
    from minillm.kernels import (
        activation,
        blocks,
        chunked_prefill,
        decode_attention,
        decode_rows,
        matvec,
        norm,
        prefix_decode_attention,
        rotary,
        sampling,
        top_k,
    )

__all__ = [
    "AttentionShape",
    "Costs",
    "DecodeInputs",
    "Field",
    "HostPlan",
    "LinearWeight",
    "Plan",
    "WorkList",
    "begin_decode",
    "block_copy",
    "end_decode",
    "gather_blocks",
    "linear",
    "linear_add",
    "log_probabilities",
    "norm_gated_linear",
    "norm_linear",
    "paged_attention",
    "penalise",
    "plan_attention",
    "plan_step",
    "prefill_attention",
    "prefix_attention",
    "rms_norm",
    "rotary_write_kv",
    "sample",
    "sample_with_logprobs",
    "scatter_blocks",
    "silu_mul",
    "top_log_probabilities",
]


class LinearWeight:
    """A weight ``[out, in]`` and optional bias ``[out]``, in the layout in which `linear` reads it fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = cpu.packed_linear(weight, bias)
        self.weight = weight if self.packed is None else weight.new_empty(0)  # held once
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """What one product reads of the weight."""
        itemsize = self.weight.itemsize if self.packed is None else self.packed.itemsize
        return self.out_features * self.in_features * itemsize


def _is_for_matvec(x: Tensor, weight: LinearWeight) -> bool:
    return x.is_cuda and matvec.takes(x.shape[0], weight.weight)


def linear(x: Tensor, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """``x [rows, in] @ weight.T + bias``, into ``out`` where it is given."""
    if weight.packed is not None:
        result = weight.packed.apply(x)
        return result if out is None else out.copy_(result)
    if out is None and _is_for_matvec(x, weight):
        return matvec.matvec(x, weight.weight, weight.bias)
    if out is None:
        return functional.linear(x, weight.weight, weight.bias)
    if weight.bias is None:
        return torch.mm(x, weight.weight.t(), out=out)
    return torch.addmm(weight.bias, x, weight.weight.t(), out=out)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """RMSNorm, then `linear`, into ``out`` where it is given: see `reference.norm_linear`."""
    if _is_for_matvec(x, weight):
        return matvec.norm_matvec(x, norm_weight, eps, weight.weight, weight.bias, out)
    return linear(rms_norm(x, norm_weight, eps), weight, out)


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: LinearWeight) -> Tensor:
    """RMSNorm, the packed projection to gate and up, and their product: see `reference.norm_gated_linear`."""
    if _is_for_matvec(x, weight):
        return matvec.norm_gated_matvec(x, norm_weight, eps, weight.weight, weight.bias)
    return silu_mul(linear(rms_norm(x, norm_weight, eps), weight))


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
    """``residual += linear(x, weight)``, in place: see `reference.linear_add`."""
    if weight.packed is not None:
        return residual.add_(weight.packed.apply(x))
    if _is_for_matvec(x, weight):
        return matvec.matvec_add(x, weight.weight, weight.bias, residual)
    residual.addmm_(x, weight.weight.t())  # the addition costs nothing there
    return residual if weight.bias is None else residual.add_(weight.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: see `reference.rms_norm`."""
    return norm.rms_norm(x, weight, eps) if x.is_cuda else cpu.rms_norm(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the packed projection: see `reference.silu_mul`."""
    return activation.silu_mul(gate_up) if gate_up.is_cuda else cpu.silu_mul(gate_up)


def plan_step(
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    k_cache: Tensor,
    num_heads: int,
) -> HostPlan | None:
    """On a CPU: what the ops of all layers of a step have in common, see `cpu.plan_step`. A GPU's kernels need none."""
    if k_cache.is_cuda:
        return None
    return cpu.plan_step(cos, sin, slot_mapping, block_tables, context_lens, k_cache, num_heads)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    plan: HostPlan | None = None,
) -> None:
    """Rotate q, write rotated k, and v, to their blocks: see `reference.rotary_write_kv`.

    Args:
        plan: the step's, where there is one.
    """
    if q.is_cuda:
        rotary.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    else:
        cpu.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, plan)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    plan: HostPlan | None = None,
) -> Tensor:
    """Decode attention, one query per sequence: see `reference.paged_attention`.

    Args:
        plan: made for the same tables and lengths, where there is one.
    """
    if q.is_cuda:
        return decode_attention.paged_attention(q, k_cache, v_cache, block_tables, context_lens, softmax_scale)
    return cpu.paged_attention(q, k_cache, v_cache, block_tables, context_lens, softmax_scale, plan)


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    work: WorkList,
) -> Tensor:
    """`paged_attention` of sequences that share blocks: the same result, and shared blocks are read once.

    Args:
        work: filled with a plan (`plan_attention`) for the same tables.
    """
    if q.is_cuda:
        return prefix_decode_attention.prefix_attention(
            q, k_cache, v_cache, block_tables, context_lens, softmax_scale, work
        )
    return cpu.paged_attention(q, k_cache, v_cache, block_tables, context_lens, softmax_scale)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Causal attention of chunks over the paged cache: see `reference.prefill_attention`."""
    op = chunked_prefill.prefill_attention if q.is_cuda else cpu.prefill_attention
    return op(q, k_cache, v_cache, block_tables, context_lens, cu_seqlens, softmax_scale)


def block_copy(kv_cache: Tensor, copies: Tensor) -> None:
    """Copy whole blocks in every layer: see `reference.block_copy`."""
    op = blocks.block_copy if kv_cache.is_cuda else reference.block_copy
    op(kv_cache, copies)


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks to a staging buffer: see `reference.gather_blocks`."""
    op = blocks.gather_blocks if kv_cache.is_cuda else reference.gather_blocks
    op(kv_cache, block_ids, staging)


def scatter_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy a staging buffer back to blocks: see `reference.scatter_blocks`."""
    op = blocks.scatter_blocks if kv_cache.is_cuda else reference.scatter_blocks
    op(kv_cache, block_ids, staging)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token per row: see `reference.sample`."""
    if logits.is_cuda:
        return sampling.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)[0]
    return cpu.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens of each row: see `reference.top_log_probabilities`."""
    if logits.is_cuda and count <= 256:
        return top_k.top_log_probabilities(logits, count)
    return cpu.top_log_probabilities(logits, count)


def begin_decode(words: Tensor, rows: Tensor, block_size: int, inputs: DecodeInputs) -> None:
    """Gather the state of decoding sequences and move their positions on: see `reference.begin_decode`."""
    op = decode_rows.begin_decode if words.is_cuda else reference.begin_decode
    op(words, rows, block_size, inputs)


def penalise(logits: Tensor, words: Tensor, counts: Tensor, rows: Tensor, out: Tensor) -> None:
    """Apply the penalties of decoding sequences: see `reference.penalise`."""
    op = decode_rows.penalise if logits.is_cuda else reference.penalise
    op(logits, words, counts, rows, out)


def end_decode(words: Tensor, counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Store the drawn tokens of decoding sequences: see `reference.end_decode`."""
    op = decode_rows.end_decode if words.is_cuda else reference.end_decode
    op(words, counts, rows, token_ids)


def sample_with_logprobs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """`sample`, and the drawn tokens' log-probabilities under ``logits`` ``[rows]`` float32: NaN where a logit is."""
    if logits.is_cuda:
        return sampling.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    tokens = cpu.sample(logits.float(), temperature, top_k, top_p, min_p, seeds, positions)
    return tokens, log_probabilities(logits, tokens)
