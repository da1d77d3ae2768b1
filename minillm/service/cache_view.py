"""Collect the changes in the block pool since the last report to the app, from cache events.

A pool may have 20,000 blocks and change ten times a second, so this module never scans unchanged blocks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from minillm.cache import BlockTable, CacheEvent
from minillm.cache.runs import common_length
from minillm.cache.swap import SavedTable
from minillm.engine.engine import Engine
from minillm.sequence import Sequence
from minillm.service.messages import BlockFacts, CacheChanged, CacheCounts, LogEntry, TableState, TableView

_WORD_TOKENS, _WORDS = 16, 80  # for a block's label: number of tokens to decode, and maximum characters of the label
_MOST_LOGGED = 400  # maximum events per report; a step of a large batch can cause thousands


@dataclass(frozen=True)
class Owner:
    """The owner of a sequence as the app shows it: a request, and the index of a completion of this request."""

    request_id: str
    index: int
    state: TableState
    sequence: Sequence
    shows_words: bool = True  # False: the viewer must not see the text of the sequence


@dataclass
class CacheView:
    """Tracks one engine's block pool by its cache events, and reports the changes to one viewer (an app or watcher)."""

    engine: Engine
    began: float = field(default_factory=time.monotonic)
    shows_all_words: bool = True  # False: show a block's text only if a sequence with a known owner uses the block
    _owners: Mapping[int, Owner] = field(default_factory=dict)  # by seq_id
    _tables: dict[int, TableView] = field(default_factory=dict)  # by seq_id, as last sent
    _cached: set[int] = field(default_factory=set)  # blocks, as last sent
    _loaded: set[int] = field(default_factory=set)  # blocks from disk, as last sent
    _counts: CacheCounts | None = None
    _touched: set[int] = field(default_factory=set)  # blocks in events since the last report
    _since: dict[int, float] = field(default_factory=dict)  # block -> when it was allocated
    _log: list[LogEntry] = field(default_factory=list)
    _num_unlogged: int = 0
    _words: dict[int, str] = field(default_factory=dict)  # by block, as last sent

    def __post_init__(self) -> None:
        self.engine.cache.subscribers.append(self._note)
        self._touched.update(range(self.engine.cache.num_blocks))  # the first report lists all cached blocks

    def close(self) -> None:
        """Stop listening to cache events."""
        self.engine.cache.subscribers.remove(self._note)

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
        self._touched.update(event.blocks)
        if len(self._log) >= _MOST_LOGGED:
            self._num_unlogged += 1
            return
        owner = self._owners.get(event.seq_id)
        name = "" if owner is None else owner.request_id
        moment, blocks = now - self.began, list(event.blocks)
        self._log.append(LogEntry(moment, event.kind, event.seq_id, name, blocks, event.parent_id, detail))

    def changes(self, owners: Mapping[int, Owner]) -> CacheChanged | None:
        """Return the changes since the last call, or None if nothing changed.

        ``owners`` maps each ``seq_id`` to its owner.
        """
        self._owners = owners
        tables, gone = self._table_changes()
        cached, uncached = self._cached_changes()
        counts = _counts(self.engine)
        from_disk = set() if self.engine.requests.disk is None else self.engine.requests.disk.from_disk
        loaded, unloaded = from_disk - self._loaded, self._loaded - from_disk
        if not (tables or gone or cached or uncached or self._log or unloaded) and counts == self._counts:
            return None
        self._counts = counts
        log, self._log = self._log, []
        unlogged, self._num_unlogged = self._num_unlogged, 0
        self._loaded = set(from_disk)
        words = self._new_words(tables)
        return CacheChanged(tables, gone, cached, uncached, counts, log, unlogged, words, list(loaded), list(unloaded))

    def _new_words(self, changes: list[TableView]) -> dict[int, str]:
        """Return the labels of the blocks that were added to the changed tables, by block number.

        A label is the text at the beginning of a block. A block that was only partly filled at the last report is
        included if its label has changed.
        """
        tokenizer, size, found = self.engine.tokenizer, self.engine.cache.block_size, {}
        for table in changes:
            owner = self._owners.get(table.seq_id)
            if owner is None or not owner.shows_words or tokenizer is None or table.state == "swapped":
                continue
            blocks, first = self._tables[table.seq_id].blocks, max(0, table.keep - 1)
            for number in range(first, len(blocks)):
                start = number * size
                token_ids = owner.sequence.token_ids[start : min(start + size, start + _WORD_TOKENS, table.num_tokens)]
                words = tokenizer.decode(token_ids)[:_WORDS]
                if words and self._words.get(blocks[number]) != words:
                    self._words[blocks[number]] = found[blocks[number]] = words
        return found

    def _table_changes(self) -> tuple[list[TableView], list[int]]:
        saved, before = self.engine.scheduler.preemption.swap.saved, self._tables
        tables: dict[int, BlockTable | SavedTable] = {**self.engine.cache.tables, **saved}
        changes, now = [], {}
        for seq_id, table in tables.items():
            owner = self._owners.get(seq_id)
            name, index = ("", 0) if owner is None else (owner.request_id, owner.index)
            state: TableState = "running" if owner is None else owner.state
            state = "swapped" if seq_id in saved else state
            now[seq_id] = view = TableView(seq_id, name, index, state, table.num_tokens, list(table.blocks))
            sent = before.get(seq_id)
            if view != sent:
                in_place = sent is not None and (sent.state == "swapped") == (state == "swapped")
                keep = common_length(view.blocks, sent.blocks) if sent and in_place else 0
                changes.append(replace(view, blocks=view.blocks[keep:], keep=keep))
        self._tables = now
        return changes, [seq_id for seq_id in before if seq_id not in now]

    def _cached_changes(self) -> tuple[list[int], list[int]]:
        """Return the blocks that became cached since the last call, and the blocks that are no longer cached."""
        cache = self.engine.cache
        cached = {block for block in self._touched if cache.is_cached(block)}
        more, fewer = cached - self._cached, (self._touched - cached) & self._cached
        self._cached |= more
        self._cached -= fewer
        for block in self._touched - cached:
            if not cache.ref_counts[block]:
                self._since.pop(block, None)
        self._touched.clear()
        return list(more), list(fewer)

    def facts(self, block: int) -> BlockFacts:
        """Return details of one block: its tokens, its age, and its node in the prefix cache."""
        cache, tokenizer = self.engine.cache, self.engine.tokenizer
        token_ids: list[int] = []
        for seq_id, table in cache.tables.items():
            owner = self._owners.get(seq_id)
            if owner is not None and owner.shows_words and block in table.blocks:
                start = table.blocks.index(block) * cache.block_size
                held = owner.sequence.token_ids[start : min(start + cache.block_size, table.num_tokens)]
                token_ids = max(token_ids, held, key=len)
        entry = cache.prefixes.entry(block)
        if entry is not None and not token_ids and self.shows_all_words:
            token_ids = list(entry.token_ids)
        before = None if entry is None else entry.before
        if not self.shows_all_words and not isinstance(before, int):
            before = None  # a salt identifies its tenant
        return BlockFacts(
            block=block,
            tokens=[str(i) if tokenizer is None else tokenizer.token_text(i) for i in token_ids],
            node=None if entry is None else entry.node,
            before="" if before is None else str(before),
            age=time.monotonic() - self._since[block] if block in self._since else None,
        )


def _counts(engine: Engine) -> CacheCounts:
    cache, swap = engine.cache, engine.scheduler.preemption.swap
    return CacheCounts(
        num_copies=cache.num_copies,
        num_evictions=cache.num_evictions,
        num_hit_tokens=cache.num_hit_tokens,
        num_looked_up_tokens=cache.num_looked_up_tokens,
        num_preemptions=engine.scheduler.preemption.count,
        num_swapped_out=swap.num_swapped_out,
        num_swapped_in=swap.num_swapped_in,
        host_blocks_used=swap.num_blocks - swap.num_free,
        **({} if engine.requests.disk is None else engine.requests.disk.figures()),
    )
