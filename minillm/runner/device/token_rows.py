"""Rows of device state for steps with draft tokens. Each token is computed like the last token of a sequence.

`kernels.decode_state.decode` reads these rows like rows of sequences. But they belong to no sequence: the CPU writes
all of them for every step, in one transfer. A sequence's draft tokens have the same block table and sampling parameters
as its last token.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minillm.kernels import Field
from minillm.runner.step import ChunkWork

MOST_TOKENS = 40  # maximum tokens of a step with draft tokens


class TokenRows:
    """A buffer for the rows of ``count`` tokens, with block tables of up to ``width`` blocks.

    Attributes:
        rows: ``[count]`` int32, the row numbers of a step's tokens, -1 for padding.
        pinned: copies to the device are from pinned memory.
    """

    def __init__(self, count: int, width: int, device: torch.device, *, pinned: bool) -> None:
        self._all = torch.full((count * (1 + Field.TABLE + width),), -1, dtype=torch.int32, device=device)
        self._count, self.pinned = count, pinned
        self.rows = self._all[:count]

    def words(self, size: int, blocks: int) -> Tensor:
        """Return the first ``size`` rows, ``[size, words]`` int32, with block tables of ``blocks`` columns."""
        columns = Field.TABLE + blocks
        return self._all[self._count : self._count + size * columns].view(size, columns)

    def write(self, chunks: list[ChunkWork], sampling: SequenceOf[dict[int, int]], size: int, blocks: int) -> None:
        """Write the tokens of ``chunks`` to the first of ``size`` rows. The other rows become padding.

        Args:
            sampling: for each chunk, the words that decide how its tokens are drawn; empty if nothing is drawn.
        """
        there = torch.zeros(self._count + size * (Field.TABLE + blocks), dtype=torch.int32, pin_memory=self.pinned)
        numbers = there.numpy()
        words = numbers[self._count :].reshape(size, -1)
        end = 0
        for chunk, fields in zip(chunks, sampling, strict=True):
            first, end = end, end + len(chunk.token_ids)
            rows = words[first:end]
            rows[:, Field.TABLE : Field.TABLE + len(chunk.blocks)] = chunk.blocks
            rows[:, Field.TOKEN] = chunk.token_ids
            rows[:, Field.POSITION] = range(chunk.first, chunk.end)
            for field, word in fields.items():
                rows[:, field] = word
        numbers[:end] = range(end)
        numbers[end : self._count] = -1
        self._all[: len(there)].copy_(there, non_blocking=True)
