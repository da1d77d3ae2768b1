"""Tensors that travel together from op to op."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


class Field:
    """Where a row keeps what: the words of `minillm.kernels.decode_rows`. Floats are stored by their bits."""

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
    TABLE = 16  # the first block id


@dataclass(frozen=True)
class DecodeInputs:
    """What the model and the sampler take of n decoding sequences; slices of buffers that never move."""

    token_ids: Tensor  # [n] int64, as the next two
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor  # [n] int32
    block_tables: Tensor  # [n, width] int32
    temperature: Tensor  # [n] float32
    top_k: Tensor  # [n] int64
    top_p: Tensor  # [n] float32, as the next
    min_p: Tensor
    seeds: Tensor  # [n] int64, as the next
    draw_positions: Tensor

    @classmethod
    def allocate(cls, n: int, width: int, device: torch.device) -> DecodeInputs:
        """Buffers for ``n`` sequences of up to ``width`` blocks."""

        def zeros(dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.zeros(n, *columns, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(torch.int64),
            positions=zeros(torch.int64),
            slot_mapping=zeros(torch.int64),
            context_lens=zeros(torch.int32),
            block_tables=zeros(torch.int32, width),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int64),
            top_p=zeros(torch.float32),
            min_p=zeros(torch.float32),
            seeds=zeros(torch.int64),
            draw_positions=zeros(torch.int64),
        )

    def first(self, n: int) -> DecodeInputs:
        """The first n rows of every buffer."""
        return DecodeInputs(**{field.name: getattr(self, field.name)[:n] for field in fields(self)})
