"""Memory figures that count tokens, not promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """The pool at one moment. Blocks unless the name says slots; every slot is room for one token."""

    num_blocks: int
    block_size: int
    free_blocks: int
    used_blocks: int
    shared_blocks: int  # held by more than one table
    logical_blocks: int  # entries of all tables: what the same sequences would take without sharing
    used_slots: int  # slots of used blocks that hold a token
    num_sequences: int
    num_runs: int  # stretches of consecutive blocks over all tables; equals num_sequences at best
    num_copies: int  # copies on write since the start
    cached_blocks: int = 0  # of the free ones: those that the prefix cache can still find
    num_evictions: int = 0  # cached blocks given up since the start
    num_hit_tokens: int = 0  # tokens of prompts that the prefix cache had, since the start
    num_looked_up_tokens: int = 0
    # Filled in by the engine; 0 for a block manager alone.
    num_preemptions: int = 0
    num_swapped_out: int = 0  # blocks, since the start
    num_swapped_in: int = 0
    host_blocks_used: int = 0
    pinned_blocks: int = 0
    peak_used_blocks: int = 0  # over the steps so far
    mean_used_blocks: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that was found in the prefix cache, 0 to 1."""
        return self.num_hit_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical blocks: 1 without sharing, 0 in an empty pool."""
        return self.logical_blocks / self.used_blocks if self.used_blocks else 0.0

    @property
    def usage(self) -> float:
        """Used part of the pool, 0 to 1."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0

    @classmethod
    def of(
        cls, tables: Iterable[tuple[list[int], int]], ref_counts: Sequence[int], block_size: int, **figures: int
    ) -> CacheStats:
        """Count.

        Args:
            tables: (blocks, number of tokens) of every block table.
            ref_counts: of every block.
            figures: the other fields.
        """
        filled: dict[int, int] = {}  # block -> slots with a token, as its fullest owner sees it
        logical = runs = holders = 0
        for blocks, num_tokens in tables:
            holders += bool(blocks)
            logical += len(blocks)
            previous = None
            for index, block in enumerate(blocks):
                runs += previous is None or block != previous + 1
                previous = block
                filled[block] = max(filled.get(block, 0), min(block_size, num_tokens - index * block_size))
        return cls(
            num_blocks=len(ref_counts),
            block_size=block_size,
            shared_blocks=sum(count > 1 for count in ref_counts),
            logical_blocks=logical,
            used_slots=sum(filled.values()),
            num_sequences=holders,
            num_runs=runs,
            **figures,
        )
