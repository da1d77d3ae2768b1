"""The engine's pool of blocks as the app knows it: a picture, kept up to date by `CacheChanged` events."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from minillm.service.messages import CacheChanged, TableView


class BlockState(Enum):
    """Who holds a block. The value is its letter on the map."""

    FREE = "·"
    OWNED = "o"
    SHARED = "s"


@dataclass(frozen=True)
class Run:
    """Logical blocks ``start … start + length - 1`` of a table lie in physical blocks ``block, block + 1, …``."""

    start: int
    block: int
    length: int


@dataclass
class Pool:
    """Reference count and filled slots of every block, and the block tables."""

    num_blocks: int
    block_size: int
    block_bytes: int
    ref_counts: array[int] = field(init=False)
    filled: array[int] = field(init=False)
    tables: Sequence[TableView] = ()
    used_slots: int = 0
    shared_blocks: int = 0
    logical_blocks: int = 0
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.ref_counts = array("l", bytes(array("l").itemsize * self.num_blocks))
        self.filled = array("l", self.ref_counts)
        self.free_blocks = self.num_blocks

    def apply(self, event: CacheChanged) -> list[int]:
        """Take a change over; returns the blocks that look different now."""
        changed = []
        for block, ref_count, filled in event.changed:
            if 0 <= block < self.num_blocks:
                self.ref_counts[block] = ref_count
                self.filled[block] = filled
                changed.append(block)
        self.tables = event.tables
        self.free_blocks = event.free_blocks
        self.used_slots = event.used_slots
        self.shared_blocks = event.shared_blocks
        self.logical_blocks = event.logical_blocks
        self.num_copies = event.num_copies
        return changed

    def state(self, block: int) -> BlockState:
        count = self.ref_counts[block]
        if count == 0:
            return BlockState.FREE
        return BlockState.OWNED if count == 1 else BlockState.SHARED

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def wasted_slots(self) -> int:
        """Slots of used blocks that hold no token: the tails."""
        return self.used_blocks * self.block_size - self.used_slots

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical blocks; 1 where nothing is shared."""
        return self.logical_blocks / self.used_blocks if self.used_blocks else 1.0

    def table_of(self, *owners: str) -> TableView | None:
        """The first table that belongs to one of ``owners``, tried in their order."""
        for owner in owners:
            for table in self.tables:
                if table.owner == owner:
                    return table
        return None

    def filled_slots(self, table: TableView, index: int) -> int:
        """Slots of the table's logical block ``index`` that hold one of its tokens."""
        return max(0, min(self.block_size, table.num_tokens - index * self.block_size))


def contiguous_runs(blocks: Sequence[int]) -> list[Run]:
    """A block table as runs of consecutive physical blocks."""
    runs: list[Run] = []
    for index, block in enumerate(blocks):
        if runs and runs[-1].block + runs[-1].length == block:
            runs[-1] = Run(runs[-1].start, runs[-1].block, runs[-1].length + 1)
        else:
            runs.append(Run(index, block, 1))
    return runs
