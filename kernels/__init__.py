"""Every op of the model and the sampler, on tensors alone: no sequence, no engine, no configuration.

Each public op has one contract, stated in `kernels.reference`, and is chosen by where its tensors lie: Triton on a GPU,
`kernels.cpu` on a CPU where that has a faster version, the reference for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu, reference

if torch.cuda.is_available():  # Triton is not imported where nothing can run it
    from kernels import activation, blocks, chunked_prefill, decode_attention, norm, rotary, sampling

__all__ = [
    "LinearWeight",
    "add_rms_norm",
    "block_copy",
    "gather_blocks",
    "linear",
    "paged_attention",
    "prefill_attention",
    "rms_norm",
    "rotary_write_kv",
    "sample",
    "scatter_blocks",
    "silu_mul",
    "top_log_probabilities",
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: see `reference.rms_norm`."""
    return norm.rms_norm(x, weight, eps) if x.is_cuda else cpu.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm: see `reference.add_rms_norm`."""
    op = norm.add_rms_norm if x.is_cuda else cpu.add_rms_norm
    return op(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the packed projection: see `reference.silu_mul`."""
    return activation.silu_mul(gate_up) if gate_up.is_cuda else cpu.silu_mul(gate_up)


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
    op = rotary.rotary_write_kv if q.is_cuda else cpu.rotary_write_kv
    op(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, softmax_scale: float
) -> Tensor:
    """Decode attention, one query per sequence: see `reference.paged_attention`."""
    op = decode_attention.paged_attention if q.is_cuda else cpu.paged_attention
    return op(q, k_cache, v_cache, block_tables, context_lens, softmax_scale)


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
        return sampling.top_log_probabilities(logits, count)
    return cpu.top_log_probabilities(logits, count)
