"""The engine's block pool as the app knows it.

The states of blocks are derived from the block tables that the engine sends.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from textwrap import wrap

from msgspec import structs

from minillm.outputs import StepReport
from minillm.service.messages import BlockFacts, CacheChanged, CacheCounts, LogEntry, MemoryUse, TableView
from minillm.text.safe import clean_line
from minillm.ui.numbers import count, plural

_MOST_LOGGED = 10_000  # maximum number of events in the log
_MOST_STEPS = 1_000
_LONGEST_NAME = 60  # characters
_MOST_ENDED = 16
_MOST_LAST_TABLES = 32
_HISTORY = 600  # number of past figures to keep: a minute at ten per second


COPIED = "❐"  # mark of a copy on write; the font DejaVu Sans Mono has this character
FROM_DISK = " disk"  # mark of a block that was read from disk
NUM_COLORS = 8  # number of colors for candidates, used in cards, strands, and the strip of the whole pool
# Looks of a block in the strip. OWNED + n: the block is owned, and shown in color n of `NUM_COLORS`.
FREE, CACHED, PINNED, OWNED = range(4)
SHARED = OWNED + NUM_COLORS


class BlockState(Enum):
    """The state of a block. The value is its letter on the map."""

    FREE = "·"
    OWNED = "o"
    SHARED = "s"
    CACHED = "c"
    PINNED = "p"


@dataclass
class PoolFigures:
    """Figures of the pool at one moment."""

    free_blocks: int = 0  # not counting cached blocks
    cached_blocks: int = 0
    shared_blocks: int = 0
    pinned_blocks: int = 0
    logical_blocks: int = 0  # number of entries in all block tables, which is the number of blocks without sharing
    used_slots: int = 0  # slots that contain a token, in blocks that tables use


@dataclass(frozen=True)
class Copy:
    """A copy on write: the block that was copied, and the time at which this was reported."""

    source: int
    moment: float


@dataclass(frozen=True)
class Hit:
    """A prefix cache hit: how many of a prompt's tokens were cached, and the time at which this was reported."""

    num_found: int
    num_tokens: int
    moment: float


@dataclass(frozen=True)
class EndedTable:
    """A block table that has just been removed.

    ``words`` are the texts of the blocks that the table freed. ``moment`` is the time at which this was reported.
    """

    table: TableView
    words: list[str]
    moment: float


@dataclass
class LastTable:
    """The remains of a removed block table.

    ``blocks`` are the table's first blocks, up to the first block that has lost its tokens. ``num_tokens`` is the
    former length of the table.
    """

    blocks: list[int]
    num_tokens: int


@dataclass
class Pool:
    """Every block's state, the block tables, and the latest events and steps."""

    num_blocks: int
    block_size: int
    block_bytes: int
    num_host_blocks: int = 0
    max_model_len: int = 0  # slots that a cache without paging would reserve per sequence
    ref_counts: array[int] = field(init=False)
    filled: array[int] = field(init=False)  # for each block, the number of slots with a token
    tables: dict[int, TableView] = field(default_factory=dict)  # seq_id -> table, in order of arrival
    figures: PoolFigures = field(init=False)
    counts: CacheCounts = field(default_factory=CacheCounts)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=_MOST_LOGGED))
    num_logged: int = 0  # number of all events, including events that the engine has not sent
    history: deque[PoolFigures] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    words: dict[int, str] = field(default_factory=dict)  # block -> text at its beginning, not cleaned for a terminal
    copies: dict[int, Copy] = field(default_factory=dict)  # block that contains a copy -> the copy's source
    hits: dict[int, Hit] = field(default_factory=dict)  # seq_id -> hit
    ended: deque[EndedTable] = field(default_factory=lambda: deque(maxlen=_MOST_ENDED))
    last_tables: dict[tuple[str, int], LastTable] = field(default_factory=dict)  # (owner, completion) -> its last table
    use: MemoryUse | None = None  # memory use of the device

    def __post_init__(self) -> None:
        self.ref_counts = array("l", bytes(array("l").itemsize * self.num_blocks))
        self.filled = array("l", self.ref_counts)
        self.figures = PoolFigures(free_blocks=self.num_blocks)
        self._states = [BlockState.FREE] * self.num_blocks
        self.looks = bytearray(self.num_blocks)  # look of each block, from `FREE` to `SHARED`
        self.from_disk: set[int] = set()  # blocks with content that was read from disk
        self._cached: set[int] = set()
        self._holders: dict[int, dict[int, int]] = {}  # block -> seq_id -> index of the block in that table

    def apply(self, event: CacheChanged) -> list[int]:
        """Apply the changes that the engine reports. Return the blocks that have changed their state."""
        self._cached.difference_update(event.uncached)
        self._cached.update(event.cached)
        self.from_disk.difference_update(event.unloaded)
        self.from_disk.update(event.loaded)
        touched, now = {*event.cached, *event.uncached}, time.monotonic()
        self.words.update(event.words)
        gone = [table for seq_id in event.gone if (table := self.tables.pop(seq_id, None)) is not None]
        for table in gone:
            touched.update(self._release(table))
        for change in event.tables:
            touched.update(self._take_table(change))
        self._note_ended(gone, event.tables, now)
        rewritten: set[int] = set()
        for entry in event.log:
            if entry.kind == "copy":
                source, taken = entry.blocks
                self.copies[taken] = Copy(source, now)
                rewritten.add(taken)
            elif entry.kind in ("allocate", "evict"):
                rewritten.update(entry.blocks)
            elif entry.kind == "hit" and (found := self.tables.get(entry.seq_id)) is not None:
                self.hits[entry.seq_id] = Hit(entry.detail, found.num_tokens, now)
        figures = replace(self.figures)
        changed = [block for block in touched if 0 <= block < self.num_blocks and self._settle(block, figures)]
        for block in changed:
            if not self.ref_counts[block]:
                self.copies.pop(block, None)
        lost = {block for block in changed if self._states[block] is BlockState.FREE}
        self._shorten_past(rewritten | lost, incomplete=event.num_unlogged > 0)
        self.figures, self.counts = figures, event.counts
        self.history.append(figures)
        self.log.extend(event.log)
        self.num_logged += len(event.log) + event.num_unlogged
        return changed

    def _shorten_past(self, lost: set[int], *, incomplete: bool) -> None:
        """Shorten each removed table to the blocks before its first block in ``lost``.

        ``lost`` are blocks that have lost their tokens. If ``incomplete``, some of these blocks are missing from
        ``lost``, so forget all removed tables.
        """
        if incomplete:
            self.last_tables.clear()
        for last in self.last_tables.values():
            if not lost.isdisjoint(last.blocks):
                last.blocks = list(takewhile(lambda block: block not in lost, last.blocks))
        while len(self.last_tables) > _MOST_LAST_TABLES:
            del self.last_tables[next(iter(self.last_tables))]

    def _note_ended(self, gone: Iterable[TableView], changes: Iterable[TableView], now: float) -> None:
        """Record the tables that no longer exist, unless the same sequence continues in a new table."""
        go_on = {(change.owner, change.index) for change in changes if change.owner}
        noted: set[int] = set()
        for table in gone:
            self.hits.pop(table.seq_id, None)
            if table.state != "swapped" and (table.owner, table.index) not in go_on:
                self.last_tables.pop((table.owner, table.index), None)
                self.last_tables[table.owner, table.index] = LastTable(table.blocks, table.num_tokens)
                freed = [block for block in table.blocks if block not in self._holders and block not in noted]
                noted.update(freed)
                self.ended.append(EndedTable(table, [self.words.get(block, "") for block in freed], now))

    def _take_table(self, change: TableView) -> Iterable[int]:
        """Replace a table by its new version. Return the blocks that may have changed their state."""
        before = self.tables.get(change.seq_id)
        kept = [] if before is None else before.blocks[: change.keep]
        table = self.tables[change.seq_id] = structs.replace(change, blocks=kept + change.blocks, keep=0)
        touched = self._release(before, change.keep)
        if table.state == "swapped":
            return touched
        for number in range(change.keep, len(table.blocks)):
            self._holders.setdefault(table.blocks[number], {})[table.seq_id] = number
        # A kept block also counts as changed if its number of filled slots may differ between the two versions.
        same = min(before.num_tokens, table.num_tokens) if before is not None and before.state == table.state else 0
        return [*touched, *table.blocks[min(change.keep, same // self.block_size) :]]

    def _release(self, table: TableView | None, keep: int = 0) -> list[int]:
        """Release a table's blocks after the first ``keep``: the table no longer counts as a user of these blocks.

        Return the released blocks. Other tables may still use them.
        """
        if table is None or table.state == "swapped":
            return []
        for block in table.blocks[keep:]:
            holders = self._holders.get(block, {})
            holders.pop(table.seq_id, None)
            if not holders:
                self._holders.pop(block, None)
        return table.blocks[keep:]

    def _settle(self, block: int, figures: PoolFigures) -> bool:
        """Compute a block's state again, and update ``figures``. Return whether the state has changed."""
        holders, state, filled, look = self._holders.get(block, {}), BlockState.FREE, 0, FREE
        if holders:
            state, look = (BlockState.SHARED, SHARED) if len(holders) > 1 else (BlockState.OWNED, OWNED)
            for seq_id, number in holders.items():
                table = self.tables[seq_id]
                filled = max(filled, self.filled_slots(table, number))
                if table.state == "pinned":
                    state = BlockState.PINNED
                if look != SHARED:
                    look = PINNED if table.state == "pinned" else OWNED + table.index % NUM_COLORS
        elif block in self._cached:
            state, filled, look = BlockState.CACHED, self.block_size, CACHED
        self.looks[block] = look
        after = (len(holders), filled, state)
        before = (self.ref_counts[block], self.filled[block], self._states[block])
        if after == before:
            return False
        self.ref_counts[block], self.filled[block], self._states[block] = after
        for sign, (sharers, slots, kind) in ((-1, before), (1, after)):
            if sharers:
                figures.shared_blocks += sign * (sharers > 1)
                figures.pinned_blocks += sign * (kind is BlockState.PINNED)
                figures.logical_blocks += sign * sharers
                figures.used_slots += sign * slots
            elif kind is BlockState.CACHED:
                figures.cached_blocks += sign
            else:
                figures.free_blocks += sign
        return True

    def state(self, block: int) -> BlockState:
        return self._states[block]

    def holders(self, block: int) -> list[tuple[TableView, int]]:
        """Return the tables that use a device block, each with the block's index in that table."""
        return [(self.tables[seq_id], number) for seq_id, number in self._holders.get(block, {}).items()]

    @property
    def used_blocks(self) -> int:
        """Return the number of blocks that tables use."""
        return self.num_blocks - self.figures.free_blocks - self.figures.cached_blocks

    @property
    def wasted_slots(self) -> int:
        """Return the number of slots without a token in blocks that tables use."""
        return self.used_blocks * self.block_size - self.figures.used_slots

    @property
    def sharing_ratio(self) -> float:
        """Return the number of logical blocks per used physical block. It is 1 if nothing is shared."""
        return self.figures.logical_blocks / self.used_blocks if self.used_blocks else 1.0

    def tables_of(self, owner: str) -> list[TableView]:
        """Return the tables of one request, in the order of its completions."""
        return sorted((table for table in self.tables.values() if table.owner == owner), key=lambda table: table.index)

    def filled_slots(self, table: TableView, index: int) -> int:
        """Return the number of slots that contain a token of ``table``, in its logical block ``index``."""
        return max(0, min(self.block_size, table.num_tokens - index * self.block_size))


Names = Callable[[str, int], str]
"""(request that owns a sequence, index of the completion) -> name: "turn 2", "turn 2 · 3", "system prompt"."""


Scores = Callable[[str, int], float | None]
"""(request that owns a sequence, index of the completion) -> score of a beam; None for other sequences."""


@dataclass
class Memory:
    """The data that all memory views share: the block pool, the names of sequences, and the selected block.

    ``current`` is the request of the last answer. The tables of this request are shown first.
    """

    pool: Pool | None = None
    names: Names = lambda owner, index: f"{owner} · {index + 1}"
    scores: Scores = lambda owner, index: None
    current: str | None = None
    num_beams: int = 0  # number of beams of the current answer after its search has ended, else 0
    # The owner and completion that have computed the current answer, if it was a candidate of another request.
    origin: tuple[str, int] | None = None
    block: int | None = None  # the selected block
    on_host: TableView | None = None  # if the selected block is in host memory, the table that uses it; else None
    facts: BlockFacts | None = None  # the engine's latest answer to `Inspect`

    @property
    def current_tables(self) -> list[TableView]:
        """Return the tables of the last answer."""
        return self.pool.tables_of(self.current) if self.pool is not None and self.current is not None else []

    @property
    def tables(self) -> list[TableView]:
        """Return all tables. The tables of the last answer's request are first."""
        current = self.current_tables
        others = self.pool.tables.values() if self.pool is not None else ()
        return [*current, *(table for table in others if self.current is None or table.owner != self.current)]

    def eviction_text(self) -> str:
        """Return a text about how much of the current answer is still cached.

        Return "" if the answer has a table, or if nothing is known about its blocks.
        """
        if self.pool is None or self.current is None or self.current_tables:
            return ""
        last = self.pool.last_tables.get(self.origin or (self.current, 0))
        if last is None:
            return ""
        name, cached = self.name(self.current, -1), min(last.num_tokens, len(last.blocks) * self.pool.block_size)
        if cached == last.num_tokens:
            return f"{name}: all {plural(cached, 'token')} still cached"
        still = f"{count(cached)} of {plural(last.num_tokens, 'token')} still cached"
        return f"{name}: {still}, the rest would be read again"

    def eviction_lines(self, width: int) -> list[str]:
        """Return `eviction_text`, broken into lines of about ``width`` cells."""
        return wrap(self.eviction_text(), max(20, width))

    def name(self, owner: str, index: int) -> str:
        """Return a sequence's name for display, on one line and safe for a terminal."""
        return clean_line(self.names(owner, index), _LONGEST_NAME)

    def table_name(self, table: TableView) -> str:
        """Return a table's name for display. A table without an owner is named by its sequence's number."""
        return self.name(table.owner, table.index) if table.owner else f"sequence {table.seq_id}"
