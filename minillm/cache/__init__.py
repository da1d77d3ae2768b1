"""Bookkeeping of the KV cache: which sequence's block table holds which block. No tensors here."""

from minillm.cache.block_manager import BlockManager, BlockTable, OutOfBlocks
from minillm.cache.events import CacheEvent
from minillm.cache.rewriting import fork_into, free_tail
from minillm.cache.stats import CacheStats, PrefixReport, explain_miss, pool_stats
from minillm.cache.swap import HostMoves, SwapSpace

__all__ = [
    "BlockManager",
    "BlockTable",
    "CacheEvent",
    "CacheStats",
    "HostMoves",
    "OutOfBlocks",
    "PrefixReport",
    "SwapSpace",
    "explain_miss",
    "fork_into",
    "free_tail",
    "pool_stats",
]
