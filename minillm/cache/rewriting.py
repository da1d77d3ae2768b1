"""Change a part of a block table.

`fork_into` replaces a table's first blocks, for on-device beam search. `free_tail` frees a table's last blocks, for
rejected draft tokens.
"""

from minillm.cache.block_manager import BlockManager, BlockTable
from minillm.cache.events import CacheEvent
from minillm.cache.runs import common_length


def fork_into(manager: BlockManager, table: BlockTable, parent: BlockTable, num_tokens: int) -> None:
    """Replace the first blocks of ``table`` with the full blocks of ``parent``'s first ``num_tokens`` tokens.

    On-device beam search calls this when a beam continues another beam. ``table`` keeps its later blocks. A partly
    filled last block is not shared: the device has already copied its tokens into ``table``'s own block.

    Raises:
        ValueError: ``table`` or ``parent`` has fewer than ``num_tokens`` tokens.
    """
    if min(table.num_tokens, parent.num_tokens) < num_tokens:
        raise ValueError(f"fork of {num_tokens} tokens, of {parent.num_tokens}, into {table.num_tokens}")
    count = num_tokens // manager.block_size
    same = common_length(table.blocks[:count], parent.blocks[:count])
    gone, shared = table.blocks[same:count], parent.blocks[same:count]
    for block in shared:
        manager.ref_counts[block] += 1
    table.blocks[same:count], table.nodes = shared, parent.nodes[:count]
    manager.unref(gone)
    if manager.subscribers:
        manager.emit(CacheEvent("fork", table.seq_id, tuple(parent.blocks[:count]), parent.seq_id))


def free_tail(manager: BlockManager, table: BlockTable, num_tokens: int) -> None:
    """Free the slots of ``table`` after its first ``num_tokens`` tokens.

    Raises:
        ValueError: ``table`` has fewer than ``num_tokens`` tokens.
    """
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError(f"freed from token {num_tokens} of a sequence of {table.num_tokens}")
    kept = -(-num_tokens // manager.block_size)
    gone = table.blocks[kept:]
    del table.blocks[kept:], table.nodes[num_tokens // manager.block_size :]
    # Makes the next append check whether the last block is shared or in the prefix cache.
    table.num_tokens = table.writable = num_tokens
    manager.unref(gone)
    if gone and manager.subscribers:
        manager.emit(CacheEvent("cut", table.seq_id, tuple(gone)))
