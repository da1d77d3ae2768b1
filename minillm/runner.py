"""From a schedule to logits: builds the step's tensors and runs the model over the pool."""

from __future__ import annotations

import torch
from torch import Tensor

import kernels
from minillm.model.batch import Batch
from minillm.model.llama import Llama
from minillm.scheduler import Schedule, ScheduledChunk


class Runner:
    """The model and its pool of blocks, allocated once."""

    def __init__(self, model: Llama, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.kv_cache = model.new_kv_cache(num_blocks, block_size)

    @torch.inference_mode()
    def run(self, schedule: Schedule, copies: list[tuple[int, int]]) -> tuple[Tensor, list[ScheduledChunk]]:
        """Copy the blocks that the step writes to and others share, then compute the step.

        Returns:
            Logits ``[n, vocab]`` float32, and the n chunks that they belong to: those that computed a sequence's last
            token.
        """
        if copies:
            kernels.block_copy(self.kv_cache, torch.tensor(copies, device=self.model.device))
        sampled = [chunk for chunk in schedule.chunks if _reaches_the_end(chunk)]
        return self.model.forward(self._batch(schedule), self.kv_cache), sampled

    def _batch(self, schedule: Schedule) -> Batch:
        size, chunks = self.block_size, schedule.chunks
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []  # of each context, this step's tokens included
        starts = [0]
        logit_rows: list[int] = []
        for number, chunk in enumerate(chunks):
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            end = first + chunk.count
            assert sequence.table is not None
            blocks = sequence.table.blocks
            token_ids += sequence.token_ids[first:end]
            positions += range(first, end)
            slots += [blocks[i // size] * size + i % size for i in range(first, end)]
            lengths.append(end)
            if number >= len(schedule.decodes):
                starts.append(starts[-1] + chunk.count)
            if _reaches_the_end(chunk):
                logit_rows.append(len(token_ids) - 1)
        width = max(-(-length // size) for length in lengths)
        tables = [
            (chunk.sequence.table.blocks[:width] if chunk.sequence.table else []) + [0] * width for chunk in chunks
        ]
        device = self.model.device

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return Batch(
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slot_mapping=tensor(slots, torch.int64),
            block_tables=tensor([table[:width] for table in tables], torch.int32),
            context_lens=tensor(lengths, torch.int32),
            num_decodes=len(schedule.decodes),
            cu_seqlens=tensor(starts, torch.int32),
            logit_rows=tensor(logit_rows, torch.int64),
            rope_lengths=_rope_lengths(chunks) if self.model.rotary.dynamic else None,
        )


def _reaches_the_end(chunk: ScheduledChunk) -> bool:
    return chunk.sequence.num_computed + chunk.count == len(chunk.sequence.token_ids)


def _rope_lengths(chunks: list[ScheduledChunk]) -> list[int]:
    """For dynamic rope scaling: a prompt token goes by the prompt's length, a generated one by its own position."""
    return [
        max(chunk.sequence.num_prompt_tokens, position + 1)
        for chunk in chunks
        for position in range(chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.count)
    ]
