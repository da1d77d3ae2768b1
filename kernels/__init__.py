"""Every op of the model and the sampler, on tensors alone: no sequence, no engine, no configuration.

Each public op has one contract, stated in `kernels.reference`, and is chosen by where its tensors lie: on a CPU the
versions of `kernels.cpu`, where it has one, and the reference everywhere else.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kernels import cpu, reference
from kernels.reference import add_rms_norm, block_copy, log_probabilities, rms_norm, silu_mul

__all__ = [
    "LinearWeight",
    "add_rms_norm",
    "block_copy",
    "linear",
    "log_probabilities",
    "paged_attention",
    "prefill_attention",
    "rms_norm",
    "rotary_write_kv",
    "sample",
    "silu_mul",
]


class LinearWeight:
    """A weight ``[out, in]`` and optional bias ``[out]``, in the layout in which `linear` reads it fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = cpu.can_pack(weight)
        self.weight = cpu.pack_weight(weight) if self.packed else weight
        self.bias = bias


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """``x [rows, in] @ weight.T + bias``."""
    if weight.packed:
        return cpu.packed_linear(x, weight.weight, weight.bias)
    return functional.linear(x, weight.weight, weight.bias)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate q, write rotated k, and v, to their blocks: see `reference.rotary_write_kv`."""
    op = cpu.rotary_write_kv if q.device.type == "cpu" else reference.rotary_write_kv
    op(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, softmax_scale: float
) -> Tensor:
    """Decode attention, one query per sequence: see `reference.paged_attention`."""
    if q.device.type == "cpu":
        return cpu.paged_attention(q, k_cache, v_cache, block_tables, context_lens, softmax_scale)
    return reference.paged_attention(q, k_cache, v_cache, block_tables, context_lens, softmax_scale)[0]


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
    op = cpu.prefill_attention if q.device.type == "cpu" else reference.prefill_attention
    return op(q, k_cache, v_cache, block_tables, context_lens, cu_seqlens, softmax_scale)


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
    op = cpu.sample if logits.device.type == "cpu" else reference.sample
    return op(logits, temperature, top_k, top_p, min_p, seeds, positions)
