"""Rows of the device for the tokens of a step that are computed as if each were the last one of its own sequence.

They are rows as `kernels.decode_state.decode` reads them, but no sequence keeps one: they are written anew for every
step, in one transfer. A sequence's guesses have the same block table and sampling parameters as its last token.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minillm.kernels import Field
from minillm.runner.step import ChunkWork

MOST_TOKENS = 40  # of a step with guesses


class TokenRows:
    """Room for ``count`` tokens of sequences of up to ``width`` blocks.

    Attributes:
        rows: ``[count]`` int32, the numbers of a step's rows, and -1 for padding.
    """

    def __init__(self, count: int, width: int, device: torch.device, *, pinned: bool) -> None:
        self._all = torch.full((count * (1 + Field.TABLE + width),), -1, dtype=torch.int32, device=device)
        self._count, self._pinned = count, pinned
        self.rows = self._all[:count]

    def words(self, size: int, blocks: int) -> Tensor:
        """The words ``[size, words]`` of the first rows, whose tables have ``blocks`` columns."""
        columns = Field.TABLE + blocks
        return self._all[self._count : self._count + size * columns].view(size, columns)

    def write(self, chunks: list[ChunkWork], sampling: SequenceOf[dict[int, int]], size: int, blocks: int) -> None:
        """Write the tokens of ``chunks`` to the first rows of `words`, the other ones becoming padding.

        Args:
            sampling: of each chunk the words that decide what is drawn; empty where nothing is.
        """
        there = torch.zeros(self._count + size * (Field.TABLE + blocks), dtype=torch.int32, pin_memory=self._pinned)
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
