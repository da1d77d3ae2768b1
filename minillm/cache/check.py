"""Whether the books of the cache balance: for tests and long runs."""

from __future__ import annotations

from minillm.cache.block_manager import BlockManager


def check(manager: BlockManager) -> None:
    """Raise AssertionError unless the books balance."""
    held = [0] * manager.num_blocks
    for table in manager.tables.values():
        assert len(table.blocks) == -(-table.num_tokens // manager.block_size), f"{table} has the wrong length"
        assert len(set(table.blocks)) == len(table.blocks), f"{table} holds a block twice"
        for block in table.blocks:
            held[block] += 1
        if table.num_tokens < table.writable:
            tail = table.blocks[-1] if table.blocks else None
            assert tail is not None, f"{table} is writable without a block"
            assert manager.ref_counts[tail] == 1, f"{table} would write to a shared block"
    assert held == manager.ref_counts, "reference counts differ from what the tables hold"
    free = {block for start, length in manager._free.runs() for block in range(start, start + length)}
    assert len(free) == len(manager._free), "the free runs overlap or miscount"
    for block in range(manager.num_blocks):
        owned = manager.ref_counts[block] > 0 or block in manager._copy_sources
        states = owned + (block in free) + (block in manager._cached)
        assert states == 1, f"block {block} is in {states} of the states owned, free and cached"
        assert block not in manager._cached or block in manager.prefixes, f"block {block} is cached and cannot be found"
    for destination, source in manager._copies.items():
        assert manager.ref_counts[destination] >= 1, f"copy to block {destination}, which nobody holds"
        assert source in manager._copy_sources, f"copy from block {source}, which may be handed out"
        assert source not in manager._copies, f"copy from block {source}, which waits for its own copy"
