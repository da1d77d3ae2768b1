"""Llama (Touvron et al. 2023) over a paged KV cache: a pre-norm decoder with rotary attention and SwiGLU.

    x = embed(tokens)
    each layer:  x += o(attention(rotary(qkv(norm(x)))))
                 x += down(silu(gate) * up)   with gate, up = gate_up(norm(x))
    logits = head(norm(x))

Its kin differ in data of the config: biases (of q, k and v alone in Qwen2), norms of q and k in front of rotary
(Qwen3), layers without rotary (SmolLM3), layers in which a token sees only a window of the last ones (Mistral, Qwen2).

Every op comes from `kernels`, and is a line above: a norm belongs to the projection behind it, an addition to the one
in front of it. Projections that read the same input are one matrix: q, k, v and gate, up. A model that several devices
share differs in the first line, the additions and the last: `minillm.model.shard`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import (
    FASTEST,
    HeadNorms,
    HostPlan,
    KVCache,
    LayerCache,
    LinearWeight,
    LowBit,
    Ops,
    Pages,
    Places,
    WorkList,
)
from minillm.model.config import ModelConfig
from minillm.model.rope import RotaryTable


@dataclass(frozen=True)
class Batch:
    """Tokens of several sequences packed into one row: first one token of each decoding sequence, then the chunks.

    Sequences ``0 … num_decodes - 1`` decode; the rest prefill. Tensors lie on the model's device.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, of each token within its sequence
    slot_mapping: Tensor  # [num_tokens] int64, where each token's K and V go; -1 writes nothing
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32, this step's tokens included
    num_decodes: int
    cu_seqlens: Tensor  # [num_seqs - num_decodes + 1] int32, starts of the chunks, counted from the first chunk
    logit_rows: Tensor | None = None  # [num_logits] int64, the tokens whose logits are wanted; None: of all
    shared: WorkList | None = None  # the decodes' common blocks, where reading them once is worth it
    rope_lengths: list[int] | None = None  # per token, for dynamic rope scaling only: see RotaryTable.rows

    @cached_property
    def decodes(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the sequences that decode."""
        return self.block_tables[: self.num_decodes], self.context_lens[: self.num_decodes]

    @cached_property
    def chunks(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the sequences that prefill."""
        return self.block_tables[self.num_decodes :], self.context_lens[self.num_decodes :]


class CompiledLayers(Protocol):
    """All layers, compiled for the batches that it takes: see `minillm.model.one_token`."""

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one that it can compute."""

    def __call__(self, x: Tensor, batch: Batch, angles: tuple[Tensor, Tensor], kv_cache: KVCache) -> Tensor:
        """Write the tokens' K and V; return the last layer's output. ``angles`` are `RotaryTable.rows` of the batch."""


class Attention(NamedTuple):
    """A kind of attention: layers of one kind share the facts of a step."""

    has_rope: bool
    window: int | None  # see `Pages.window`


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    o: LinearWeight  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden], gate first
    down: LinearWeight  # [hidden, intermediate]
    head_norms: HeadNorms | None
    attention: Attention

    @property
    def linears(self) -> tuple[LinearWeight, LinearWeight, LinearWeight, LinearWeight]:
        """Its linear layers, in the order in which they compute."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class Llama:
    """A decoder's weights and its forward pass. Complete when constructed; see `minillm.model.loader`."""

    config: ModelConfig
    embedding: Tensor | LowBit  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]
    rotary: RotaryTable
    kv_in_8_bits: bool = field(default=False, kw_only=True)  # K and V as whole numbers with scales: `LayerCache`
    ops: Ops = field(default=FASTEST, kw_only=True)
    one_token: CompiledLayers | None = field(default=None, kw_only=True)

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's bits do not depend on the batch: see `kernels.Ops`."""
        return self.ops is not FASTEST

    @cached_property
    def local(self) -> ModelConfig:
        """The shape of the part that this object holds and computes."""
        return self.config

    @cached_property
    def weight_bytes(self) -> int:
        """All matrices that are here, as `ModelConfig.num_parameters` counts them, each as it is stored."""
        embedding = 0 if self.config.tie_word_embeddings else self.embedding.nbytes
        return embedding + sum(linear.num_bytes for linear in self.linears)

    @property
    def linears(self) -> list[LinearWeight]:
        """All linear layers, the head last."""
        return [*(linear for each in self.layers for linear in each.linears), self.head]

    @property
    def copied_bytes(self) -> int:
        """What a copy in 16 bits of the matrices of few bits takes: `LinearWeight.keep_copy`."""
        return sum(linear.copied_bytes(self.dtype) for linear in self.linears)

    def bound_results(self) -> None:
        """Find the scales with which results go on in float16 between low-bit products on a GPU: see `kernels.mlp`."""
        for layer in self.layers:
            layer.gate_up.bound_gated(layer.post_attention_norm)
            layer.o.bound_attended(layer.qkv, layer.input_norm)

    @property
    def kv_element_size(self) -> int:
        """Bytes of a number in the pool, for `ModelConfig.kv_bytes_per_token`."""
        return 1 if self.kv_in_8_bits else self.dtype.itemsize

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty pool.

        Memory that was never written is not touched on a CPU, so a large pool costs nothing before it is used.
        """
        c = self.local
        shape = (c.num_layers, 2, num_blocks, block_size, c.num_kv_heads, c.head_dim)
        # No huge pages: with them the first token of each block would clear 2 MB per layer, 0.34 s on two cores.
        if not self.kv_in_8_bits:
            return KVCache(torch.empty(shape, dtype=self.dtype, device=self.device))
        scales = torch.empty(*shape[:3], c.num_kv_heads, block_size, dtype=torch.float32, device=self.device)
        return KVCache(torch.empty(shape, dtype=torch.int8, device=self.device), scales)

    def forward(self, batch: Batch, kv_cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Write the tokens' K and V; return logits ``[num_logits, vocab]`` in the model's dtype, ``out`` if given."""
        return self.logits(self.hidden(batch, kv_cache), batch.logit_rows, out)

    def hidden(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Write the tokens' K and V; return the last layer's output ``[num_tokens, hidden]``."""
        x = self._embed(batch.token_ids)  # [num_tokens, hidden]
        if self.one_token is not None and self.one_token.takes(batch):
            return self.one_token(x, batch, self.rotary.rows(batch.positions, batch.rope_lengths), kv_cache)
        eps = self.config.rms_norm_eps
        steps = self._steps(batch, kv_cache.layers[0])
        for layer, cache in zip(self.layers, kv_cache.layers, strict=True):
            qkv = self.ops.norm_linear(x, layer.input_norm, eps, layer.qkv)  # [num_tokens, (heads + 2 kv) * head_dim]
            x = self._add_attention(qkv, cache, batch, layer, *steps[layer.attention], x)
            x = self._add_mlp(x, layer)
        return x

    def logits(self, hidden: Tensor, rows: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Logits ``[num_logits, vocab]`` of these ``rows`` of ``hidden [num_tokens, hidden]``; None: of all."""
        return self._logits(hidden if rows is None else hidden[rows], out)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return kernels.embedding(token_ids, self.embedding, self.dtype)

    def _linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
        """``residual + linear(x, weight)``, in place where that is possible."""
        return self.ops.linear_add(x, weight, residual)

    def _attend_add(self, q: Tensor, pages: Pages, layer: Layer, residual: Tensor, plan: HostPlan | None) -> Tensor:
        """``residual + o(attention)`` of tokens that all decode, in place where that is possible."""
        return self.ops.attend_add(q, pages, self.local.head_dim**-0.5, layer.o, residual, plan)

    def _add_mlp(self, x: Tensor, layer: Layer) -> Tensor:
        """``x + down(silu(gate) * up)``, in place where that is possible."""
        return self._mlp(x, layer, x)

    def _mlp(self, x: Tensor, layer: Layer, residual: Tensor | None) -> Tensor:
        eps = self.config.rms_norm_eps
        return self.ops.mlp(x, layer.post_attention_norm, eps, layer.gate_up, layer.down, residual)

    def _logits(self, x: Tensor, out: Tensor | None) -> Tensor:
        return self.ops.norm_linear(x, self.norm, self.config.rms_norm_eps, self.head, out)

    def _steps(self, batch: Batch, cache: LayerCache) -> dict[Attention, tuple[Places, HostPlan | None]]:
        """For each kind of attention, the angles and slots of the tokens, and the plan; ``cache`` is any layer's."""
        cos, sin = self.rotary.rows(batch.positions, batch.rope_lengths)
        steps = {}
        for kind in {layer.attention for layer in self.layers}:
            angles = (cos, sin) if kind.has_rope else (torch.ones_like(cos), torch.zeros_like(sin))
            places, pages = Places(*angles, batch.slot_mapping), cache.pages(*batch.decodes, kind.window)
            steps[kind] = places, kernels.plan_step(places, pages, self.local.num_heads)
        return steps

    def _add_attention(
        self,
        qkv: Tensor,
        cache: LayerCache,
        batch: Batch,
        layer: Layer,
        places: Places,
        plan: HostPlan | None,
        x: Tensor,
    ) -> Tensor:
        """``x + o(attention)`` of all tokens over one layer's ``cache``, in place where that is possible."""
        c, scale = self.local, self.local.head_dim**-0.5
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [num_tokens, q + k + v heads, head_dim]
        q, k, v = heads.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        kernels.rotary_write_kv(q, k, v, places, cache, layer.head_norms, plan)
        n, outputs = batch.num_decodes, []
        if n:
            pages = cache.pages(*batch.decodes, layer.attention.window)
            if batch.shared is None:
                if n == q.shape[0]:
                    return self._attend_add(q, pages, layer, x, plan)
                outputs.append(self.ops.paged_attention(q[:n], pages, scale, plan))
            else:
                outputs.append(kernels.prefix_attention(q[:n], pages, scale, batch.shared))
        if n < q.shape[0]:
            pages = cache.pages(*batch.chunks, layer.attention.window)
            outputs.append(self.ops.prefill_attention(q[n:], pages, batch.cu_seqlens, scale))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [num_tokens, num_heads, head_dim]
        return self._linear_add(attended.flatten(1), layer.o, x)
