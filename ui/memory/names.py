"""What people call a sequence."""

from __future__ import annotations

from collections.abc import Callable

from minillm.service.messages import TableView
from minillm.text.safe import clean_line

Names = Callable[[str, int], str]
"""(the request that owns a sequence, the number of the completion) -> "turn 2", "turn 2 · 3", "system prompt"."""

_LONGEST = 60  # characters


def clean_names(names: Names) -> Names:
    """``names``, whatever they contain, as one line without anything that a terminal obeys."""
    return lambda owner, index: clean_line(names(owner, index), _LONGEST)


def table_name(table: TableView, names: Names) -> str:
    """The name of a table; one that is the engine's own goes by its number."""
    return names(table.owner, table.index) if table.owner else f"sequence {table.seq_id}"
