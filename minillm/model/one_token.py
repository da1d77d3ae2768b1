"""Compiled decoder layers for one token of one sequence on a CPU.

A token of a small model takes some 750 PyTorch ops. Starting an op costs more than its arithmetic, because weights
stream through the CPU's caches. The ops outside of matmuls take half of a token's time. TorchInductor therefore fuses
everything between two matmuls of a layer into loops. A C++ compiler builds them into one library (AOTInductor), which
serves all layers of the same shape. The matmuls are torch's own 4-bit matmuls.

`Layer` computes the same as the ops of `minillm.model.llama`, which are its reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import FASTEST, KVCache, LinearWeight
from minillm.kernels.linear.low_bit.layouts import GROUP
from minillm.model.llama import Angles, Attention, Batch, Llama
from minillm.model.llama import Layer as Weights

_FEWEST_SLOTS = 2  # torch.export specializes functions for a length of 1, so compiled layers need at least 2 slots
_MOST_SLOTS = 1 << 30


@dataclass(frozen=True)
class LayerShape:
    """All properties of a layer that its compiled function depends on."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    softmax_scale: float
    eps: float
    biases: tuple[bool, ...]  # whether each of the four `matrices` has a bias
    has_head_norms: bool
    norms_after_rotary: bool  # whether heads are normalized after they are rotated

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes (rows, columns) of the layer's four matrices: q, k and v; o; gate and up; down."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (heads + 2 * kv_heads, self.hidden),
            (self.hidden, heads),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]


def layer_shape(model: Llama) -> LayerShape | None:
    """Return the shape that all layers of the model have in common, for `compile_layer`.

    Return None if the layers cannot be compiled. This is so if layers differ in shape, if matrices are not 4-bit
    matrices on a CPU, or if a layer contains ops that `Layer` does not support.
    """
    is_plain = type(model) is Llama and model.ops is FASTEST and not model.kv_in_8_bits
    if not is_plain or model.device.type != "cpu" or model.dtype != torch.float32:
        return None
    config = model.config
    if config.norms != "before" or config.activation != "silu" or config.qk_norm == "all":
        return None
    biases = {tuple(each.bias is not None for each in layer.linears) for layer in model.layers}
    norms = {layer.head_norms is not None for layer in model.layers}
    if len(biases) != 1 or len(norms) != 1 or any(_in_4_bits(each) is None for each in model.linears[:-1]):
        return None
    return LayerShape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        softmax_scale=config.softmax_scale,
        eps=config.rms_norm_eps,
        biases=biases.pop(),
        has_head_norms=norms.pop(),
        norms_after_rotary=config.qk_norm == "after_rope",
    )


def _in_4_bits(linear: LinearWeight) -> tuple[Tensor, Tensor] | None:
    return None if linear.packed is None else linear.packed.in_4_bits


class Layer(torch.nn.Module):
    """The arithmetic of a layer for one token. Weights are arguments, so one compiled function serves all layers."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slot: Tensor,
        slots: Tensor,
        weights: list[Tensor],
    ) -> Tensor:
        """Write the token's K and V, and return the layer's output ``[1, hidden]`` float32.

        Args:
            x: ``[1, hidden]`` float32, the layer's input.
            cos, sin: ``[1, head_dim / 2]`` float32, the cosines and sines of the rotary angles of q and k.
            keys, values: ``[all slots, kv heads, head_dim]`` float32, the layer's part of the pool.
            slot: ``[1]`` int64, the slot of the token's K and V.
            slots: ``[visible tokens]`` int64, the slots that the token attends to, including its own.
            weights: the result of `layer_weights`.
        """
        shape, rest, dim = self.shape, iter(weights), self.shape.head_dim
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        qkv_bias, o_bias, gate_up_bias, down_bias = shape.biases

        def norm(rows: Tensor) -> Tensor:
            return rows * next(rest) * (rows.square().mean(-1, keepdim=True) + shape.eps).rsqrt()

        def linear(row: Tensor, has_bias: bool) -> Tensor:
            held, pairs = next(rest), next(rest)
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(row.bfloat16(), held, GROUP, pairs).float()
            return product + next(rest) if has_bias else product

        def turn(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        heads = linear(norm(x), qkv_bias).view(-1, dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads))
        if shape.has_head_norms and not shape.norms_after_rotary:
            q, k = norm(q), norm(k)
        q, k = turn(q), turn(k)
        if shape.has_head_norms and shape.norms_after_rotary:
            q, k = norm(q), norm(k)
        keys.index_copy_(0, slot, k[None])
        values.index_copy_(0, slot, v[None])
        query = q.view(num_kv_heads, -1, dim) * shape.softmax_scale
        # Sums instead of matmuls, so that the compiled loops read K and V in place.
        # [visible tokens, kv heads, query heads per kv head]
        shares = (query * keys[slots][:, :, None]).sum(-1).softmax(0)
        attended = (shares[..., None] * values[slots][:, :, None]).sum(0)
        x = x + linear(attended.view(1, -1), o_bias)
        gate, up = linear(norm(x), gate_up_bias).chunk(2, -1)
        return x + linear(functional.silu(gate) * up, down_bias)


def layer_weights(layer: Weights) -> list[Tensor]:
    """Return a layer's tensors in the order in which `Layer.forward` reads them."""
    linears: list[list[Tensor]] = []
    for linear in layer.linears:
        in_4_bits = _in_4_bits(linear)
        assert in_4_bits is not None
        linears.append([*in_4_bits, *([] if linear.bias is None else [linear.bias])])
    head_norms = [] if layer.head_norms is None else [layer.head_norms.q, layer.head_norms.k]
    assert layer.input_norm is not None
    assert layer.post_attention_norm is not None
    return _in_order(layer.input_norm, head_norms, layer.post_attention_norm, linears)


def _in_order(
    input_norm: Tensor, head_norms: list[Tensor], post_attention_norm: Tensor, linears: list[list[Tensor]]
) -> list[Tensor]:
    """Put a layer's tensors into the order in which `Layer.forward` reads them.

    ``linears`` are the tensors of each linear layer, in the order of `Weights.linears`.
    """
    qkv, o, gate_up, down = linears
    return [input_norm, *qkv, *head_norms, *o, post_attention_norm, *gate_up, *down]


def compile_layer(shape: LayerShape, path: Path) -> None:
    """Compile `Layer` of this shape for this machine's processor, and write the library to the ``.pt2`` file ``path``.

    This takes about ten seconds and some hundred megabytes of memory. It needs a C++ compiler.
    """
    import torch._inductor  # slow import

    length, pool = torch.export.Dim("length", min=_FEWEST_SLOTS, max=_MOST_SLOTS), torch.export.Dim("pool", min=64)
    arguments, weights = _example(shape)
    dynamic: tuple[Any, ...] = ({}, {}, {}, {0: pool}, {0: pool}, {}, {0: length}, [{} for _ in weights])
    with torch.no_grad():
        exported = torch.export.export(Layer(shape), (*arguments, weights), dynamic_shapes=dynamic)
        # The function uses as many threads as torch when it runs: see `minillm.loading.threads`. Precompiling headers
        # would not pay, because each one is read only once.
        options = {"cpp.dynamic_threads": True, "pattern_matcher": False, "cpp_cache_precompile_headers": False}
        options["aot_inductor.precompile_headers"] = False
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


def _example(shape: LayerShape) -> tuple[list[Tensor], list[Tensor]]:
    """Return example arguments of `Layer.forward`, and example weights.

    The compiler needs only their shapes and dtypes. The slots must be valid indices.
    """
    generator = torch.Generator().manual_seed(0)

    def some(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    linears = []
    for (rows, columns), has_bias in zip(shape.matrices, shape.biases, strict=True):
        levels = torch.zeros(rows, columns, dtype=torch.int32)
        held = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        linears.append([held, some(columns // GROUP, rows, 2).bfloat16(), *([some(rows)] if has_bias else [])])
    hidden, dim = shape.hidden, shape.head_dim
    head_norms = [some(dim), some(dim)] if shape.has_head_norms else []
    weights = _in_order(some(hidden), head_norms, some(hidden), linears)
    pool, angles = (128, shape.num_kv_heads, dim), (1, dim // 2)
    slots = torch.arange(100)
    facts = [some(1, hidden), some(*angles), some(*angles), some(*pool), some(*pool), slots[-1:].clone(), slots]
    return facts, weights


@dataclass(frozen=True)
class OneToken:
    """The compiled layers of a model, for batches of one token."""

    run: Callable[[list[Tensor]], Sequence[Tensor]]  # computes one layer; takes `Layer.forward`'s arguments as one list
    layers: list[tuple[Attention, list[Tensor]]]  # each layer's kind of attention, and its weights

    @classmethod
    def load(cls, path: Path, model: Llama) -> "OneToken":
        """Load the library that `compile_layer` wrote to ``path``, for the layers of ``model``.

        Raises RuntimeError if the file is not such a library.
        """
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        return cls(loader.run, [(layer.attention, layer_weights(layer)) for layer in model.layers])

    def takes(self, batch: Batch) -> bool:
        """Return whether the compiled layers can compute a batch.

        It must be one token of one sequence, and that token must attend to at least two tokens.
        """
        if batch.num_decodes != 1 or len(batch.token_ids) != 1 or batch.shared is not None:
            return False
        length = int(batch.context_lens[0])
        return all(min(length, kind.window or length) >= _FEWEST_SLOTS for kind, _ in self.layers)

    def __call__(self, x: Tensor, batch: Batch, angles: Angles, kv_cache: KVCache) -> Tensor:
        """Compute all layers: see `Llama.hidden`."""
        length, block_size = int(batch.context_lens[0]), kv_cache.values.shape[3]
        blocks = batch.block_tables[0, : -(-length // block_size)]
        slots = torch.add(torch.arange(block_size), blocks[:, None], alpha=block_size).flatten()[:length]
        facts = {kind: (turned, slots[-(kind.window or length) :]) for kind, turned in angles.items()}
        for (kind, weights), pool in zip(self.layers, kv_cache.slots, strict=True):
            turned, in_sight = facts[kind]
            (x,) = self.run([x, *turned, *pool, batch.slot_mapping, in_sight, *weights])
        return x


@dataclass(frozen=True)
class CompiledLlama(Llama):
    """A `Llama` with compiled layers for a single token. It computes all other batches as `Llama` does."""

    one_token: OneToken

    @classmethod
    def of(cls, model: Llama, one_token: OneToken) -> "CompiledLlama":
        """Return ``model`` with its compiled layers."""
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)}, one_token=one_token)

    def hidden(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Write the tokens' K and V, and return the last layer's output: see `Llama.hidden`."""
        if not self.one_token.takes(batch):
            return super().hidden(batch, kv_cache)
        return self.one_token(self.embed(batch.token_ids), batch, self.angles(batch), kv_cache)
