"""One step's work as plain data: token ids, positions and block ids, and nothing of requests."""

from dataclasses import dataclass, field

from minillm.cache import HostMoves
from minillm.runner.device.work import DecodeWork


@dataclass(slots=True)
class ChunkWork:
    """Consecutive tokens of one sequence."""

    token_ids: list[int]
    first: int  # the first token's position
    blocks: list[int]  # of the sequence, up to the last token
    num_prompt_tokens: int
    num_logits: int  # of the last tokens
    score_from: int = 0  # the position before the first of ``targets``
    targets: list[int] = field(default_factory=list)  # tokens to score
    num_top: int = 0  # most probable tokens to return with each score

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)


@dataclass(slots=True)
class Packed:
    """Chunks packed into one batch, as lists for the tensors of `minillm.model.llama.Batch`."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]  # of the prefill chunks, and the end of the last, counted from the first one
    lengths: list[int]  # of the sequences, with these tokens
    tables: list[list[int]]  # padded to the same width
    logit_rows: list[int]


def packed(chunks: list[ChunkWork], num_decodes: int, size: int) -> Packed:
    """Pack chunks; the first ``num_decodes`` decode, and a block has ``size`` tokens."""
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
    """A step: move and copy blocks, then compute."""

    moves: HostMoves
    copies: list[tuple[int, int]]  # (source, destination)
    decode: DecodeWork | None  # a device runner's own part
    chunks: list[ChunkWork]
    # The first chunks, computed as decodes without state on the device: of a device runner all or none of their tokens,
    # otherwise one token of each.
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        decoding = 0 if self.decode is None else self.decode.num_seqs
        return decoding + sum(len(chunk.token_ids) for chunk in self.chunks)
