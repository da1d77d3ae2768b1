"""One step's work as plain data: token ids, positions and block ids, without requests or sequences."""

from dataclasses import dataclass, field

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
    """Several chunks packed into one batch: the contents of the tensors of `minillm.model.llama.Batch`, as lists."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]  # the start of each prefill chunk and the end of the last one, in tokens after the decodes
    lengths: list[int]  # each sequence's number of tokens, these tokens included
    tables: list[list[int]]  # block tables, padded to the same width
    logit_rows: list[int]


def packed(chunks: list[ChunkWork], num_decodes: int, size: int) -> Packed:
    """Pack chunks into one batch. The first ``num_decodes`` chunks are decodes; a block has ``size`` tokens."""
    width = max((len(chunk.blocks) for chunk in chunks), default=0)
    tables = [chunk.blocks + [0] * (width - len(chunk.blocks)) for chunk in chunks]
    out = Packed([], [], [], [0], [chunk.end for chunk in chunks], tables, [])
    for number, chunk in enumerate(chunks):
        first, end, blocks = chunk.first, chunk.end, chunk.blocks
        out.token_ids += chunk.token_ids
        out.positions += range(first, end)
        out.slots += [blocks[i // size] * size + i % size for i in range(first, end)]
        if number >= num_decodes:
            out.starts.append(out.starts[-1] + end - first)
        out.logit_rows += range(len(out.token_ids) - chunk.num_logits, len(out.token_ids))
    return out


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
