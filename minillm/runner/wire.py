"""Encode work for the other ranks as a JSON message, so that exchanging it needs no further library."""

import json
from dataclasses import dataclass
from typing import Any

from minillm.cache import HostMoves
from minillm.runner.device.work import DecodeWork
from minillm.runner.step import ChunkWork, StepWork


@dataclass(frozen=True)
class BlockMove:
    """A copy of all ranks' parts of ``blocks`` to rank 0, or if ``writes`` is set from rank 0 into the pools."""

    blocks: list[int]
    writes: bool


def encode_blocks(move: BlockMove) -> bytes:
    return json.dumps([move.blocks, move.writes], separators=(",", ":")).encode()


def encode(work: StepWork) -> bytes:
    decode, chunks = work.decode, [_values(chunk) for chunk in work.chunks]
    message = [_values(work.moves), work.copies, decode and _values(decode), chunks, work.num_decodes]
    return json.dumps(message, separators=(",", ":")).encode()


def decode(message: bytes) -> StepWork | BlockMove:
    fields = json.loads(message)
    if len(fields) == 2:
        return BlockMove(*fields)
    moves, copies, decoded, chunks, num_decodes = fields
    works = [ChunkWork(*chunk) for chunk in chunks]
    return StepWork(HostMoves(*moves), copies, None if decoded is None else DecodeWork(*decoded), works, num_decodes)


def _values(record: Any) -> list[Any]:
    """Return a record's values in order. Field names would be most of the message, so they are left out."""
    return [getattr(record, name) for name in record.__slots__]
