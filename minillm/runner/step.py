"""One step's work as plain data: token ids, positions and block ids, without requests or sequences."""

from dataclasses import dataclass, field

import numpy as np

from minillm.cache import HostMoves
from minillm.runner.device.work import DecodeWork


@dataclass(slots=True)
class ChunkWork:
    """Consecutive tokens to compute, all of one sequence."""

    token_ids: list[int]
    first: int  # the first token's position
    blocks: list[int]  # the sequence's blocks, up to the block of the last of these tokens
    num_prompt_tokens: int
    num_logits: int  # how many of the last tokens need logits
    score_from: int = 0  # the position before the first of ``targets``
    targets: list[int] = field(default_factory=list)  # tokens to score
    num_top: int = 0  # most probable tokens to return with each score

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)


@dataclass(slots=True)
class Packed:
    """Several chunks packed into one batch: the contents of the tensors of `minillm.model.llama.Batch`."""

    token_ids: list[int]
    positions: np.ndarray  # [num_tokens] int64
    slots: np.ndarray  # [num_tokens] int64
    starts: list[int]  # the start of each prefill chunk and the end of the last one, in tokens after the decodes
    lengths: list[int]  # each sequence's number of tokens, these tokens included
    tables: np.ndarray  # [num_seqs, width] int64, block tables, padded with zeros
    logit_rows: list[int]


def packed(chunks: list[ChunkWork], num_decodes: int, size: int) -> Packed:
    """Pack chunks into one batch. The first ``num_decodes`` chunks are decodes; a block has ``size`` tokens."""
    tables = np.zeros((len(chunks), max((len(chunk.blocks) for chunk in chunks), default=0)), np.int64)
    token_ids: list[int] = []
    starts, logit_rows = [0], list[int]()
    for number, chunk in enumerate(chunks):
        tables[number, : len(chunk.blocks)] = chunk.blocks
        token_ids += chunk.token_ids
        if number >= num_decodes:
            starts.append(starts[-1] + len(chunk.token_ids))
        logit_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))
    lengths, counts = [chunk.end for chunk in chunks], [len(chunk.token_ids) for chunk in chunks]
    # A position is the token's index in the batch, plus a difference that is the same for all tokens of a chunk.
    differences = np.array(lengths, np.int64) - np.cumsum(counts, dtype=np.int64)
    positions = np.arange(len(token_ids)) + np.repeat(differences, counts)
    slots = tables[np.repeat(np.arange(len(chunks)), counts), positions // size] * size + positions % size
    return Packed(token_ids, positions, slots, starts, lengths, tables, logit_rows)


@dataclass(slots=True)
class StepWork:
    """One step: move and copy blocks, then compute ``decode`` and ``chunks``."""

    moves: HostMoves
    copies: list[tuple[int, int]]  # (source, destination)
    decode: DecodeWork | None  # tokens of sequences with state on the device; None without a device runner
    chunks: list[ChunkWork]
    # The first chunks that are decodes: one token each. For a device runner, either all chunks count as decodes (a step
    # with draft tokens, in which each token is computed like a decode) or none does.
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        decoding = 0 if self.decode is None else self.decode.num_seqs
        return decoding + sum(len(chunk.token_ids) for chunk in self.chunks)
