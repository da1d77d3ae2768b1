"""The books of the KV cache: who holds which block. No tensor here."""

from minillm.cache.block_manager import BlockManager, BlockTable, OutOfBlocks
from minillm.cache.check import check
from minillm.cache.events import CacheEvent, Subscriber
from minillm.cache.explain import PrefixReport, explain_miss
from minillm.cache.stats import CacheStats, pool_stats
from minillm.cache.swap import HostMoves, SwapSpace

__all__ = [
    "BlockManager",
    "BlockTable",
    "CacheEvent",
    "CacheStats",
    "HostMoves",
    "OutOfBlocks",
    "PrefixReport",
    "Subscriber",
    "SwapSpace",
    "check",
    "explain_miss",
    "pool_stats",
]
