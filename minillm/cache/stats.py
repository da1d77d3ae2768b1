"""Reports about the blocks: memory figures, and where a prompt differs from cached prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.block_manager import BlockManager
from minillm.cache.runs import common_length


@dataclass(frozen=True)
class CacheStats:
    """The statistics of the pool at one moment. A slot holds one token.

    Counts are in blocks unless the name says otherwise.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    used_blocks: int
    shared_blocks: int  # held by more than one table
    logical_blocks: int  # entries of all tables: the blocks needed without sharing
    used_slots: int  # slots of used blocks that hold a token
    num_sequences: int
    num_runs: int  # runs of consecutive block ids, summed over all tables; equals num_sequences at best
    num_copies: int  # copies on write since the start
    cached_blocks: int = 0  # free blocks that the prefix cache can still find
    num_evictions: int = 0  # cached blocks evicted since the start
    num_hit_tokens: int = 0  # prompt tokens found in the prefix cache, since the start
    num_looked_up_tokens: int = 0
    # Filled in by the engine; 0 for a block manager alone.
    num_preemptions: int = 0
    num_swapped_out: int = 0  # blocks copied to host memory since the start
    num_swapped_in: int = 0
    host_blocks_used: int = 0
    pinned_blocks: int = 0
    disk_limit: int = 0  # quota of the disk cache in bytes; 0: no disk cache, or it has turned itself off
    disk_bytes: int = 0  # bytes of all blocks on disk, including those of other models
    num_disk_saved: int = 0  # blocks written to disk, since the start
    num_disk_read: int = 0  # blocks read from disk, since the start
    disk_read_seconds: float = 0.0  # the time for reading these blocks
    peak_used_blocks: int = 0  # peak and mean are over the steps so far
    mean_used_blocks: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of all prompt tokens that were found in the prefix cache, 0 to 1."""
        return self.num_hit_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0

    @property
    def sharing_ratio(self) -> float:
        """Logical blocks (entries of all tables) per used block: 1 without sharing, 0 in an empty pool."""
        return self.logical_blocks / self.used_blocks if self.used_blocks else 0.0

    @property
    def usage(self) -> float:
        """Used fraction of the pool, 0 to 1."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0


def pool_stats(manager: BlockManager) -> CacheStats:
    """Return the pool's statistics at this moment."""
    size = manager.block_size
    filled: dict[int, int] = {}  # block -> slots with a token, in the table that fills it most
    logical = runs = 0
    for table in manager.tables.values():
        logical += len(table.blocks)
        previous = None
        for index, block in enumerate(table.blocks):
            runs += previous is None or block != previous + 1
            previous = block
            filled[block] = max(filled.get(block, 0), min(size, table.num_tokens - index * size))
    return CacheStats(
        num_blocks=manager.num_blocks,
        block_size=size,
        free_blocks=manager.num_free,
        used_blocks=manager.num_blocks - manager.num_free,
        shared_blocks=sum(count > 1 for count in manager.ref_counts),
        logical_blocks=logical,
        used_slots=sum(filled.values()),
        num_sequences=sum(bool(table.blocks) for table in manager.tables.values()),
        num_runs=runs,
        num_copies=manager.num_copies,
        cached_blocks=manager.num_cached,
        num_evictions=manager.num_evictions,
        num_hit_tokens=manager.num_hit_tokens,
        num_looked_up_tokens=manager.num_looked_up_tokens,
    )


@dataclass(frozen=True)
class PrefixReport:
    """The number of cached tokens of a prompt, and the first difference from the best matching cached prefix.

    Counts are in tokens.
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # in full blocks: a request does not compute them again
    num_matching_tokens: int  # prompt tokens before the first difference; the last block may match only partly
    expected: int | None  # the cached prefix's token at the first difference, if any
    found: int | None  # the prompt's token at the first difference, if any
    texts: dict[int, str] = field(default_factory=dict)  # token id -> text of these two tokens, with a tokenizer

    def __str__(self) -> str:
        found = f"{self.num_cached_tokens} of {self.num_prompt_tokens} tokens are cached"
        if self.found is None:
            return f"{found}; the whole prompt matches"
        if self.expected is None:
            return f"{found}; no cached prefix goes on after token {self.num_matching_tokens}"
        return (
            f"{found}; the nearest cached prefix matches {self.num_matching_tokens}, and then has "
            f"{self._name(self.expected)} where the prompt has {self._name(self.found)}"
        )

    def _name(self, token_id: int) -> str:
        return f"{self.texts[token_id]!r} (token {token_id})" if token_id in self.texts else f"token {token_id}"


def explain_miss(manager: BlockManager, token_ids: Sequence[int], salt: str | None = None) -> PrefixReport:
    """Compare a prompt with the cached prefix of the same ``salt`` that shares the most leading tokens with it."""
    size, count, prefixes = manager.block_size, len(token_ids), manager.prefixes
    blocks, nodes = prefixes.match(token_ids, salt, count)
    start = len(blocks) * size
    rest = tuple(token_ids[start : start + size])
    best, expected = 0, None
    for tokens in prefixes.after(nodes[-1] if nodes else salt):
        same = common_length(tokens, rest)
        if same > best or expected is None:
            best, expected = same, tokens[same] if same < len(tokens) else None
    matching = start + best
    return PrefixReport(
        num_prompt_tokens=count,
        num_cached_tokens=min(start, max(0, count - 1) // size * size),
        num_matching_tokens=matching,
        expected=expected if matching < count else None,
        found=token_ids[matching] if matching < count else None,
    )
