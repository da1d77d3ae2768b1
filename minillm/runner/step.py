"""One step's work as plain data: token ids, positions and block ids, and nothing of requests."""

from dataclasses import dataclass, field

from minillm.cache import HostMoves
from minillm.runner.decode_work import DecodeWork


@dataclass(slots=True)
class ChunkWork:
    """Successive tokens of one sequence."""

    token_ids: list[int]
    first: int  # the position of the first of them
    blocks: list[int]  # that hold the sequence up to the last of them
    num_prompt_tokens: int
    num_logits: int  # wanted, of the last tokens
    score_from: int = 0  # the position behind which the first of ``targets`` stands
    targets: list[int] = field(default_factory=list)  # tokens whose log-probabilities are wanted
    num_top: int = 0  # with the most probable tokens beside each

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)


@dataclass(slots=True)
class Packed:
    """Chunks one after another, as `minillm.model.llama.Batch` has them, in numbers of the host."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]  # of the chunks that prefill, and the end of the last, counted from the first of them
    lengths: list[int]  # of the sequences, these tokens included
    tables: list[list[int]]  # all as wide as the widest
    logit_rows: list[int]


def packed(chunks: list[ChunkWork], num_decodes: int, size: int) -> Packed:
    """Pack chunks, the first ``num_decodes`` of which decode; a block has ``size`` tokens."""
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
    # Of the chunks, the first ones: their tokens are computed as those of sequences that decode, without rows on the
    # device. It is all or none where other sequences have rows, and one token of each sequence where none has.
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        decoding = 0 if self.decode is None else self.decode.num_seqs
        return decoding + sum(len(chunk.token_ids) for chunk in self.chunks)
