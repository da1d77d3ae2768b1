"""Why a prompt is found in the prefix cache as far as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.cache.block_manager import BlockManager
from minillm.cache.runs import common_length


@dataclass(frozen=True)
class PrefixReport:
    """Why a prompt was found in the cache as far as it was, and no further. Counts are tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int  # in full blocks: a request would not compute them again
    num_matching_tokens: int  # with the nearest cached prefix; its last block may match only in part
    expected: int | None  # the cached token at that place, if a cached prefix goes on there
    found: int | None  # the prompt's token at that place

    def __str__(self) -> str:
        found = f"{self.num_cached_tokens} of {self.num_prompt_tokens} tokens are cached"
        if self.found is None:
            return f"{found}; the whole prompt matches"
        if self.expected is None:
            return f"{found}; no cached prefix goes on after token {self.num_matching_tokens}"
        return (
            f"{found}; the nearest cached prefix matches {self.num_matching_tokens}, and then has token "
            f"{self.expected} where the prompt has {self.found}"
        )


def explain_miss(manager: BlockManager, token_ids: Sequence[int], salt: str | None = None) -> PrefixReport:
    """Compare a prompt with the nearest cached prefix."""
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
