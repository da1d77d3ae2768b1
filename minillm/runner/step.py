"""One step's work as plain data: what rank 0 decides, and every rank computes.

The device's part of a step needs token ids, positions and block ids, and nothing of requests. Decoding sequences whose
state is on the device (`minillm.runner.rows`) bring only what has changed since the last step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

Pairs = list[tuple[int, int]]


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
    """One token of each of the sequences that have a row on the device."""

    num_seqs: int
    rows: list[int] | None  # of all sequences, and -1 for each row of padding; None: as in the last step
    changed: list[int]  # places in the rows' words
    values: list[int]  # what is there now
    shares_blocks: bool  # reading what the sequences share once is worth it, as the latest plan says
    plan: list[list[int]] | None  # the fields of a `minillm.kernels.prefix_plan.Plan`; None: as in the last step


@dataclass(slots=True)
class StepWork:
    """A step, in this order: save blocks, bring blocks back, copy blocks, compute."""

    swap_out: Pairs  # (block, host block)
    swap_in: Pairs  # (host block, block)
    copies: Pairs  # (source, destination)
    decode: DecodeWork | None
    chunks: list[ChunkWork]
    num_decodes: int  # of the chunks, the first ones: sequences that decode and have no row on the device

    def encode(self) -> bytes:
        """As a message to another rank."""
        decode, fields = self.decode, ChunkWork.__slots__
        return json.dumps(
            [
                self.swap_out,
                self.swap_in,
                self.copies,
                decode and [getattr(decode, name) for name in DecodeWork.__slots__],
                [[getattr(chunk, name) for name in fields] for chunk in self.chunks],
                self.num_decodes,
            ],
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_message(cls, data: bytes) -> StepWork:
        swap_out, swap_in, copies, decode, chunks, num_decodes = json.loads(data)
        return cls(
            swap_out,
            swap_in,
            copies,
            None if decode is None else DecodeWork(*decode),
            [ChunkWork(*chunk) for chunk in chunks],
            num_decodes,
        )
