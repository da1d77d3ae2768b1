"""The paged KV cache's book-keeping: plain Python, no torch."""

from minillm.cache.block_manager import BlockManager, BlockTable, OutOfBlocks
from minillm.cache.events import CacheEvent
from minillm.cache.stats import CacheStats

__all__ = ["BlockManager", "BlockTable", "CacheEvent", "CacheStats", "OutOfBlocks"]
