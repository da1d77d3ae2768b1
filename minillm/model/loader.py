"""Load a `Llama` from a checkpoint's tensors. Every parameter is written exactly once, or loading fails.

The checkpoint stores separate matrices, such as q, k and v. A fused matrix is allocated at full size and filled from
them, slice by slice. With tensor parallelism, only this rank's rows and columns are read.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.kernels import GELU, HeadNorms, LinearWeight, LowBit
from minillm.kernels.linear.low_bit.layouts import GROUP, concatenated, expanded, in_eight_bits, padded, rows_of
from minillm.model.config import ModelConfig
from minillm.model.llama import Attention, Layer, Llama
from minillm.model.rope import RotaryTable
from minillm.model.shard import ShardedLlama, shard_of
from minillm.parallel.collectives import Ranks
from minillm.storage import Storage
from minillm.text.safe import clean_line

_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Name suffixes of buffers in old checkpoints. minillm ignores these tensors and computes them itself.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


class TensorSource(Protocol):
    """The interface through which the loader reads a checkpoint: whole tensors by name, or slices of them."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor: ...

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """Return a slice of a low-bit matrix on ``device`` without dequantizing it. None for a slice means all.

        Return None if the matrix is not low-bit, or if the slice would split a block of weights.
        """


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every parameter of a model. A tied output head is not listed.

    All architectures use Llama's names. Norms after attention and MLP, which Llama does not have, use GLM-4's names.
    `minillm.model.llama_tensors` converts the names in a checkpoint to these.
    """
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield _EMBEDDING, (c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        for name in norm_names(c):
            yield f"{prefix}{name}.weight", (c.hidden_size,)
        if c.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (q if c.qk_norm == "all" else c.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (kv if c.qk_norm == "all" else c.head_dim,)
        attention = ("q_proj", q, c.hidden_size), ("k_proj", kv, c.hidden_size), ("v_proj", kv, c.hidden_size)
        mlp = ("gate_proj", c.intermediate_size, c.hidden_size), ("up_proj", c.intermediate_size, c.hidden_size)
        for part, linears, biased in (
            ("self_attn", attention, c.attention_bias),
            ("self_attn", (("o_proj", c.hidden_size, q),), c.output_bias),
            ("mlp", (*mlp, ("down_proj", c.hidden_size, c.intermediate_size)), c.mlp_bias),
        ):
            for name, rows, columns in linears:
                yield f"{prefix}{part}.{name}.weight", (rows, columns)
                if biased:
                    yield f"{prefix}{part}.{name}.bias", (rows,)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield HEAD, (c.vocab_size, c.hidden_size)


def norm_names(config: ModelConfig) -> list[str]:
    """Return the names of a layer's RMSNorms before and after attention and MLP. Norms of q and k are not listed."""
    before, after = config.norms != "after", config.norms != "before"
    names = ["input_layernorm", "post_attention_layernorm"] if before else []
    return names + (["post_self_attn_layernorm", "post_mlp_layernorm"] if after else [])


def load_llama(
    source: TensorSource,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    ranks: Ranks | None = None,
    weights: Storage = "expanded",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> Llama:
    """Build the model from ``source``, or this rank's part of it.

    Args:
        max_positions: the longest sequence, in tokens.
        weights: "stored" keeps low-bit matrices low-bit, and "expanded" dequantizes them to ``dtype``. On a CPU, "int8"
            quantizes each matrix to 8 bits on first use (see `minillm.model.calibration`). "int4" keeps 4-bit matrices
            as they are, quantizes other low-bit matrices to 8 bits, and leaves unquantized matrices unquantized.
        on_progress: called with the number of loaded layers and the number of all layers.
        copy: copies its second tensor, which the source has read, into its first one on ``device``, now or later.

    Raises:
        WeightsError: a tensor is missing, unknown or has the wrong shape, or the config gives no finite rotary angles.
        UsageError: there are more ranks than the model has heads.
    """
    _check_names(source, config)
    shard = shard_of(config, *((0, 1) if ranks is None else (ranks.rank, ranks.size)))
    held = {name: shape for name, shape in parameter_shapes(shard.local(config)) if shard.holds(name)}
    taken: set[str] = set()

    def claim(*names: str) -> None:
        assert not taken & set(names), f"{names} are loaded twice"
        taken.update(names)

    def take(name: str) -> Tensor:
        claim(name)
        return read(name)

    def read(name: str) -> Tensor:
        return source.tensor(name, *shard.part_of(name, config))

    def low_bit(name: str) -> LowBit | None:
        return source.low_bit(name, device, *shard.part_of(name, config)) if weights != "expanded" else None

    def fill(target: Tensor, parts: list[Tensor]) -> None:
        start = 0
        for part in parts:
            copy(target[start : start + part.shape[0]], part)
            start += part.shape[0]
        assert start == target.shape[0]

    def fused(*names: str) -> LinearWeight:
        """Load several matrices as one, with their rows stacked. If they have biases, stack these as well."""
        parts = [f"{name}.weight" for name in names]
        rows = sum(held[part][0] for part in parts)
        shape = (rows, held[parts[0]][1])
        claim(*parts)
        stored = concatenated([low_bit(part) for part in parts])

        def weight() -> Tensor:
            if stored:
                return expanded(stored)
            whole = torch.empty(shape, dtype=dtype, device=device)
            fill(whole, [read(part) for part in parts])
            return whole

        bias = None
        if f"{names[0]}.bias" in held:
            bias = torch.empty(rows, dtype=dtype, device=device)
            fill(bias, [take(f"{name}.bias") for name in names])
        return held_linear(weight, shape, bias, stored)

    def held_linear(
        weight: Callable[[], Tensor], shape: tuple[int, int], bias: Tensor | None, stored: tuple[LowBit, ...]
    ) -> LinearWeight:

        def rows() -> Callable[[slice], Tensor]:
            if stored:
                return lambda taken: expanded(tuple(rows_of(stored, taken)))
            return weight().__getitem__

        if weights == "int8":
            return LinearWeight.in_8_bits(rows, shape, bias, stored)
        if weights == "int4" and stored:
            return LinearWeight.in_4_bits(stored, bias) or LinearWeight.in_8_bits(rows, shape, bias)
        return LinearWeight(stored or weight(), bias)

    def gated(weight: LinearWeight) -> LinearWeight:
        weight.gate = GELU if config.activation == "gelu" else True
        return weight

    def vector(name: str) -> Tensor:
        return take(name).to(device=device, dtype=dtype, copy=True)

    def vocabulary(name: str) -> Tensor | LowBit:
        """Load this rank's rows of the embedding or the head. Zeros pad them to the same number on all ranks."""
        if (stored := low_bit(name)) is not None:
            return padded(stored, held[_EMBEDDING][0])
        rows = read(name)
        if weights == "int8" and rows.shape[1] % GROUP == 0:
            return padded(in_eight_bits(rows), held[_EMBEDDING][0])
        whole = torch.zeros(held[_EMBEDDING], dtype=dtype, device=device)
        copy(whole[: rows.shape[0]], rows)
        return whole

    def head_norms(attention: str) -> HeadNorms | None:
        if not config.qk_norm:
            return None
        q, k = vector(attention + "q_norm.weight"), vector(attention + "k_norm.weight")
        return HeadNorms(q, k, config.rms_norm_eps, config.qk_norm == "after_rope")

    def attention_of(index: int) -> Attention:
        """Return a layer's kind of attention. A window that no sequence can exceed counts as no window."""
        window = config.windows[index] if config.windows else None
        table = local_rotary if window is not None else rotary
        is_rotated = index not in config.layers_without_rope
        return Attention(table if is_rotated else None, None if (window or 0) >= max_positions else window)

    def layer_norm(name: str) -> Tensor | None:
        return vector(name) if name in held else None

    rotary = local_rotary = RotaryTable(config, max_positions, device)
    if config.local_rope is not None:
        local_rotary = RotaryTable(replace(config, rope=config.local_rope), max_positions, device)
    embedding = vocabulary(_EMBEDDING)
    taken.add(_EMBEDDING)
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        layer = Layer(
            input_norm=layer_norm(prefix + "input_layernorm.weight"),
            qkv=fused(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            o=fused(attention + "o_proj"),
            post_attention_norm=layer_norm(prefix + "post_attention_layernorm.weight"),
            gate_up=gated(fused(mlp + "gate_proj", mlp + "up_proj")),
            down=fused(mlp + "down_proj"),
            head_norms=head_norms(attention),
            attention=attention_of(index),
            attention_output_norm=layer_norm(prefix + "post_self_attn_layernorm.weight"),
            mlp_output_norm=layer_norm(prefix + "post_mlp_layernorm.weight"),
        )
        layers.append(layer)
        on_progress(index + 1, config.num_layers)
    norm = vector("model.norm.weight")
    # Some checkpoints store a head although their config says that the embedding is the head. As in transformers, the
    # stored head is used if it differs from the embedding.
    is_stored = HEAD in source.names() and source.shape(HEAD) == source.shape(_EMBEDDING)
    if not config.tie_word_embeddings:
        head = vocabulary(HEAD)
        taken.add(HEAD)
    elif is_stored and not torch.equal(*(read(name).to(dtype) for name in (HEAD, _EMBEDDING))):
        head = vocabulary(HEAD)
    else:
        head = embedding
    assert taken == set(held), f"not loaded: {sorted(set(held) - taken)}"
    if isinstance(head, LowBit):
        head_weight = held_linear(partial(expanded, (head,)), head.shape, None, (head,))
    else:
        head_weight = held_linear(head.contiguous, (head.shape[0], head.shape[1]), None, ())
    parts = (config, embedding, layers, norm, head_weight, rotary)
    return Llama(*parts) if ranks is None else ShardedLlama(*parts, shard, ranks)


def _check_names(source: TensorSource, config: ModelConfig) -> None:
    present, expected = set(source.names()), {}
    for name, shape in parameter_shapes(config):  # raises at the first missing name, so a huge number of layers is safe
        expected[name] = shape
        if name not in present:
            raise WeightsError(
                f"the checkpoint has no tensor {name}; it is incomplete, or its config.json belongs to another model"
            )
        if tuple(source.shape(name)) != shape:
            raise WeightsError(f"tensor {name} has shape {tuple(source.shape(name))}, but config.json requires {shape}")
    others = present - expected.keys() - {HEAD}
    if unknown := sorted(name for name in others if not name.endswith(IGNORED_SUFFIXES)):
        raise WeightsError(
            f"the checkpoint has {len(unknown)} tensors that this architecture does not use, "
            f"such as {clean_line(unknown[0])}"
        )
