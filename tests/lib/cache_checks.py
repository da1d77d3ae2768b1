"""Consistency checks of the bookkeeping in `minillm.cache`."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from minillm.cache import BlockManager, SwapSpace


def check(manager: BlockManager) -> None:
    """Raise AssertionError unless the bookkeeping is consistent."""
    held = Counter(block for table in manager.tables.values() for block in table.blocks)
    owned = {block: count for block, count in enumerate(manager.ref_counts) if count}
    assert dict(held) == owned, "reference counts differ from what the tables hold"
    for table in manager.tables.values():
        assert len(table.blocks) == -(-table.num_tokens // manager.block_size), f"{table} has the wrong length"
        assert len(set(table.blocks)) == len(table.blocks), f"{table} holds a block twice"
        if table.num_tokens < table.writable:
            assert table.blocks, f"{table} is writable without a block"
            assert manager.ref_counts[table.blocks[-1]] == 1, f"{table} would write to a shared block"
    free = {block for start, length in manager._free.runs() for block in range(start, start + length)}
    assert len(free) == len(manager._free), "the free runs overlap or miscount"
    states = Counter(chain(owned.keys() | manager._copy_sources.keys(), free, manager._cached))
    assert len(states) == manager.num_blocks == states.total(), (
        f"not owned, free or cached, or several of these: {[b for b in range(manager.num_blocks) if states[b] != 1]}"
    )
    for block in manager._cached:
        assert block in manager.prefixes, f"block {block} is cached and cannot be found"
    for destination, source in manager._copies.items():
        assert manager.ref_counts[destination] >= 1, f"copy to block {destination}, which is unreferenced"
        assert source in manager._copy_sources, f"copy from block {source}, which may be reused"
        assert source not in manager._copies, f"copy from block {source}, which waits for its own copy"


def check_swap(swap: SwapSpace) -> None:
    """Raise AssertionError unless the bookkeeping of host memory is consistent."""
    held = Counter(host for saved in swap.saved.values() for host in saved.blocks)
    assert held == swap._ref_counts, "reference counts differ from what the saved tables hold"
    assert len(set(swap._freed)) == len(swap._freed), "a host block is free twice"
    assert sorted([*held, *swap._freed]) == list(range(swap._num_touched)), "a host block leaked"
    assert swap._num_touched <= swap.num_blocks, "there is no such host block"
