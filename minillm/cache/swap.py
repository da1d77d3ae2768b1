"""Host memory for the blocks of sequences that were swapped out.

All sequences of a request are swapped out together. A block is saved once, even if several of their tables hold it, and
these tables share it again after swap-in. This is bookkeeping only; the runner moves the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.block_manager import BlockManager, BlockTable
from minillm.cache.events import CacheEvent
from minillm.cache.runs import common_length


@dataclass(slots=True)
class HostMoves:
    """Blocks to move between device and host memory before a step computes: all of ``out``, then all of ``back``."""

    out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    back: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block), before copies on write


@dataclass(frozen=True)
class SavedTable:
    """The block table of a swapped-out sequence."""

    seq_id: int
    blocks: list[int]  # ids of host blocks
    num_tokens: int
    salt: str | None


class SwapSpace:
    """Bookkeeping of the host blocks (blocks in host memory) ``0 … num_blocks - 1``, with reference counts."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.saved: dict[int, SavedTable] = {}
        self.num_swapped_out = self.num_swapped_in = 0  # blocks, since the start
        self._ref_counts: dict[int, int] = {}  # of the blocks in use
        # A small model's host memory has millions of blocks, and few are ever used.
        self._freed: list[int] = []
        self._num_touched = 0  # blocks that have been in use: the first ones

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._ref_counts)

    def swap_out(self, cache: BlockManager, tables: Sequence[tuple[BlockTable, int]]) -> list[tuple[int, int]] | None:
        """Assign host blocks to the first tokens of each table, and free the tables.

        ``tables`` has (table, number of first tokens to save) pairs.

        Within a step, every `swap_out` comes before every `swap_in`. So `swap_in` may free host blocks at once.

        Returns:
            (device block, host block) pairs to copy before anything else is written to the pool. None if host memory is
            full; nothing has changed then.
        """
        size = cache.block_size
        kept = [(table, tokens, table.blocks[: -(-tokens // size)]) for table, tokens in tables]
        distinct = dict.fromkeys(block for _, _, blocks in kept for block in blocks)
        if len(distinct) > self.num_free:
            return None
        homes = {block: self._take() for block in distinct}
        pairs = [(cache.content_of(block), home) for block, home in homes.items()]
        for table, tokens, blocks in kept:
            hosts = [homes[block] for block in blocks]
            for host in hosts:
                self._ref_counts[host] += 1
            self.saved[table.seq_id] = SavedTable(table.seq_id, hosts, tokens, table.salt)
            cache.emit(CacheEvent("swap_out", table.seq_id, tuple(blocks)))
            cache.free(table)
        self.num_swapped_out += len(pairs)
        return pairs

    def blocks_needed(self, seq_ids: Sequence[int]) -> int:
        """Return an upper bound on the number of device blocks needed to swap in these sequences."""
        distinct = {host for seq_id in seq_ids for host in self.saved[seq_id].blocks}
        return len(distinct) + len(seq_ids)  # each sequence may also copy a shared last block on write

    def swap_in(
        self, cache: BlockManager, seq_ids: Sequence[int]
    ) -> tuple[dict[int, BlockTable], list[tuple[int, int]]]:
        """Restore the tables of swapped-out sequences. The caller ensures that `blocks_needed` blocks are free.

        Returns:
            The tables by sequence id, and (host block, device block) pairs to copy. Copy them before the step's
            copy-on-write copies, which may read the restored blocks.
        """
        size = cache.block_size
        restored: dict[int, tuple[SavedTable, BlockTable]] = {}
        # Longest first: every other table can then fork from one that is at least as long.
        for saved in sorted((self.saved[seq_id] for seq_id in seq_ids), key=lambda saved: -saved.num_tokens):
            parent, shared = None, 0
            for other, table in restored.values():
                common = common_length(saved.blocks, other.blocks)
                tokens = min(common * size, saved.num_tokens, other.num_tokens)
                if tokens > shared:
                    parent, shared = table, tokens
            if parent is None:
                table = cache.allocate(saved.seq_id, salt=saved.salt)
            else:
                table = cache.fork(parent, saved.seq_id, shared)
            cache.append(table, saved.num_tokens - shared)
            restored[saved.seq_id] = saved, table
        loads: dict[int, int] = {}
        for saved, table in restored.values():
            loads.update(zip(table.blocks, saved.blocks, strict=True))
            cache.emit(CacheEvent("swap_in", saved.seq_id, tuple(table.blocks)))
        for seq_id in seq_ids:
            self.discard(seq_id)
        self.num_swapped_in += len(loads)
        return {seq_id: table for seq_id, (_, table) in restored.items()}, [(h, d) for d, h in loads.items()]

    def fork_into(self, seq_id: int, parent_id: int, num_blocks: int) -> None:
        """Let a saved sequence share the first ``num_blocks`` host blocks of another saved sequence, ``parent_id``.

        This is `cache.rewriting.fork_into` for sequences in host memory.
        """
        blocks, shared = self.saved[seq_id].blocks, self.saved[parent_id].blocks[:num_blocks]
        for host in shared:
            self._ref_counts[host] += 1
        gone, blocks[:num_blocks] = blocks[:num_blocks], shared
        self._release(gone)

    def discard(self, seq_id: int) -> None:
        """Forget a saved sequence, if there is one with this id."""
        saved = self.saved.pop(seq_id, None)
        self._release([] if saved is None else saved.blocks)

    def _take(self) -> int:
        """Take a free host block, with no reference yet. The caller ensures that there is one."""
        if self._freed:
            host = self._freed.pop()
        else:
            host, self._num_touched = self._num_touched, self._num_touched + 1
        self._ref_counts[host] = 0
        return host

    def _release(self, hosts: Sequence[int]) -> None:
        """Drop one reference to each host block. Free the blocks that no saved table references any more."""
        for host in hosts:
            self._ref_counts[host] -= 1
            if not self._ref_counts[host]:
                del self._ref_counts[host]
                self._freed.append(host)
