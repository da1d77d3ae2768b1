"""Llama (Touvron et al. 2023) over a paged KV cache: a pre-norm decoder with rotary attention and SwiGLU.

    x = embed(tokens)
    each layer:  x += o(attention(rotary(qkv(norm(x)))))
                 x += down(silu(gate) * up)   with gate, up = gate_up(norm(x))
    logits = head(norm(x))

Other Llama-family models differ in config values: biases (only of q, k and v in Qwen2), norms of q and k before rotary
(Qwen3), layers without rotary (SmolLM3), layers with sliding-window attention (Mistral, Qwen2), norms after attention
and MLP instead of before them (OLMo 2) or in both places (Gemma 3). `minillm.model.architectures` lists all.

Every op comes from `kernels` and covers one line above. It fuses a norm with the projection after it, and an addition
with the projection before it. Projections of the same input are one matrix: q, k, v and gate, up. A sharded model
overrides the embedding, the additions and the logits: `minillm.model.shard`.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
    RotaryInputs,
    WorkList,
)
from minillm.model.config import ModelConfig
from minillm.model.kinds import to_compute
from minillm.model.rope import RotaryTable


@dataclass(frozen=True)
class Batch:
    """The tokens that one forward pass computes, of several sequences packed together.

    First comes one token of each decoding sequence, then the chunks of the prefilling sequences. Sequences ``0 …
    num_decodes - 1`` decode, all later sequences prefill. Tensors are on the model's device.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, each token's position in its sequence
    slot_mapping: Tensor  # [num_tokens] int64, the slot of each token's K and V; -1: not written
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32, tokens of each sequence, including those of this step
    num_decodes: int
    cu_seqlens: Tensor  # [num_seqs - num_decodes + 1] int32, starts of the chunks, counted from the first chunk
    logit_rows: Tensor | None = None  # [num_logits] int64, indices of the tokens that need logits; None: all
    shared: WorkList | None = None  # work for blocks that decoding sequences share, if reading them once is faster
    rope_lengths: list[int] | None = None  # for each token, with dynamic rope scaling only: see `RotaryTable.rows`

    @cached_property
    def decodes(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the decoding sequences."""
        return self.block_tables[: self.num_decodes], self.context_lens[: self.num_decodes]

    def with_logits(self, hidden: Tensor) -> Tensor:
        """Return the rows of ``hidden [num_tokens, hidden]`` that need logits."""
        return hidden if self.logit_rows is None else hidden[self.logit_rows]

    @cached_property
    def chunks(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the prefilling sequences."""
        return self.block_tables[self.num_decodes :], self.context_lens[self.num_decodes :]


class Attention(NamedTuple):
    """A kind of attention: rotary table and window. All layers of a kind share a step's angles, slots and plan."""

    rotary: RotaryTable | None  # None: q and k are not rotated
    window: int | None  # see `Pages.window`


Angles = dict[Attention, tuple[Tensor, Tensor]]  # cos and sin, each [num_tokens, head_dim / 2]


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor | None  # [hidden], before attention
    qkv: LinearWeight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    o: LinearWeight  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor | None  # [hidden], before the MLP
    gate_up: LinearWeight  # [2 * intermediate, hidden], gate first
    down: LinearWeight  # [hidden, intermediate]
    head_norms: HeadNorms | None
    attention: Attention
    attention_output_norm: Tensor | None = None  # [hidden]
    mlp_output_norm: Tensor | None = None  # [hidden]

    @property
    def linears(self) -> tuple[LinearWeight, LinearWeight, LinearWeight, LinearWeight]:
        """The layer's four linear layers, in the order of computation."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def kind(self) -> Hashable:
        """All that the choice of kernels depends on, except the input."""
        norms = self.input_norm, self.post_attention_norm, self.attention_output_norm, self.mlp_output_norm
        absent = (each is None for each in (*norms, self.head_norms))
        return self.attention, *absent, *(linear.kind for linear in self.linears)


@dataclass(frozen=True)
class Llama:
    """The weights of a decoder and its forward pass. `minillm.model.loader` constructs it with all weights loaded."""

    config: ModelConfig
    embedding: Tensor | LowBit  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]
    rotary: RotaryTable
    kv_in_8_bits: bool = field(default=False, kw_only=True)  # int8 K and V with scales: `LayerCache`
    ops: Ops = field(default=FASTEST, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the activations."""
        return self.norm.dtype

    @property
    def is_deterministic(self) -> bool:
        """Return whether results are batch-invariant: see `kernels.Ops`."""
        return self.ops is not FASTEST

    @cached_property
    def local(self) -> ModelConfig:
        """The config for this rank's part of the model. Without sharding, this is the model's config."""
        return self.config

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all loaded matrices as they are stored. Tied embeddings are counted once."""
        embedding = 0 if self.config.tie_word_embeddings else self.embedding.nbytes
        return embedding + sum(linear.num_bytes for linear in self.linears)

    @cached_property
    def attentions(self) -> set[Attention]:
        """The kinds of attention of all layers."""
        return {layer.attention for layer in self.layers}

    @property
    def linears(self) -> list[LinearWeight]:
        """All linear layers in the order of computation; the last is the head."""
        return [*(linear for each in self.layers for linear in each.linears), self.head]

    @property
    def kv_element_size(self) -> int:
        """Bytes per element of K and V in the pool: the argument of `ModelConfig.kv_bytes_per_token`."""
        return 1 if self.kv_in_8_bits else self.dtype.itemsize

    def forward(self, batch: Batch, kv_cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Write the tokens' K and V, and return logits ``[num_logits, vocab]`` in the model's dtype.

        If ``out`` is given, the logits are written to it.
        """
        return self.logits(batch.with_logits(self.hidden(batch, kv_cache)), out)

    def hidden(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Write the tokens' K and V, and return the last layer's output ``[num_tokens, hidden]``."""
        x = self.embed(batch.token_ids)  # [num_tokens, hidden]
        steps = self.steps(batch, kv_cache.layers[0])
        layers: Iterable[tuple[Layer, LayerCache]] = zip(self.layers, kv_cache.layers, strict=True)
        for layer, cache in to_compute(layers, lambda pair: pair[0].kind):
            qkv = self.project(x, layer)
            x = self._add_attention(qkv, cache, batch, layer, *steps[layer.attention], x)
            x = self._add_mlp(x, layer)
        return x

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits ``[n, vocab]`` of ``x [n, hidden]``: the final norm, then the output head.

        If ``out`` is given, the result is written to it.
        """
        return self.ops.norm_linear(x, self.norm, self.config.rms_norm_eps, self.head, out)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings ``[num_tokens, hidden]`` of ``token_ids [num_tokens]``."""
        x, scale = kernels.embedding(token_ids, self.embedding, self.dtype), self.config.embedding_scale
        return x if scale == 1 else x.mul_(scale)

    def project(self, x: Tensor, layer: Layer, out: Tensor | None = None) -> Tensor:
        """Return q, k and v ``[num_tokens, (heads + 2 kv) * head_dim]`` of a layer, from its input ``x``.

        The input is normalized first if the layer has that norm. If ``out`` is given, the result is written to it.
        """
        if layer.input_norm is None:
            return self.ops.linear(x, layer.qkv, out)
        return self.ops.norm_linear(x, layer.input_norm, self.config.rms_norm_eps, layer.qkv, out)

    def finish(self, attended: Tensor, layer: Layer, x: Tensor) -> Tensor:
        """Return a layer's output from its input ``x`` and the result of `attend`, in place if possible."""
        return self._add_mlp(self._add_output(attended, layer, x), layer)

    def _add_output(self, attended: Tensor, layer: Layer, x: Tensor) -> Tensor:
        """Return ``x + o(attended)``, or ``x + norm(o(attended))`` if the layer has that norm, in place if possible."""
        if layer.attention_output_norm is None:
            return self._linear_add(attended, layer.o, x)
        return self._norm_add(self.ops.linear(attended, layer.o), layer.attention_output_norm, x)

    def _norm_add(self, branch: Tensor, norm: Tensor, x: Tensor) -> Tensor:
        """Return ``x + norm(branch)``, in place."""
        return kernels.norm_add(branch, norm, self.config.rms_norm_eps, x)

    def _linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
        """Return ``residual + linear(x, weight)``, in place if possible."""
        return self.ops.linear_add(x, weight, residual)

    def _attend_add(self, q: Tensor, pages: Pages, layer: Layer, residual: Tensor, plan: HostPlan | None) -> Tensor:
        """Return ``residual + o(attention)``, in place if possible, for a batch of decoding tokens only."""
        return self.ops.attend_add(q, pages, self.config.softmax_scale, layer.o, residual, plan)

    def _add_mlp(self, x: Tensor, layer: Layer) -> Tensor:
        """Return ``x + down(silu(gate) * up)``, in place if possible."""
        if layer.mlp_output_norm is None:
            return self._mlp(x, layer, x)
        return self._norm_add(self._mlp(x, layer, None), layer.mlp_output_norm, x)

    def _mlp(self, x: Tensor, layer: Layer, residual: Tensor | None) -> Tensor:
        """Return the MLP of the normalized ``x``, plus ``residual`` if there is one."""
        eps = self.config.rms_norm_eps
        return self.ops.mlp(x, layer.post_attention_norm, eps, layer.gate_up, layer.down, residual)

    def steps(self, batch: Batch, cache: LayerCache) -> dict[Attention, tuple[RotaryInputs, HostPlan | None]]:
        """Return for each kind of attention: the rotary angles and slots of a step, and its attention plan or None.

        All layers of one kind use the same angles, slots and plan. ``cache`` may be the cache of any layer.
        """
        steps = {}
        for kind, angles in self.angles(batch).items():
            rope, pages = RotaryInputs(*angles, batch.slot_mapping), cache.pages(*batch.decodes, kind.window)
            steps[kind] = rope, kernels.plan_step(rope, pages, self.local.num_heads)
        return steps

    def angles(self, batch: Batch) -> Angles:
        """Return cos and sin of the tokens' rotary angles, for each kind of attention."""
        tables = {kind.rotary or self.rotary for kind in self.attentions}
        rows = {table: table.rows(batch.positions, batch.rope_lengths) for table in tables}
        angles: Angles = {}
        for kind in self.attentions:
            cos, sin = rows[kind.rotary or self.rotary]
            angles[kind] = (cos, sin) if kind.rotary else (torch.ones_like(cos), torch.zeros_like(sin))
        return angles

    def _add_attention(
        self,
        qkv: Tensor,
        cache: LayerCache,
        batch: Batch,
        layer: Layer,
        rope: RotaryInputs,
        plan: HostPlan | None,
        x: Tensor,
    ) -> Tensor:
        """Return ``x + o(attention)`` for all tokens of the batch, in place if possible.

        ``qkv`` is the layer's projection of the tokens. Their K and V are first written to its ``cache``.
        """
        is_fused = layer.attention_output_norm is None
        if batch.num_decodes < qkv.shape[0] or batch.shared is not None or not is_fused:
            return self._add_output(self.attend(qkv, cache, batch, layer, rope, plan), layer, x)
        q, pages = self._rotated(qkv, cache, layer, rope, plan), cache.pages(*batch.decodes, layer.attention.window)
        return self._attend_add(q, pages, layer, x, plan)

    def attend(
        self, qkv: Tensor, cache: LayerCache, batch: Batch, layer: Layer, rope: RotaryInputs, plan: HostPlan | None
    ) -> Tensor:
        """Write the tokens' K and V to the layer's ``cache``, and compute attention.

        Return the attention output of all tokens, ``[num_tokens, num_heads * head_dim]``.
        """
        q, n, scale = self._rotated(qkv, cache, layer, rope, plan), batch.num_decodes, self.config.softmax_scale
        window, outputs = layer.attention.window, []
        if n:
            pages = cache.pages(*batch.decodes, window)
            if batch.shared is None:
                outputs.append(self.ops.paged_attention(q[:n], pages, scale, plan))
            else:
                outputs.append(kernels.prefix_attention(q[:n], pages, scale, batch.shared))
        if n < q.shape[0]:
            pages = cache.pages(*batch.chunks, window)
            outputs.append(self.ops.prefill_attention(q[n:], pages, batch.cu_seqlens, scale))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [num_tokens, num_heads, head_dim]
        return attended.flatten(1)

    def _rotated(
        self, qkv: Tensor, cache: LayerCache, layer: Layer, rope: RotaryInputs, plan: HostPlan | None
    ) -> Tensor:
        """Rotate q and k, and write k and v to their slots. Return q ``[num_tokens, num_heads, head_dim]``."""
        c, norms = self.local, layer.head_norms
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [num_tokens, q + k + v heads, head_dim]
        q, k, v = heads.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if norms is not None and c.qk_norm == "all":
            for part, weight in ((q.flatten(1), norms.q), (k.flatten(1), norms.k)):  # views
                part.copy_(kernels.rms_norm(part, weight, norms.eps))
            norms = None
        kernels.rotary_write_kv(q, k, v, rope, cache, norms, plan)
        return q
