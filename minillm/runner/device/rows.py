"""The CPU's record of the device state of decoding sequences (`minillm.kernels.decode_state.decode`).

Each decoding sequence has a row of int32 words on the device: the token to compute next, its position, the sampling
parameters and the block table. The CPU sends only the words that have changed since the last step.
"""

import math
import struct
from dataclasses import dataclass

from minillm import kernels
from minillm.cache import BlockTable
from minillm.kernels import AttentionShape, Costs, Field
from minillm.params import SamplingParams
from minillm.runner.device.work import DecodeWork
from minillm.sequence import Chunk, Sequence

SHORTEST = 256  # minimum context length, in tokens, for which attention is split
_LEAST_STEPS = 32  # minimum steps to keep a plan for shared blocks: making one takes the CPU up to 0.7 ms


def padded_size(n: int) -> int:
    """Return the padded batch size of n sequences, a compromise between the number of graphs and wasted rows."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    step = 8 if n <= 64 else 16
    return -(-n // step) * step


def padded_length(tokens: int, most: int) -> int:
    """Round a context length of ``tokens`` up to one of a few lengths, at most ``most``.

    Attention is split into as many parts as a context of the returned length needs.
    """
    length, factor = SHORTEST, 2
    while length < tokens:
        length, factor = factor * length, 4
    return min(length, most)


@dataclass(slots=True)
class Row:
    """The state of one sequence on the device, as the CPU knows it. ``index``: the row's number."""

    index: int
    table: BlockTable | None = None
    num_blocks: int = 0
    last_block: int = -1
    position: int = -1
    has_token: bool = False  # whether the row has the sequence's last token
    forks: bool = False  # whether the device forks the row (beam search)


@dataclass(frozen=True)
class Sharing:
    """Settings for reading each block once for all sequences that share it."""

    shape: AttentionShape  # the attention to split
    costs: Costs  # decide whether reading shared blocks once saves time


class Rows:
    """The CPU's record of the device's ``count`` rows of ``width`` words each.

    Args:
        sharing: how to read shared blocks once. None: each sequence reads all its blocks itself.
    """

    def __init__(self, count: int, width: int, block_size: int, sharing: Sharing | None) -> None:
        self._count, self._width, self._block_size, self._sharing = count, width, block_size, sharing
        self.forget()

    @property
    def may_share(self) -> bool:
        """Return whether a step may read shared blocks once for all their sequences, where that is faster."""
        return self._sharing is not None

    def forget(self) -> None:
        """Free every row, because the state of the device is unknown after a failure."""
        self._row_of: dict[int, Row] = {}  # rows in use, by seq_id
        self._free = list(range(self._count - 1, -1, -1))
        self._changes: dict[int, int] = {}  # flat index of a changed word -> new value
        self._counted: list[tuple[int, Sequence]] = []  # for `take_counted`
        self._last_rows: list[int] = []  # the rows of the last step
        self._planned: tuple[list[int], int] = ([], 0)  # rows and batch size of the last plan
        self._replan = True  # tables have changed since the last plan, other than by growing
        self._shares = False  # the last plan reads shared blocks once
        self._common = 0  # blocks shared by all beams at the last plan, summed over beams
        self._good_for: float = math.inf  # steps until sequences have outgrown the last plan
        self._last_beam_rows: list[int] = []

    def work_for(self, chunks: list[Chunk], *, joins: bool) -> DecodeWork:
        """Return the work to compute one token of each sequence. ``joins``: the batch also has chunks of prompts."""
        n = len(chunks)
        rows, longest = self._rows_of(chunks)
        rows += [-1] * (padded_size(n) - n)
        plan = self._plan(chunks, rows, n if joins else len(rows))
        indices, values = self.take_changes()
        same, self._last_rows = rows == self._last_rows, rows
        work = DecodeWork(n, longest, None if same else rows, indices, values, self._shares, plan)
        beams = [row for row, chunk in zip(rows, chunks, strict=False) if chunk.group.device]
        if beams:
            work.num_beams = len(beams)
            beams += [-1] * (padded_size(len(beams)) - len(beams))
            work.beam_rows = None if beams == self._last_beam_rows else beams
            self._last_beam_rows = beams
        return work

    def take_counted(self) -> list[tuple[int, Sequence]]:
        """Return (row, sequence) of each sequence with penalties that has taken a row since the last call.

        The caller must initialize the token counts of these rows on the device.
        """
        counted, self._counted = self._counted, []
        return counted

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the words that have changed since the last call: their flat indices, and their new values."""
        changes, self._changes = self._changes, {}
        return list(changes), list(changes.values())

    def rows_for(self, chunks: list[Chunk], decodes: list[Chunk]) -> list[Row]:
        """Return a row for each sequence that is about to sample. Beams among ``decodes`` keep their rows."""
        current = {chunk.sequence.seq_id for chunk in chunks}
        current |= {chunk.sequence.seq_id for chunk in decodes if chunk.group.device}
        return [self._row_of.get(chunk.sequence.seq_id) or self._take(chunk, current) for chunk in chunks]

    def note_drawn(self, chunks: list[Chunk]) -> None:
        """Record that the device has written the drawn tokens to the rows of these sequences."""
        for chunk in chunks:
            self._row_of[chunk.sequence.seq_id].has_token = True

    def give_up(self, sequences: list[Sequence]) -> None:
        """Free the rows of sequences that another step has advanced, because their rows are out of date.

        When such a sequence decodes again, it gets a new row.
        """
        for sequence in sequences:
            row = self._row_of.pop(sequence.seq_id, None)
            if row is not None:
                self._free.append(row.index)

    def outdate(self, sequences: list[Sequence]) -> None:
        """Record that the rows of these sequences lack the last token, because another step computed it."""
        for sequence in sequences:
            if (row := self._row_of.get(sequence.seq_id)) is not None:
                row.has_token = False

    def _rows_of(self, chunks: list[Chunk]) -> tuple[list[int], int]:
        """Return the row of each sequence, and the length of the longest sequence in tokens.

        Record the words of these rows that must change on the device: see `take_changes`.
        """
        row_of, changes, width = self._row_of, self._changes, self._width
        current: set[int] | None = None
        rows, longest = [], 0
        for chunk in chunks:
            sequence = chunk.sequence
            row = row_of.get(sequence.seq_id)
            if row is None:
                current = current or {each.sequence.seq_id for each in chunks}
                row = self._take(chunk, current)
                self._replan = True
            table = sequence.table
            assert table is not None
            blocks = table.blocks
            if row.table is not table:
                row.table, row.num_blocks = table, 0
                self._replan = True
            if len(blocks) != row.num_blocks or blocks[-1] != row.last_block:
                first = max(0, row.num_blocks - 1)  # the last one may have been copied on write
                if not (row.forks and chunk.group.device):
                    self._replan |= len(blocks) <= first or blocks[first] != row.last_block
                elif sequence.num_pending:
                    first = row.num_blocks  # the device may have forked the others since
                at = row.index * width + Field.TABLE + first
                changes.update(zip(range(at, at + len(blocks) - first), blocks[first:], strict=True))
                row.num_blocks, row.last_block = len(blocks), blocks[-1]
            if row.position != sequence.num_computed:
                changes[row.index * width + Field.POSITION] = row.position = sequence.num_computed
                self._replan = True
            if not row.has_token:
                assert not sequence.num_pending, f"nobody knows the last token of sequence {sequence.seq_id}"
                changes[row.index * width + Field.TOKEN] = sequence.token_ids[-1]
                if chunk.group.device:
                    changes[row.index * width + Field.LOGPROB] = _bits(sequence.cumulative_logprob)
                    changes[row.index * width + Field.RANK] = sequence.index
            forks = chunk.group.device is not None
            if row.forks != forks:
                row.forks = forks
                changes[row.index * width + Field.FORKS] = int(row.forks)
                self._replan = True
            row.has_token = False  # until one is drawn
            row.position += 1
            longest = max(longest, row.position)
            rows.append(row.index)
        return rows, longest

    def _take(self, chunk: Chunk, current: set[int]) -> Row:
        """Assign a free row to a sequence, and return the row. If none is free, free the rows of all other sequences.

        ``current``: ids of the sequences in the step. Their rows are not freed.
        """
        sequence, params = chunk.sequence, chunk.group.params
        if not self._free:
            for seq_id in [seq_id for seq_id in self._row_of if seq_id not in current]:
                self._free.append(self._row_of.pop(seq_id).index)
        row = self._row_of[sequence.seq_id] = Row(self._free.pop())
        self._changes[row.index * self._width + Field.FORKS] = 0
        if isinstance(params, SamplingParams):
            if params.has_penalties:
                self._counted.append((row.index, sequence))
            words = sampling_words(params, sequence)
            self._changes |= {row.index * self._width + field: word for field, word in words.items()}
        return row

    def _plan(self, chunks: list[Chunk], rows: list[int], size: int) -> list[list[int]] | None:
        """Plan how a batch of ``size`` rows reads shared blocks. None: the last plan is valid, or no plan saves time.

        A plan is valid while the same sequences decode and their tables only grow. Other changes need a new plan. A new
        plan is also made when the sequences' unshared tokens have doubled, because it may then be faster. The device
        changes tables of beams without notice, except for the blocks that all beams share. So a new plan is also made
        when the beams share many more blocks.
        """
        if self._sharing is None:
            return None
        fixed, common = self._fixed(chunks)
        grown = common - self._common >= 2 * len(chunks)
        self._good_for -= 1
        if not self._replan and not grown and self._good_for > 0 and (rows, size) == self._planned:
            return None
        tables = [chunk.sequence.blocks for chunk in chunks]
        lens = [chunk.sequence.num_computed + 1 for chunk in chunks]
        shape, costs = self._sharing.shape, self._sharing.costs
        plan = kernels.plan_attention(tables, lens, self._block_size, shape, size, costs, fixed)
        self._planned, self._replan, self._shares, self._common = (rows, size), False, plan is not None, common
        if plan is None:
            self._good_for = math.inf
            return None
        self._good_for = max(_LEAST_STEPS, (sum(lens) - sum(plan.tails)) // len(lens))
        return [plan.order, plan.tails, plan.starts, plan.counts, plan.items]

    def _fixed(self, chunks: list[Chunk]) -> tuple[list[int] | None, int]:
        """Return for each sequence how many of its first blocks the device cannot change; None if there are no beams.

        Only blocks of beams change, except for the blocks that all beams of a search share. Also return the number of
        these shared blocks, added up over all beams; 0 without beams.
        """
        common = sum(chunk.group.device.num_common_blocks for chunk in chunks if chunk.group.device)
        if not any(chunk.group.device for chunk in chunks):
            return None, 0
        every = [(chunk.group, chunk.sequence.blocks) for chunk in chunks]
        return [group.device.num_common_blocks if group.device else len(blocks) for group, blocks in every], common


def sampling_words(params: SamplingParams, sequence: Sequence) -> dict[int, int]:
    """Return a sequence's sampling parameters as words of its row (`Field` -> word)."""
    return {
        Field.TEMPERATURE: _bits(params.temperature),
        Field.TOP_K: min(params.top_k, (1 << 31) - 1),
        Field.TOP_P: _bits(params.top_p),
        Field.MIN_P: _bits(params.min_p),
        Field.SEED_LOW: _signed(sequence.seed),
        Field.SEED_HIGH: _signed(sequence.seed >> 32),
        Field.REPETITION_PENALTY: _bits(params.repetition_penalty),
        Field.FREQUENCY_PENALTY: _bits(params.frequency_penalty),
        Field.PRESENCE_PENALTY: _bits(params.presence_penalty),
    }


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
