"""The pool as the app sees it: what changed since the last look, told by the cache's own events.

A pool may have 20,000 blocks and change ten times a second: what has not changed is not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minillm.cache import CacheEvent
from minillm.runs import common_length
from minillm.service.messages import (
    BlockChange,
    BlockFacts,
    CacheChanged,
    Holder,
    LogEntry,
    PoolFigures,
    TableChange,
)

if TYPE_CHECKING:
    from minillm.engine.engine import Engine
    from minillm.sequence import Sequence

_MOST_LOGGED = 400  # events of one picture; a step of a large batch can make thousands


@dataclass(frozen=True)
class Owner:
    """Whose sequence it is: a request, and the number of the completion within it."""

    request_id: str
    index: int
    state: str
    sequence: Sequence


@dataclass
class _Shown:
    """A table as it was last told."""

    change: TableChange
    blocks: list[int]


@dataclass
class _Totals:
    """Sums over the blocks that somebody holds, kept by difference."""

    shared_blocks: int = 0
    logical_blocks: int = 0
    used_slots: int = 0

    def exchange(self, before: BlockChange | None, after: BlockChange) -> None:
        for look, sign in ((before, -1), (after, 1)):
            if look is not None and look.ref_count:
                self.shared_blocks += sign * (look.ref_count > 1)
                self.logical_blocks += sign * look.ref_count
                self.used_slots += sign * look.filled


@dataclass
class CacheView:
    """Follows one engine's cache."""

    engine: Engine
    began: float = field(default_factory=time.monotonic)
    _dirty: set[int] = field(default_factory=set)  # blocks that may look other than they did
    _shown: dict[int, _Shown] = field(default_factory=dict)
    _holders: dict[int, dict[int, int]] = field(default_factory=dict)  # block -> seq_id -> logical block
    _looks: dict[int, BlockChange] = field(default_factory=dict)  # of every block that is not free
    _since: dict[int, float] = field(default_factory=dict)  # block -> when it was taken
    _log: list[LogEntry] = field(default_factory=list)
    _num_unlogged: int = 0
    _pinned: frozenset[int] = frozenset()
    _owners: Mapping[int, Owner] = field(default_factory=dict)
    _figures: PoolFigures | None = None
    _totals: _Totals = field(default_factory=_Totals)

    def __post_init__(self) -> None:
        self.engine.cache.subscribers.append(self._note)

    def _note(self, event: CacheEvent) -> None:
        now = time.monotonic()
        cache, detail = self.engine.cache, 0
        if event.kind == "copy":
            source, taken = event.blocks
            detail = cache.ref_counts[source]
            self._since[taken] = now
        elif event.kind == "allocate":
            self._since.update(dict.fromkeys(event.blocks, now))
        elif event.kind == "hit":
            detail = len(event.blocks) * cache.block_size
        self._dirty.update(event.blocks)
        if len(self._log) >= _MOST_LOGGED:
            self._num_unlogged += 1
            return
        owner = self._owners.get(event.seq_id)
        self._log.append(
            LogEntry(
                time=now - self.began,
                kind=event.kind,
                seq_id=event.seq_id,
                owner="" if owner is None else owner.request_id,
                blocks=list(event.blocks),
                parent_id=event.parent_id,
                detail=detail,
            )
        )

    def changes(self, owners: Mapping[int, Owner]) -> CacheChanged | None:
        """What to tell, or None where nothing has changed. ``owners``: of the sequences, by ``seq_id``."""
        self._owners = owners
        tables, gone = self._table_changes(owners)
        pinned = frozenset(
            block
            for sequence in self.engine.scheduler.idle.pinned.values()
            if sequence.table is not None
            for block in sequence.table.blocks
        )
        self._dirty |= pinned ^ self._pinned
        self._pinned = pinned
        blocks = self._block_changes()
        figures = self._count()
        if not (tables or gone or blocks or self._log) and figures == self._figures:
            return None
        self._figures = figures
        log, self._log = self._log, []
        unlogged, self._num_unlogged = self._num_unlogged, 0
        return CacheChanged(blocks, tables, gone, figures, log, unlogged)

    def _table_changes(self, owners: Mapping[int, Owner]) -> tuple[list[TableChange], list[int]]:
        """Which tables differ from what was told; notes the blocks in which they do."""
        size, changes = self.engine.cache.block_size, []
        saved = self.engine.scheduler.swap.saved
        present = {seq_id: (table.blocks, table.num_tokens) for seq_id, table in self.engine.cache.tables.items()}
        present |= {seq_id: (table.blocks, table.num_tokens) for seq_id, table in saved.items()}
        for seq_id, (blocks, num_tokens) in present.items():
            owner = owners.get(seq_id)
            name, index, state = ("", 0, "running") if owner is None else (owner.request_id, owner.index, owner.state)
            if seq_id in saved:
                state = "swapped"
            elif seq_id in self.engine.scheduler.idle.pinned:
                state = "pinned"
            shown = self._shown.get(seq_id)
            before = [] if shown is None else shown.blocks
            if shown is not None and (shown.change.state == "swapped") != (state == "swapped"):
                self._let_go(seq_id, shown)
                before = []
            keep = common_length(blocks, before)
            change = TableChange(seq_id, name, index, state, num_tokens, keep, blocks[keep:])
            if shown is not None and keep == len(before) == len(blocks) and _same(shown.change, change):
                continue
            changes.append(change)
            if state != "swapped":
                for block in before[keep:]:
                    self._remove_holder(block, seq_id)
                for number in range(keep, len(blocks)):
                    self._holders.setdefault(blocks[number], {})[seq_id] = number
                first = keep if shown is None else min(keep, max(0, shown.change.num_tokens - 1) // size)
                self._dirty.update(before[keep:], blocks[first:])
            self._shown[seq_id] = _Shown(change, list(blocks))
        gone = [seq_id for seq_id in self._shown if seq_id not in present]
        for seq_id in gone:
            self._let_go(seq_id, self._shown.pop(seq_id))
        return changes, gone

    def _let_go(self, seq_id: int, shown: _Shown) -> None:
        if shown.change.state != "swapped":
            for block in shown.blocks:
                self._remove_holder(block, seq_id)
            self._dirty.update(shown.blocks)

    def _remove_holder(self, block: int, seq_id: int) -> None:
        holders = self._holders.get(block, {})
        holders.pop(seq_id, None)
        if not holders:
            self._holders.pop(block, None)

    def _block_changes(self) -> list[BlockChange]:
        changes = []
        for block in self._dirty:
            look, before = self._look(block), self._looks.get(block)
            if look == before:
                continue
            if look.kind == "free":
                self._since.pop(block, None)
                if self._looks.pop(block, None) is None:
                    continue
            else:
                self._looks[block] = look
            changes.append(look)
            self._totals.exchange(before, look)
        self._dirty.clear()
        return changes

    def _look(self, block: int) -> BlockChange:
        cache = self.engine.cache
        holders = self._holders.get(block)
        if not holders:
            cached = cache.is_cached(block)
            return BlockChange(block, 0, cache.block_size if cached else 0, "cached" if cached else "free")
        size = cache.block_size
        filled = max(
            min(size, self._shown[seq_id].change.num_tokens - number * size) for seq_id, number in holders.items()
        )
        kind = "pinned" if block in self._pinned else "shared" if len(holders) > 1 else "owned"
        return BlockChange(block, len(holders), max(0, filled), kind)

    def _count(self) -> PoolFigures:
        cache, scheduler = self.engine.cache, self.engine.scheduler
        return PoolFigures(
            free_blocks=cache.num_free - cache.num_cached,
            cached_blocks=cache.num_cached,
            shared_blocks=self._totals.shared_blocks,
            pinned_blocks=len(self._pinned),
            logical_blocks=self._totals.logical_blocks,
            used_slots=self._totals.used_slots,
            host_blocks_used=scheduler.swap.num_blocks - scheduler.swap.num_free,
            num_copies=cache.num_copies,
            num_evictions=cache.num_evictions,
            num_hit_tokens=cache.num_hit_tokens,
            num_looked_up_tokens=cache.num_looked_up_tokens,
            num_preemptions=scheduler.preemption.count,
            num_swapped_out=scheduler.swap.num_swapped_out,
            num_swapped_in=scheduler.swap.num_swapped_in,
        )

    def facts(self, block: int) -> BlockFacts:
        """All that is known of a block."""
        cache, tokenizer = self.engine.cache, self.engine.tokenizer
        look = self._look(block)
        holders: list[Holder] = []
        token_ids: list[int] = []
        for seq_id, number in self._holders.get(block, {}).items():
            owner = self._owners.get(seq_id)
            name, index = ("", 0) if owner is None else (owner.request_id, owner.index)
            holders.append(Holder(name, index, seq_id, number))
            start = number * cache.block_size
            if owner is not None and not token_ids:
                token_ids = owner.sequence.token_ids[start : start + look.filled]
        entry = cache.prefix_entry(block)
        if entry is not None and not token_ids:
            token_ids = list(entry.token_ids)
        return BlockFacts(
            block=block,
            kind=look.kind,
            ref_count=look.ref_count,
            filled=look.filled,
            holders=holders,
            tokens=[str(i) if tokenizer is None else tokenizer.token_text(i) for i in token_ids],
            node=None if entry is None else entry.node,
            before="" if entry is None or entry.before is None else str(entry.before),
            age=time.monotonic() - self._since[block] if block in self._since else None,
        )


def _same(one: TableChange, other: TableChange) -> bool:
    return replace(one, keep=0, blocks=[]) == replace(other, keep=0, blocks=[])
