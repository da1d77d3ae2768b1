"""Tuples of tensors that are passed together to the ops, and arithmetic with sizes.

They are named tuples, because `Pages` is created again for every layer of every step, and a tuple is the cheapest
object to create.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Norm = tuple[Tensor, float]
"""The weight and eps of an RMSNorm."""

GELU = 2
"""The value of a matmul's argument ``gated`` for ``gelu(gate) * up``. True is for ``silu(gate) * up``."""


class LayerCache(NamedTuple):
    """One layer's K and V, in the model's dtype or in 8 bits.

    In 8 bits, each token has one scale per head, and int8 values from -127 to 127. Values are multiplied by their
    scale: see `minillm.kernels.reference.quantize_rows`. A block's scales are ordered by head, so that the scales of a
    head's tokens are adjacent.
    """

    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], one layer's half of the pool
    v: Tensor  # the same
    k_scales: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32, if k is int8
    v_scales: Tensor | None = None  # the same

    def pages(self, tables: Tensor, lens: Tensor, window: int | None = None) -> Pages:
        """Return the arguments of attention over some sequences' contexts in this layer: see `Pages`."""
        return Pages(self.k, self.v, tables, lens, window, self.k_scales, self.v_scales)


@dataclass(frozen=True)
class KVCache:
    """The pool: K and V of every layer. Ops that move a block move it in every tensor of `tensors`."""

    values: Tensor  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]: K at 0, V at 1
    scales: Tensor | None = None  # [num_layers, 2, num_blocks, num_kv_heads, block_size] float32, if values are int8

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the pool. Their third dimension is the block."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """The pool as one `LayerCache` per layer. Their tensors are views."""
        if self.scales is None:
            return tuple(LayerCache(*values.unbind(0)) for values in self.values.unbind(0))
        pairs = zip(self.values.unbind(0), self.scales.unbind(0), strict=True)
        return tuple(LayerCache(*values.unbind(0), *scales.unbind(0)) for values, scales in pairs)

    @cached_property
    def slots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Views of each layer's K and V, ``[num_slots, num_kv_heads, head_dim]``: a slot holds one token."""
        return tuple(
            (layer.k.view(-1, *layer.k.shape[2:]), layer.v.view(-1, *layer.v.shape[2:])) for layer in self.layers
        )

    def zero_(self) -> KVCache:
        """Fill every slot with zeros."""
        for tensor in self.tensors:
            tensor.zero_()
        return self


class Pages(NamedTuple):
    """One layer's K and V, and the block tables and lengths of some sequences' contexts.

    Slots outside these contexts may hold anything, even NaN, and never influence a result.
    """

    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], one layer's half of the pool
    v: Tensor  # the same
    tables: Tensor  # [num_seqs, max_blocks] int32, block ids in logical order; unused entries may be anything
    lens: Tensor  # [num_seqs] int32, the number of each sequence's tokens that attention may read
    window: int | None = None  # each token attends to this many tokens, including itself; None: to all before it
    k_scales: Tensor | None = None  # see `LayerCache`
    v_scales: Tensor | None = None


def check_scales(cache: Tensor, scales: Tensor | None) -> None:
    """Raise ValueError unless ``scales`` fit ``cache``, one layer's K or V. Only an int8 cache needs scales."""
    blocks, block_size, num_kv_heads, _ = cache.shape
    if (cache.dtype == torch.int8) != (scales is not None):
        raise ValueError(f"a cache of int8 needs scales, and other dtypes have none: not {cache.dtype}")
    if scales is None:
        return
    fits = scales.shape == (blocks, num_kv_heads, block_size) and scales.is_contiguous()
    if not fits or scales.dtype != torch.float32:
        raise ValueError(
            f"scales must be contiguous float32 [{blocks}, {num_kv_heads}, {block_size}], "
            f"not {scales.dtype} {tuple(scales.shape)}"
        )


class HeadNorms(NamedTuple):
    """The weights of an RMSNorm of each head of q and k, applied before or after the rotary embedding."""

    q: Tensor  # [head_dim]
    k: Tensor  # the same
    eps: float
    after_rotary: bool = False


class RotaryInputs(NamedTuple):
    """The rotary angles of a step's tokens at their positions, and the tokens' slots in the pool."""

    cos: Tensor  # [num_tokens, rotary_dim / 2] float32 (or float64)
    sin: Tensor  # the same
    slots: Tensor  # [num_tokens] int64, block_id * block_size + offset; -1 writes nothing


class SamplingInputs(NamedTuple):
    """The parameters for drawing one token from each row of logits: see `minillm.kernels.reference.sample`."""

    temperature: Tensor  # [rows] float32; 0 takes the largest logit
    top_k: Tensor  # [rows] int64; 0 keeps all tokens
    top_p: Tensor  # [rows] float32; 1 keeps all tokens
    min_p: Tensor  # [rows] float32; 0 keeps all tokens
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, position of the drawn token; with the seed, the counter of the draw

    def rows(self, index: Tensor | slice) -> SamplingInputs:
        """Return the parameters of the rows that ``index`` selects."""
        return SamplingInputs(*(each[index] for each in self))


class DecodeInputs(NamedTuple):
    """Inputs of the model and the sampler for n decoding sequences.

    All tensors are slices of buffers at fixed addresses, so that a CUDA graph can read them.
    """

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slot_mapping: Tensor  # [n] int64
    context_lens: Tensor  # [n] int32
    block_tables: Tensor  # [n, width] int32
    sampling: SamplingInputs

    @classmethod
    def allocate(cls, n: int, width: int, device: torch.device) -> DecodeInputs:
        """Allocate buffers for ``n`` sequences of up to ``width`` blocks."""

        def zeros(dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.zeros(n, *columns, dtype=dtype, device=device)

        long, real = torch.int64, torch.float32
        sampling = SamplingInputs(*map(zeros, (real, long, real, real, long, long)))
        return cls._make((*map(zeros, (long, long, long, torch.int32)), zeros(torch.int32, width), sampling))

    def first(self, n: int) -> DecodeInputs:
        return DecodeInputs._make((*(each[:n] for each in self[:5]), self.sampling.rows(slice(n))))


class Field:
    """The index of each word in a sequence's slot of the device state: see `minillm.kernels.decode_state.decode`.

    Words are 32 bits. Words marked "float" hold the bits of a float32.
    """

    TOKEN = 0  # the token that the next step computes
    POSITION = 1  # position of that token
    TEMPERATURE = 2  # float
    TOP_K = 3
    TOP_P = 4  # float
    MIN_P = 5  # float
    SEED_LOW = 6
    SEED_HIGH = 7
    REPETITION_PENALTY = 8  # float, like the next two
    FREQUENCY_PENALTY = 9
    PRESENCE_PENALTY = 10
    LOGPROB = 11  # float, log-probability of a running beam
    RANK = 12  # rank of a running beam within its search, 0 for the best
    FORKS = 13  # 1 for a running beam: `choose_beams` writes its token, not a draw
    TABLE = 16  # the first block id; the others follow


class Search(NamedTuple):
    """The settings of one beam search that its steps on the device need."""

    width: int  # number of beams
    num_candidates: int  # number of best continuations to consider, over all beams
    end_ids: tuple[int, ...]  # tokens that end a beam

    def fits(self, vocab: int) -> bool:
        """Return whether the kernels of `minillm.kernels.decode_state.beams` can run this search's steps."""
        lanes = power_of_two(self.width) * power_of_two(self.num_candidates)
        return lanes <= 4096 and len(self.end_ids) <= SearchField.MOST_ENDS and self.num_candidates <= vocab


def cdiv(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up. Triton's own function takes 2 us, and a step calls it 700 times."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, and at least 1. See `cdiv`."""
    return 1 << max(0, number - 1).bit_length()


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, and at least 2, as for beams and their candidates."""
    return max(2, next_power_of_2(n))


class SearchField:
    """The index of each word that describes a beam search to `minillm.kernels.decode_state.beams`."""

    FIRST = 0  # the index of its first beam in the list of slots; the others follow
    WIDTH = 1  # number of beams; 0: no search
    KEEP = 2  # number of continuations to consider
    ENDS = 8  # first of MOST_ENDS end tokens; unused ones are -1
    MOST_ENDS = 8
    WORDS = 16  # words per search
