"""The data of the memory's views: the pool, the names of its sequences, and the block that the reader is at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minillm.service.messages import BlockFacts, TableView
from minillm.text.safe import clean_line
from minillm.ui.memory.pool import Pool

Names = Callable[[str, int], str]
"""(the request that owns a sequence, the number of the completion) -> "turn 2", "turn 2 · 3", "system prompt"."""

_LONGEST = 60  # characters of a name


@dataclass
class Memory:
    """``current``: the request of the last answer, whose tables come first."""

    pool: Pool | None = None
    names: Names = lambda owner, index: f"{owner} · {index + 1}"
    current: str | None = None
    block: int | None = None
    on_host: TableView | None = None  # the table that holds ``block`` on the host; None: it is the device's
    facts: BlockFacts | None = None  # the engine's latest answer

    @property
    def current_tables(self) -> list[TableView]:
        return self.pool.tables_of(self.current) if self.pool is not None and self.current is not None else []

    @property
    def tables(self) -> list[TableView]:
        """All tables, those of the current request first."""
        current = self.current_tables
        others = self.pool.tables.values() if self.pool is not None else ()
        return [*current, *(table for table in others if self.current is None or table.owner != self.current)]

    def name(self, owner: str, index: int) -> str:
        """The name of a sequence for people, in one line without anything that a terminal obeys."""
        return clean_line(self.names(owner, index), _LONGEST)

    def table_name(self, table: TableView) -> str:
        """The name of a table; one that is the engine's own goes by its number."""
        return self.name(table.owner, table.index) if table.owner else f"sequence {table.seq_id}"
