"""The pool as the app sees it: what changed since the last look."""

from __future__ import annotations

from collections.abc import Mapping

from minillm.cache import BlockManager
from minillm.service.messages import CacheChanged, TableView


class CacheView:
    """Compares the pool with what was last shown."""

    def __init__(self, cache: BlockManager) -> None:
        self._cache = cache
        self._shown: dict[int, tuple[int, int]] = {}  # block -> (reference count, slots with a token), if used
        self._tables: list[TableView] | None = None

    def changes(self, owners: Mapping[int, tuple[str, str]]) -> CacheChanged | None:
        """What to send, or None where nothing has changed.

        Args:
            owners: sequence id -> (owner, state), for the block tables.
        """
        size, counts = self._cache.block_size, self._cache.ref_counts
        used: dict[int, tuple[int, int]] = {}
        tables = []
        for table in self._cache.tables.values():
            owner, state = owners.get(table.seq_id, ("", "running"))
            tables.append(TableView(table.seq_id, owner, state, table.num_tokens, list(table.blocks)))
            for index, block in enumerate(table.blocks):
                filled = min(size, table.num_tokens - index * size)
                if block not in used or used[block][1] < filled:
                    used[block] = (counts[block], filled)
        changed = [(block, *state) for block, state in used.items() if self._shown.get(block) != state]
        changed += [(block, 0, 0) for block in self._shown if block not in used]
        if not changed and tables == self._tables:
            return None
        self._shown, self._tables = used, tables
        return CacheChanged(
            changed=changed,
            tables=tables,
            free_blocks=self._cache.num_free,
            shared_blocks=sum(count > 1 for count, _ in used.values()),
            logical_blocks=sum(len(table.blocks) for table in tables),
            used_slots=sum(filled for _, filled in used.values()),
            num_copies=self._cache.num_copies,
        )
