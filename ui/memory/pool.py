"""The engine's pool of blocks as the app knows it: a picture, kept up to date by `CacheChanged` events."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from minillm.service.messages import CacheChanged, LogEntry, PoolFigures, StepView, TableView

_MOST_LOGGED = 10_000  # events that the log keeps
_MOST_STEPS = 1_000
_HISTORY = 600  # figures over time: a minute at ten a second


class BlockState(Enum):
    """Who holds a block. The value is its letter on the map."""

    FREE = "·"
    OWNED = "o"
    SHARED = "s"
    CACHED = "c"
    PINNED = "p"


_STATES = {state.name.lower(): number for number, state in enumerate(BlockState)}
_BY_NUMBER = tuple(BlockState)


@dataclass
class Pool:
    """Every block's state, the block tables, what happened lately, and what the steps did."""

    num_blocks: int
    block_size: int
    block_bytes: int
    num_host_blocks: int = 0
    max_model_len: int = 0  # what a cache without paging would reserve for each sequence
    ref_counts: array[int] = field(init=False)
    filled: array[int] = field(init=False)
    tables: dict[int, TableView] = field(default_factory=dict)  # by seq_id, in the order in which they came
    figures: PoolFigures = field(init=False)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=_MOST_LOGGED))
    num_logged: int = 0  # events ever, those that were not told included
    history: deque[PoolFigures] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    steps: deque[StepView] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))

    def __post_init__(self) -> None:
        self.ref_counts = array("l", bytes(array("l").itemsize * self.num_blocks))
        self.filled = array("l", self.ref_counts)
        self._states = bytearray(self.num_blocks)
        self.figures = PoolFigures(free_blocks=self.num_blocks)

    def apply(self, event: CacheChanged) -> list[int]:
        """Take a change over; returns the blocks that look different now."""
        changed = []
        for change in event.blocks:
            if 0 <= change.block < self.num_blocks:
                self.ref_counts[change.block] = change.ref_count
                self.filled[change.block] = change.filled
                self._states[change.block] = _STATES.get(change.kind, 0)
                changed.append(change.block)
        for seq_id in event.gone:
            self.tables.pop(seq_id, None)
        for table in event.tables:
            before = self.tables.get(table.seq_id)
            kept = [] if before is None else before.blocks[: table.keep]
            self.tables[table.seq_id] = TableView(
                table.seq_id, table.owner, table.index, table.state, table.num_tokens, kept + table.blocks
            )
        self.figures = event.figures
        self.history.append(event.figures)
        self.log.extend(event.log)
        self.num_logged += len(event.log) + event.num_unlogged
        return changed

    def state(self, block: int) -> BlockState:
        return _BY_NUMBER[self._states[block]]

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.figures.free_blocks - self.figures.cached_blocks

    @property
    def wasted_slots(self) -> int:
        """Slots of used blocks that hold no token: the tails."""
        return self.used_blocks * self.block_size - self.figures.used_slots

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical blocks; 1 where nothing is shared."""
        return self.figures.logical_blocks / self.used_blocks if self.used_blocks else 1.0

    def tables_of(self, owner: str) -> list[TableView]:
        """The tables of one request, by the number of the completion."""
        return sorted((table for table in self.tables.values() if table.owner == owner), key=lambda table: table.index)

    def filled_slots(self, table: TableView, index: int) -> int:
        """Slots of the table's logical block ``index`` that hold one of its tokens."""
        return max(0, min(self.block_size, table.num_tokens - index * self.block_size))
