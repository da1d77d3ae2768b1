"""Llama (Touvron et al. 2023) over a paged KV cache: a pre-norm decoder with rotary attention and SwiGLU.

    x = embed(tokens)
    each layer:  x += o(attention(rotary(qkv(norm(x)))))
                 x += down(silu(gate) * up)   with gate, up = gate_up(norm(x))
    logits = head(norm(x))

Every op comes from `kernels`, and is a line above: a norm belongs to the projection behind it, an addition to the one
in front of it. Projections that read the same input are one matrix: q, k, v and gate, up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import kernels
from kernels import LinearWeight
from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.rope import RotaryTable


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights."""

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
    embedding: Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]
    rotary: RotaryTable

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """An empty pool ``[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]``: K at 0, V at 1.

        Memory that was never written is not touched on a CPU, so a large pool costs nothing before it is used. (In huge
        pages it would: each first token of a block then clears 2 MB per layer, 0.34 s on two cores.)
        """
        c = self.config
        return torch.empty(
            (c.num_layers, 2, num_blocks, block_size, c.num_kv_heads, c.head_dim), dtype=self.dtype, device=self.device
        )

    def forward(self, batch: Batch, kv_cache: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the batch's tokens, write their K and V, return ``[num_logits, vocab]`` logits in the model's dtype.

        Args:
            out: where to write the logits.
        """
        eps = self.config.rms_norm_eps
        cos, sin = self.rotary.rows(batch.positions, batch.rope_lengths)
        x = functional.embedding(batch.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = kernels.norm_linear(x, layer.input_norm, eps, layer.qkv)
            attended = self._attention(qkv, cos, sin, batch, kv_cache[index, 0], kv_cache[index, 1])
            x = kernels.linear_add(attended, layer.o, x)
            gated = kernels.norm_gated_linear(x, layer.post_attention_norm, eps, layer.gate_up)
            x = kernels.linear_add(gated, layer.down, x)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return kernels.norm_linear(x, self.norm, eps, self.head, out)

    def _attention(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Attention of the tokens of one projection, ``[tokens, num_heads * head_dim]``."""
        c = self.config
        scale = c.head_dim**-0.5
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # [tokens, q + k + v heads, head_dim]
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        kernels.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, batch.slot_mapping)
        n = batch.num_decodes
        outputs = []
        if n:
            decodes = (q[:n], k_cache, v_cache, batch.block_tables[:n], batch.context_lens[:n], scale)
            if batch.shared is None:
                outputs.append(kernels.paged_attention(*decodes))
            else:
                outputs.append(kernels.prefix_attention(*decodes, batch.shared))
        if n < q.shape[0]:
            outputs.append(
                kernels.prefill_attention(
                    q[n:], k_cache, v_cache, batch.block_tables[n:], batch.context_lens[n:], batch.cu_seqlens, scale
                )
            )
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended.flatten(1)
