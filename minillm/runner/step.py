"""One step's work as plain data: decided by the scheduler's side, computed by every rank.

The device's part of a step needs token ids, positions and block ids, and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from minillm.cache import HostMoves


@dataclass(slots=True)
class ChunkWork:
    """Successive tokens of one sequence."""

    token_ids: list[int]
    first: int  # the position of the first of them
    blocks: list[int]  # that hold the sequence up to the last of them
    num_prompt_tokens: int
    wants_logits: bool  # of the last of them


@dataclass(slots=True)
class DecodeWork:
    """One token of each of the sequences that have a row on the device (`minillm.runner.rows`)."""

    num_seqs: int
    rows: list[int] | None  # of all sequences, and -1 for each row of padding; None: as in the last step
    changed: list[int]  # places in the rows' words
    values: list[int]  # the new words there
    shares_blocks: bool  # reading shared blocks once is worth it, as the latest plan says
    plan: list[list[int]] | None  # the fields of a `minillm.kernels.Plan`; None: as in the last step


@dataclass(slots=True)
class StepWork:
    """A step, in this order: save blocks, bring blocks back, copy blocks, compute."""

    moves: HostMoves
    copies: list[tuple[int, int]]  # (source, destination)
    decode: DecodeWork | None
    chunks: list[ChunkWork]
    num_decodes: int  # of the chunks, the first ones: sequences that decode and have no row on the device

    @property
    def num_tokens(self) -> int:
        decoding = 0 if self.decode is None else self.decode.num_seqs
        return decoding + sum(len(chunk.token_ids) for chunk in self.chunks)

    def encode(self) -> bytes:
        """The work as a message to another rank."""
        import msgspec  # only where there are other ranks

        decode, chunks = self.decode, [_values(chunk) for chunk in self.chunks]
        moves = _values(self.moves)
        return msgspec.msgpack.encode([moves, self.copies, decode and _values(decode), chunks, self.num_decodes])

    @classmethod
    def from_message(cls, data: bytes) -> StepWork:
        """The work that `encode` made a message of."""
        import msgspec

        moves, copies, decode, chunks, num_decodes = msgspec.msgpack.decode(data)
        works = [ChunkWork(*chunk) for chunk in chunks]
        return cls(HostMoves(*moves), copies, None if decode is None else DecodeWork(*decode), works, num_decodes)


def _values(record: Any) -> list[Any]:
    """A record's values in their order: names would be most of the message."""
    return [getattr(record, name) for name in record.__slots__]


class StepObserver(Protocol):
    """Hears of every step that a runner computes: other ranks do, and measurements."""

    def begin(self, work: StepWork) -> None:
        """The device is about to be given ``work``."""

    def end(self) -> None:
        """The device has been given the step's work, or its draws as well: it may be called twice for a step."""
