"""Bookkeeping of the KV cache's blocks, with three operations: fork, append and free.

A sequence's context is a table of block ids, and each block counts the tables that hold it (PagedAttention, Kwon et al.
2023), the way an operating system shares pages between processes after ``fork``:

- **fork** shares: the child's table lists the parent's blocks. No data is copied.
- **append** adds token slots. If other tables hold the last block, a fresh block replaces it and one copy (source,
  destination) is recorded. The last owner writes in place.
- **free** drops a table, or its last blocks. An unreferenced block becomes free. If it is full and its tokens are
  known, it stays cached instead: the next prompt with the same beginning finds it (`prefix_cache.py`), until its memory
  is needed. Eviction takes the least recently used block first, and the last blocks of a table before its first ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.events import CacheEvent, Subscriber
from minillm.cache.free_blocks import FreeBlocks
from minillm.cache.prefix_cache import CachedPrefix, Node, PrefixCache


class OutOfBlocks(Exception):
    """Raised if an append finds too few free blocks. Nothing has changed; the scheduler preempts a running request."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks in logical order, and the number of tokens that have a slot in these blocks."""

    seq_id: int
    blocks: list[int]
    num_tokens: int = 0
    # The table can grow to this many tokens without a new block and without checking reference counts. `append` updates
    # it. `fork` lowers it to `num_tokens`, so the next append to either table checks for a shared block.
    writable: int = 0
    salt: str | None = None  # only tables of the same salt share cached blocks
    nodes: list[Node] = field(default_factory=list)  # prefix cache nodes of the committed full blocks

    def append_in_place(self) -> bool:
        """Append one token if this takes neither a new block nor a copy, and return True. Otherwise change nothing, and
        return False: the caller needs `BlockManager.append`.
        """
        if self.num_tokens < self.writable:
            self.num_tokens += 1
            return True
        return False


class BlockManager:
    """Reference-counted blocks ``0 … num_blocks - 1`` of ``block_size`` token slots each."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = [0] * num_blocks
        self.tables: dict[int, BlockTable] = {}
        self.subscribers: list[Subscriber] = []
        self.num_copies = 0  # copies on write since the start
        self.num_evictions = 0  # cached blocks evicted since the start
        self.num_hit_tokens = 0  # prompt tokens found in the cache since the start
        self.num_looked_up_tokens = 0
        self.prefix_caching = prefix_caching
        self.prefixes = PrefixCache(block_size)
        self._cached: dict[int, None] = {}  # cached blocks that no table holds, the least recently used first
        self._free = FreeBlocks(num_blocks)
        self._copies: dict[int, int] = {}  # destination -> source, recorded but not yet taken
        self._copy_sources: dict[int, int] = {}  # block -> number of recorded copies that still read it

    def allocate(
        self, seq_id: int, token_ids: Sequence[int] = (), salt: str | None = None, prefix: CachedPrefix | None = None
    ) -> BlockTable:
        """Make a table for a new sequence. It begins with the cached blocks of ``token_ids``.

        Args:
            prefix: the result of `find_cached` for ``token_ids``, if the cache has not changed since. Saves the lookup.

        Raises:
            ValueError: ``seq_id`` already has a table.
        """
        if seq_id in self.tables:
            raise ValueError(f"sequence {seq_id} has a block table already")
        table = BlockTable(seq_id, [], salt=salt)
        if self.prefix_caching and token_ids:
            found = prefix or self.find_cached(token_ids, salt)
            table.blocks, table.nodes = list(found.blocks), list(found.nodes)
            counts = self.ref_counts
            for block in table.blocks:
                if not counts[block]:
                    self._cached.pop(block, None)
                counts[block] += 1
            table.num_tokens = table.writable = len(table.blocks) * self.block_size
            self.count_hit(table.num_tokens, len(token_ids))
            if table.blocks and self.subscribers:
                self.emit(CacheEvent("hit", seq_id, tuple(table.blocks)))
        self.tables[seq_id] = table
        return table

    def count_hit(self, num_tokens: int, num_looked_up: int) -> None:
        """Update the hit rate after a lookup: ``num_tokens`` of a prompt's ``num_looked_up`` tokens were cached."""
        self.num_hit_tokens += num_tokens
        self.num_looked_up_tokens += num_looked_up

    def fork(self, parent: BlockTable, child_id: int, num_tokens: int | None = None) -> BlockTable:
        """Make a table that shares the blocks of ``parent``'s first ``num_tokens`` tokens (all by default).

        To roll a sequence back, fork it at an earlier token and free the original.

        Raises:
            ValueError: ``num_tokens`` is negative, or more than the parent has.
        """
        num_tokens = parent.num_tokens if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= parent.num_tokens:
            raise ValueError(f"fork at token {num_tokens} of a sequence of {parent.num_tokens}")
        child = self.allocate(child_id)
        child.blocks = parent.blocks[: -(-num_tokens // self.block_size)]
        child.num_tokens = child.writable = num_tokens
        child.salt = parent.salt
        child.nodes = parent.nodes[: num_tokens // self.block_size]
        parent.writable = min(parent.writable, parent.num_tokens)
        for block in child.blocks:
            self.ref_counts[block] += 1
        if self.subscribers:
            self.emit(CacheEvent("fork", child_id, tuple(child.blocks), parent.seq_id))
        return child

    def append(self, table: BlockTable, count: int) -> None:
        """Add slots for ``count`` more tokens at the end of ``table``.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
        """
        end = table.num_tokens + count
        if end > table.writable:
            self._grow(table, end)
        table.num_tokens = end

    def free(self, table: BlockTable) -> None:
        """Drop ``table``, and free its blocks, except blocks that other tables hold."""
        if self.tables.pop(table.seq_id, None) is not table:
            raise AssertionError(f"the block table of sequence {table.seq_id} is freed twice")
        self.unref(table.blocks)
        if self.subscribers:
            self.emit(CacheEvent("free", table.seq_id, tuple(table.blocks)))
        table.blocks, table.num_tokens, table.writable, table.nodes = [], 0, 0, []

    def unref(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, from last to first.

        The cache evicts blocks in the order of their release. So a sequence's later blocks, which fewer prompts share,
        go first.
        """
        counts = self.ref_counts
        for block in reversed(blocks):
            counts[block] -= 1
            if not counts[block]:
                self._drop(block)

    # --- the prefix cache ---------------------------------------------------------------------------------------------

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Add every block that is filled by ``table``'s first ``num_computed`` tokens to the prefix cache."""
        size, nodes = self.block_size, table.nodes
        if not self.prefix_caching:
            return
        for index in range(len(nodes), num_computed // size):
            before = nodes[-1] if nodes else table.salt
            nodes.append(self.prefixes.add(table.blocks[index], before, token_ids[index * size : (index + 1) * size]))

    def is_cached(self, block: int) -> bool:
        """Return whether no table holds the block, but the prefix cache can still find it."""
        return block in self._cached

    def find_cached(self, token_ids: Sequence[int], salt: str | None = None) -> CachedPrefix:
        """Return the cached blocks that `allocate` would use for a prompt. Reference counts do not change."""
        if not self.prefix_caching:
            return CachedPrefix([], [], 0, 0)
        blocks, nodes = self.prefixes.match(token_ids, salt, len(token_ids) - 1)
        held = sum(self.ref_counts[block] > 0 for block in blocks)
        return CachedPrefix(blocks, nodes, len(blocks) * self.block_size, held)

    def distrust(self, table: BlockTable) -> None:
        """Remove a table's blocks from the prefix cache. Call this if their K and V are wrong, for example NaN."""
        for block in table.blocks:
            if block in self.prefixes:
                self.prefixes.remove(block)

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache, and free the cached blocks that no table holds."""
        while self._cached:
            self._evict()
        for table in self.tables.values():
            self.distrust(table)

    @property
    def num_cached(self) -> int:
        """Number of blocks that no table holds, but that the prefix cache can still find."""
        return len(self._cached)

    # --- for the scheduler and the runner -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks that an append can take now: free blocks, and cached blocks that no table holds."""
        return len(self._free) + len(self._cached)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) copies recorded since the last call.

        The caller must run the copies on the device before anything is written to the pool. Until this call, a source
        block is not reused, even if no table holds it any more.
        """
        copies = [(source, destination) for destination, source in self._copies.items()]
        sources, self._copies, self._copy_sources = self._copy_sources, {}, {}
        for source in sources:
            if not self.ref_counts[source]:
                self._release(source)
        return copies

    def content_of(self, block: int) -> int:
        """Return the block that holds ``block``'s content now: the source while a copy to ``block`` is pending."""
        return self._copies.get(block, block)

    def _grow(self, table: BlockTable, end: int) -> None:
        """Extend ``table`` to hold ``end`` tokens. A partly filled last block that is shared is replaced by a copy."""
        partly_filled = table.num_tokens % self.block_size > 0
        shared = partly_filled and self.ref_counts[table.blocks[-1]] > 1
        fresh = -(-end // self.block_size) - len(table.blocks)
        if fresh + shared > self.num_free:
            raise OutOfBlocks(f"needs {fresh + shared} blocks, {self.num_free} are free")
        if shared:
            self._copy_on_write(table)
        elif partly_filled and table.blocks[-1] in self.prefixes:
            self.prefixes.remove(table.blocks[-1])  # the only owner was forked at an earlier token, and will write here
        if fresh > 0:
            taken = self._take(fresh, table.blocks[-1] if table.blocks else None)
            for block in taken:
                self.ref_counts[block] = 1
            table.blocks += taken
            if self.subscribers:
                self.emit(CacheEvent("allocate", table.seq_id, tuple(taken)))
        table.writable = len(table.blocks) * self.block_size

    def _take(self, count: int, after: int | None) -> list[int]:
        """Take ``count`` free blocks, evicting cached blocks if too few are free. ``after``: see `FreeBlocks.take`."""
        while len(self._free) < count:
            self._evict()
        return self._free.take(count, after)

    def _evict(self) -> None:
        """Free the least recently used cached block."""
        block = next(iter(self._cached))
        del self._cached[block]
        self.prefixes.remove(block)
        self._free.put(block)
        self.num_evictions += 1
        if self.subscribers:
            self.emit(CacheEvent("evict", -1, (block,)))

    def _copy_on_write(self, table: BlockTable) -> None:
        source = table.blocks[-1]
        origin = self.content_of(source)
        destination = self._take(1, table.blocks[-2] if len(table.blocks) > 1 else None)[0]
        self.ref_counts[source] -= 1
        self.ref_counts[destination] = 1
        table.blocks[-1] = destination
        self._copies[destination] = origin
        self._copy_sources[origin] = self._copy_sources.get(origin, 0) + 1
        self.num_copies += 1
        if self.subscribers:
            self.emit(CacheEvent("copy", table.seq_id, (source, destination)))

    def _drop(self, block: int) -> None:
        """Keep or free a block that no table holds any more. Cancel a pending copy into it."""
        source = self._copies.pop(block, None)  # the copy has no reader any more
        if source is not None:
            self._copy_sources[source] -= 1
            if not self._copy_sources[source]:
                del self._copy_sources[source]
                if not self.ref_counts[source]:
                    self._release(source)
        if block not in self._copy_sources:
            self._release(block)

    def _release(self, block: int) -> None:
        """Keep a block that no table or pending copy uses, if the prefix cache lists it. Otherwise free it."""
        if block in self.prefixes:
            self._cached[block] = None
        else:
            self._free.put(block)

    def emit(self, event: CacheEvent) -> None:
        for subscriber in self.subscribers:
            subscriber(event)
