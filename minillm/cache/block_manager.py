"""The block manager: who holds which block of the KV cache. Its verbs are fork, append and free.

The KV cache is a pool of fixed-size blocks, a sequence's context is a table of block ids, and blocks are counted by
the tables that hold them (PagedAttention, Kwon et al. 2023), the way an operating system shares pages between
processes after ``fork``:

- **fork** shares: the child's table lists the parent's blocks, no bytes move.
- **append** makes room for more tokens. A last block that others hold too is not written: a fresh one takes its place
  and one copy (source, destination) is recorded. The last owner writes in place.
- **free** drops a table; a block that no table holds is free again.

Plain Python, no tensor: it says what the device has to copy (`take_copies`) and never launches anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.cache.events import CacheEvent, Subscriber
from minillm.cache.free_blocks import FreeBlocks
from minillm.cache.stats import CacheStats


class OutOfBlocks(Exception):
    """Too few free blocks for an append. Nothing has changed; the scheduler answers by preempting or queueing."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks in logical order, and how many of its tokens have a slot in them."""

    seq_id: int
    blocks: list[int]
    num_tokens: int = 0
    # Tokens that may be appended without a look at the reference counts: `append` keeps it up to date, `fork` lowers
    # it to `num_tokens`, so that the next append of either side finds the shared block.
    writable: int = 0


class BlockManager:
    """Reference-counted blocks ``0 … num_blocks - 1`` of ``block_size`` token slots each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.tables: dict[int, BlockTable] = {}
        self.subscribers: list[Subscriber] = []
        self.num_copies = 0  # copies on write, ever
        self._free = FreeBlocks(num_blocks)
        self._copies: dict[int, int] = {}  # destination -> source, recorded and not yet taken
        self._copy_sources: dict[int, int] = {}  # block -> how many recorded copies still read it

    # --- the three verbs ----------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int) -> BlockTable:
        """An empty table for a new sequence: a fork of nothing.

        Raises:
            ValueError: ``seq_id`` has a table already.
        """
        if seq_id in self.tables:
            raise ValueError(f"sequence {seq_id} has a block table already")
        table = BlockTable(seq_id, [])
        self.tables[seq_id] = table
        return table

    def fork(self, parent: BlockTable, child_id: int, num_tokens: int | None = None) -> BlockTable:
        """A table for ``child_id`` that shares the blocks of ``parent``'s first ``num_tokens`` tokens (all by default).

        Rolling a sequence back is a fork at an earlier token, and a free of the original.
        """
        if num_tokens is None:
            num_tokens = parent.num_tokens
        if not 0 <= num_tokens <= parent.num_tokens:
            raise ValueError(f"fork at token {num_tokens} of a sequence of {parent.num_tokens}")
        child = self.allocate(child_id)
        child.blocks = parent.blocks[: -(-num_tokens // self.block_size)]
        child.num_tokens = child.writable = num_tokens
        parent.writable = min(parent.writable, parent.num_tokens)
        for block in child.blocks:
            self.ref_counts[block] += 1
        if self.subscribers:
            self._emit(CacheEvent("fork", child_id, tuple(child.blocks), parent.seq_id))
        return child

    def append(self, table: BlockTable, count: int) -> None:
        """Room for ``count`` more tokens at the end of ``table``.

        Raises:
            OutOfBlocks: there is not enough room; nothing has changed.
        """
        end = table.num_tokens + count
        if end > table.writable:
            self._grow(table, end)
        table.num_tokens = end

    def free(self, table: BlockTable) -> None:
        """Drop ``table``. Its blocks lose one owner each; those without any are free."""
        if self.tables.pop(table.seq_id, None) is not table:
            raise AssertionError(f"the block table of sequence {table.seq_id} is freed twice")
        for block in reversed(table.blocks):  # the tail first: what is reused soonest is what others share least
            self._drop(block)
        if self.subscribers:
            self._emit(CacheEvent("free", table.seq_id, tuple(table.blocks)))
        table.blocks, table.num_tokens, table.writable = [], 0, 0

    # --- what the scheduler and the runner ask ------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that an append can take now."""
        return len(self._free)

    def blocks_needed(self, table: BlockTable, count: int) -> int:
        """Free blocks that ``append(table, count)`` would take, the copy of a shared last block included."""
        end = table.num_tokens + count
        if end <= table.writable:
            return 0
        needed = -(-end // self.block_size) - len(table.blocks)
        return needed + (count > 0 and self._tail_is_shared(table))

    def take_copies(self) -> list[tuple[int, int]]:
        """The (source, destination) copies recorded since the last call.

        They must reach the device before anything is written to the pool. Until they are taken, a source is not
        handed out again even where no table holds it any more.
        """
        copies = [(source, destination) for destination, source in self._copies.items()]
        self._copies.clear()
        sources, self._copy_sources = self._copy_sources, {}
        for source in sources:
            if not self.ref_counts[source]:
                self._free.put(source)
        return copies

    def slots(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """The physical slots of tokens ``start … stop - 1``."""
        size, blocks = self.block_size, table.blocks
        return [blocks[i // size] * size + i % size for i in range(start, stop)]

    def stats(self) -> CacheStats:
        """Token-true figures of this moment: see `CacheStats`."""
        return CacheStats.of(self)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _tail_is_shared(self, table: BlockTable) -> bool:
        return bool(table.num_tokens % self.block_size) and self.ref_counts[table.blocks[-1]] > 1

    def _grow(self, table: BlockTable, end: int) -> None:
        shared = self._tail_is_shared(table)
        fresh = -(-end // self.block_size) - len(table.blocks)
        if fresh + shared > len(self._free):
            raise OutOfBlocks(f"needs {fresh + shared} blocks, {len(self._free)} are free")
        if shared:
            self._copy_on_write(table)
        if fresh > 0:
            taken = self._free.take(fresh, table.blocks[-1] if table.blocks else None)
            for block in taken:
                self.ref_counts[block] = 1
            table.blocks += taken
            if self.subscribers:
                self._emit(CacheEvent("allocate", table.seq_id, tuple(taken)))
        table.writable = len(table.blocks) * self.block_size

    def _copy_on_write(self, table: BlockTable) -> None:
        source = table.blocks[-1]
        # Where the source itself still waits for its copy, its content is that of the first source.
        origin = self._copies.get(source, source)
        destination = self._free.take(1, table.blocks[-2] if len(table.blocks) > 1 else None)[0]
        self.ref_counts[source] -= 1
        self.ref_counts[destination] = 1
        table.blocks[-1] = destination
        self._copies[destination] = origin
        self._copy_sources[origin] = self._copy_sources.get(origin, 0) + 1
        self.num_copies += 1
        if self.subscribers:
            self._emit(CacheEvent("copy", table.seq_id, (source, destination)))

    def _drop(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        source = self._copies.pop(block, None)  # nobody will read the copy: forget it
        if source is not None:
            self._copy_sources[source] -= 1
            if not self._copy_sources[source]:
                del self._copy_sources[source]
                if not self.ref_counts[source]:
                    self._free.put(source)
        if block not in self._copy_sources:
            self._free.put(block)

    def _emit(self, event: CacheEvent) -> None:
        for subscriber in self.subscribers:
            subscriber(event)

    def check(self) -> None:
        """Raise AssertionError unless the books balance: for tests, long runs and ``minillm info --check``."""
        held = [0] * self.num_blocks
        for table in self.tables.values():
            assert len(table.blocks) == -(-table.num_tokens // self.block_size), f"{table} has the wrong length"
            assert len(set(table.blocks)) == len(table.blocks), f"{table} holds a block twice"
            for block in table.blocks:
                held[block] += 1
            if table.num_tokens < table.writable:
                tail = table.blocks[-1] if table.blocks else None
                assert tail is not None, f"{table} is writable without a block"
                assert self.ref_counts[tail] == 1, f"{table} would write to a shared block"
        assert held == self.ref_counts, "reference counts differ from what the tables hold"
        free = {block for start, length in self._free.runs() for block in range(start, start + length)}
        assert len(free) == len(self._free), "the free runs overlap or miscount"
        for block in range(self.num_blocks):
            owned = self.ref_counts[block] > 0 or block in self._copy_sources
            assert owned != (block in free), f"block {block} is both owned and free, or neither"
        for destination, source in self._copies.items():
            assert self.ref_counts[destination] == 1, f"copy to block {destination}, which has not one owner"
            assert source in self._copy_sources, f"copy from block {source}, which may be handed out"
            assert source not in self._copies, f"copy from block {source}, which waits for its own copy"
