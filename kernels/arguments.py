"""Tensors that travel together from op to op.

Named tuples: `Pages` is made anew for every layer of every step, and a tuple is the cheapest object to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """One layer's K and V: numbers of the model's dtype, or in 8 bits.

    In 8 bits a token's row of a head is whole numbers from -127 to 127 times one scale, as
    `minillm.kernels.reference.quantise_rows` makes them. A block's scales lie head by head, so that a head's tokens are
    neighbours.
    """

    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], one layer's half of the pool
    v: Tensor  # the same
    k_scales: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32, where k is int8
    v_scales: Tensor | None = None  # the same

    def pages(self, tables: Tensor, lens: Tensor, window: int | None = None) -> Pages:
        """The contexts of some sequences in this layer: see `Pages`."""
        return Pages(self.k, self.v, tables, lens, window, self.k_scales, self.v_scales)


@dataclass(frozen=True)
class KVCache:
    """The pool: K and V of every layer. What moves a block moves it in each of `tensors`."""

    values: Tensor  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]: K at 0, V at 1
    scales: Tensor | None = None  # [num_layers, 2, num_blocks, num_kv_heads, block_size] float32, where values are int8

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored of a block; each tensor's third dimension counts the blocks."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """Each layer's part, in the same memory."""
        if self.scales is None:
            return tuple(LayerCache(*values.unbind(0)) for values in self.values.unbind(0))
        pairs = zip(self.values.unbind(0), self.scales.unbind(0), strict=True)
        return tuple(LayerCache(*values.unbind(0), *scales.unbind(0)) for values, scales in pairs)

    @cached_property
    def slots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Each layer's K and V ``[num_slots, num_kv_heads, head_dim]``, in the same memory."""
        return tuple(
            (layer.k.view(-1, *layer.k.shape[2:]), layer.v.view(-1, *layer.v.shape[2:])) for layer in self.layers
        )

    def zero_(self) -> KVCache:
        """Fill every slot with zeros."""
        for tensor in self.tensors:
            tensor.zero_()
        return self


class Pages(NamedTuple):
    """One layer's K and V, and where in them the contexts of some sequences lie.

    Slots that no context covers may hold anything, NaN included, and never influence a result.
    """

    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], one layer's half of the pool
    v: Tensor  # the same
    tables: Tensor  # [num_seqs, max_blocks] int32, block ids in logical order; unused entries may be anything
    lens: Tensor  # [num_seqs] int32, tokens of each sequence that attention may see
    window: int | None = None  # a token sees so many tokens, the last of them itself; None: all up to itself
    k_scales: Tensor | None = None  # see `LayerCache`
    v_scales: Tensor | None = None


def check_scales(cache: Tensor, scales: Tensor | None) -> None:
    """Raise ValueError unless one layer's K or V is in 8 bits just where it has scales, and they fit it."""
    blocks, block_size, num_kv_heads, _ = cache.shape
    if (cache.dtype == torch.int8) != (scales is not None):
        raise ValueError(f"a cache of int8 needs scales, and no other has any: not {cache.dtype}")
    if scales is None:
        return
    fits = scales.shape == (blocks, num_kv_heads, block_size) and scales.is_contiguous()
    if not fits or scales.dtype != torch.float32:
        raise ValueError(
            f"scales must be contiguous float32 [{blocks}, {num_kv_heads}, {block_size}], "
            f"not {scales.dtype} {tuple(scales.shape)}"
        )


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and k, before they are rotated."""

    q: Tensor  # [head_dim]
    k: Tensor  # the same
    eps: float


class Places(NamedTuple):
    """Where the tokens of a step stand: the angles of their positions, and their slots in the pool."""

    cos: Tensor  # [num_tokens, rotary_dim / 2] float32 (or float64)
    sin: Tensor  # the same
    slots: Tensor  # [num_tokens] int64, block_id * block_size + offset; -1 writes nothing


class SamplingInputs(NamedTuple):
    """How to draw one token for each of some rows of logits: see `minillm.kernels.reference.sample`."""

    temperature: Tensor  # [rows] float32; 0 takes the largest logit
    top_k: Tensor  # [rows] int64, 0 for all
    top_p: Tensor  # [rows] float32, 1 for all
    min_p: Tensor  # [rows] float32, 0 for all
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, of the drawn token: with the seed the counter of the draw

    def rows(self, index: Tensor | slice) -> SamplingInputs:
        return SamplingInputs(*(each[index] for each in self))


class DecodeInputs(NamedTuple):
    """The model's and the sampler's inputs for n decoding sequences; slices of buffers that never move."""

    token_ids: Tensor  # [n] int64, as the next two
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor  # [n] int32
    block_tables: Tensor  # [n, width] int32
    sampling: SamplingInputs

    @classmethod
    def allocate(cls, n: int, width: int, device: torch.device) -> DecodeInputs:
        """Buffers for ``n`` sequences of up to ``width`` blocks."""

        def zeros(dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.zeros(n, *columns, dtype=dtype, device=device)

        long, real = torch.int64, torch.float32
        sampling = SamplingInputs(*map(zeros, (real, long, real, real, long, long)))
        return cls._make((*map(zeros, (long, long, long, torch.int32)), zeros(torch.int32, width), sampling))

    def first(self, n: int) -> DecodeInputs:
        return DecodeInputs._make((*(each[:n] for each in self[:5]), self.sampling.rows(slice(n))))


class Field:
    """The place of each word in a row of `minillm.kernels.decode_state.decode`. Floats are stored by their bits."""

    TOKEN = 0  # to be computed next
    POSITION = 1  # of that token
    TEMPERATURE = 2  # float
    TOP_K = 3
    TOP_P = 4  # float
    MIN_P = 5  # float
    SEED_LOW = 6
    SEED_HIGH = 7
    REPETITION_PENALTY = 8  # float, as the next two
    FREQUENCY_PENALTY = 9
    PRESENCE_PENALTY = 10
    LOGPROB = 11  # float, of a running beam
    RANK = 12  # of a running beam within its search, 0 for the best
    FORKS = 13  # 1: a running beam, whose token `choose_beams` writes and no draw
    TABLE = 16  # the first block id


class Search(NamedTuple):
    """The rules of one beam search, as far as its steps on the device need them."""

    width: int
    num_candidates: int  # continuations to look at
    end_ids: tuple[int, ...]

    def fits(self, vocab: int) -> bool:
        """Whether `minillm.kernels.decode_state.beams` can take its steps."""
        lanes = _power_of_two(self.width) * _power_of_two(self.num_candidates)
        return lanes <= 4096 and len(self.end_ids) <= SearchField.MOST_ENDS and self.num_candidates <= vocab


def _power_of_two(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())


class SearchField:
    """The place of each word that describes a beam search to `minillm.kernels.decode_state.beams`."""

    FIRST = 0  # the place of its first beam in the list of rows; the others follow
    WIDTH = 1  # beams; 0: there is no such search
    KEEP = 2  # continuations that are looked at
    ENDS = 8  # the first of the tokens that end a beam; -1: no token
    MOST_ENDS = 8
    WORDS = 16
