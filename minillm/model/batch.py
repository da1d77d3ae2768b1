"""One step's work as tensors: what the model needs to know, and nothing about requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from minillm.kernels import WorkList


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
    shared: WorkList | None = None  # what the decoding sequences have in common, where reading that once is worth it
    rope_lengths: list[int] | None = None  # per token, for dynamic rope scaling only: see RotaryTable.rows

    @cached_property
    def decodes(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the sequences that decode."""
        return self.block_tables[: self.num_decodes], self.context_lens[: self.num_decodes]

    @cached_property
    def chunks(self) -> tuple[Tensor, Tensor]:
        """``block_tables`` and ``context_lens`` of the sequences that prefill."""
        return self.block_tables[self.num_decodes :], self.context_lens[self.num_decodes :]
