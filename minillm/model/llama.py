"""Llama (Touvron et al. 2023) over a paged KV cache: a pre-norm decoder with rotary attention and SwiGLU.

    x = embed(tokens)
    each layer:  x += o(attention(rotary(qkv(norm(x)))))
                 x += down(silu(gate) * up)   with gate, up = gate_up(norm(x))
    logits = head(norm(x))

Every op comes from `kernels`, and is a line above: a norm belongs to the projection behind it, an addition to the one
in front of it. Projections that read the same input are one matrix: q, k, v and gate, up.

Several ranks share a model as `minillm.model.shard` says. Then the sums behind o and down run over the ranks, and so
does the embedding; the logits are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from minillm import kernels
from minillm.kernels import LinearWeight, Pages, Places
from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.rope import RotaryTable
from minillm.model.shard import Shard
from minillm.parallel.collectives import Ranks


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights; heads and intermediate columns are this rank's."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    o: LinearWeight  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden], gate first
    down: LinearWeight  # [hidden, intermediate]


@dataclass(frozen=True)
class Llama:
    """A decoder's weights and its forward pass. Complete when constructed; see `minillm.model.loader`."""

    config: ModelConfig
    shard: Shard  # the part that is here: all of it, unless there are `ranks`
    embedding: Tensor  # [vocab of the shard, hidden]
    layers: list[Layer]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab of the shard, hidden]
    rotary: RotaryTable
    ranks: Ranks | None = None  # the processes that share the model

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @cached_property
    def local(self) -> ModelConfig:
        """The shape of the part that is here."""
        return self.shard.local(self.config)

    @cached_property
    def weight_bytes(self) -> int:
        """All matrices that are here, as `ModelConfig.num_parameters` counts them, each as it is stored."""
        linears = [linear for each in self.layers for linear in (each.qkv, each.o, each.gate_up, each.down)]
        embedding = 0 if self.config.tie_word_embeddings else self.embedding.nbytes
        return embedding + sum(linear.num_bytes for linear in (*linears, self.head))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """An empty pool ``[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]``: K at 0, V at 1.

        Memory that was never written is not touched on a CPU, so a large pool costs nothing before it is used. (In huge
        pages it would: each first token of a block then clears 2 MB per layer, 0.34 s on two cores.)
        """
        c = self.local
        return torch.empty(
            (c.num_layers, 2, num_blocks, block_size, c.num_kv_heads, c.head_dim), dtype=self.dtype, device=self.device
        )

    def forward(self, batch: Batch, kv_cache: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the batch's tokens, write their K and V, return ``[num_logits, vocab]`` logits in the model's dtype.

        All ranks compute the same batch; rank 0 alone returns logits that mean anything.

        Args:
            out: where to write the logits.
        """
        eps = self.config.rms_norm_eps
        cos, sin = self.rotary.rows(batch.positions, batch.rope_lengths)
        places = Places(cos, sin, batch.slot_mapping)
        plan = kernels.plan_step(places, Pages(kv_cache[0, 0], kv_cache[0, 1], *batch.decodes), self.local.num_heads)
        x = self._embed(batch.token_ids)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            qkv = kernels.norm_linear(x, layer.input_norm, eps, layer.qkv)
            attended = self._attention(qkv, layer_cache, batch, places, plan)
            x = self._linear_add(attended, layer.o, x)
            gated = kernels.norm_gated_linear(x, layer.post_attention_norm, eps, layer.gate_up)
            x = self._linear_add(gated, layer.down, x)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        if self.ranks is None:
            return kernels.norm_linear(x, self.norm, eps, self.head, out)
        return self._gather_logits(kernels.norm_linear(x, self.norm, eps, self.head), out)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """``[tokens, hidden]``; a rank looks up the tokens of its part of the vocabulary, the others give zeros."""
        if self.ranks is None:
            return functional.embedding(token_ids, self.embedding)
        vocab = self.shard.vocab
        elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        x = functional.embedding((token_ids - vocab.start).masked_fill_(elsewhere, 0), self.embedding)
        return self.ranks.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def _linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
        """``residual + linear(x, weight)``, in place where that is possible; over ranks, rank 0 adds the residual."""
        if self.ranks is None:
            return kernels.linear_add(x, weight, residual)
        first = self.ranks.rank == 0
        return self.ranks.all_reduce(kernels.linear_add(x, weight, residual) if first else kernels.linear(x, weight))

    def _gather_logits(self, part: Tensor, out: Tensor | None) -> Tensor:
        """``[num_logits, vocab]`` from every rank's ``[num_logits, vocab of a shard]``, on rank 0."""
        assert self.ranks is not None
        vocab, width = self.config.vocab_size, part.shape[1]
        parts = self.ranks.all_gather(part) if len(part) else part.new_empty(self.ranks.size, 0, width)
        if self.ranks.rank:
            return part
        logits = part.new_empty(part.shape[0], vocab) if out is None else out
        for number, each in enumerate(parts):
            logits[:, number * width : (number + 1) * width] = each[:, : max(0, vocab - number * width)]
        return logits

    def _attention(
        self, qkv: Tensor, cache: Tensor, batch: Batch, places: Places, plan: kernels.HostPlan | None
    ) -> Tensor:
        """Attention of the tokens of one projection, ``[tokens, num_heads * head_dim]``."""
        c = self.local
        scale = c.head_dim**-0.5
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [tokens, q + k + v heads, head_dim]
        q, k, v = heads.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        k_cache, v_cache = cache.unbind(0)
        kernels.rotary_write_kv(q, k, v, places, k_cache, v_cache, plan)
        n = batch.num_decodes
        outputs = []
        if n:
            pages = Pages(k_cache, v_cache, *batch.decodes)
            if batch.shared is None:
                outputs.append(kernels.paged_attention(q[:n], pages, scale, plan))
            else:
                outputs.append(kernels.prefix_attention(q[:n], pages, scale, batch.shared))
        if n < q.shape[0]:
            pages = Pages(k_cache, v_cache, *batch.chunks)
            outputs.append(kernels.prefill_attention(q[n:], pages, batch.cu_seqlens, scale))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended.flatten(1)
