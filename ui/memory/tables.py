"""Block tables: the table of one sequence, or a list of several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rich.cells import cell_len
from textual import events
from textual.content import Content

from minillm.cache.runs import contiguous_runs
from minillm.service.messages import TableView
from minillm.ui.bars import hidden_keys
from minillm.ui.memory.line_view import BlockChosen, LineView, Parts
from minillm.ui.memory.pool import FROM_DISK, Memory
from minillm.ui.numbers import bar, count, plural, span

_MOST_SPANS = 4
HEADING = "  logical  physical   filled    ×"


class BlockTableView(LineView):
    """Shows the block table of the current answer, or with ``headers`` all block tables, a line per block.

    A bracket on the left joins blocks that are adjacent in the pool. With ``headers``, each table has a heading, and
    the line of a shared block lists the other sequences that share it. If the current answer has no table, the first
    lines then say how much of the answer is cached.
    """

    COMPONENT_CLASSES = {"run", "index", "block", "owned", "shared", "swapped", "header", "cursor"}  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"up": "move(-1)", "down": "move(1)", "left": "jump(-1)", "right": "jump(1)"}),
        *hidden_keys({"home": "move(-1000000000)", "end": "move(1000000000)", "t": "tokens"}),
    ]

    def __init__(self, memory: Memory, *, headers: bool = False) -> None:
        super().__init__(memory)
        self._headers = headers
        self.follows = not headers  # a single table grows at its end
        self._tables: list[TableView] = []
        self._lost: list[str] = []  # the first lines, if the current answer has no table
        self._starts: list[int] = [0]  # for each table, its first line; last, the number of all lines
        self._cursor = (-1, 0)  # seq_id of a table, and the line within this table
        self._shows_tokens = False

    def catch_up(self) -> None:
        self._tables = self.memory.tables if self._headers else self.memory.current_tables[:1]
        self._lost = self.memory.eviction_lines(self.scrollable_content_region.width) if self._headers else []
        lengths = (self._headers + len(table.blocks) for table in self._tables)
        self._starts = list(accumulate(lengths, initial=len(self._lost)))
        self.set_lines(self._starts[-1])

    def _at(self, line: int) -> tuple[TableView, int]:
        number = bisect_right(self._starts, line) - 1
        return self._tables[number], line - self._starts[number] - self._headers

    def on_resize(self) -> None:
        self.catch_up()
        super().on_resize()
        self.refresh()

    def action_move(self, lines: int) -> None:
        self._move_to(self._cursor_line() + lines)

    def action_jump(self, tables: int) -> None:
        """Go to the heading of the next (``tables`` 1) or previous (-1) table."""
        line = self._cursor_line()
        if self._tables and line < self._starts[-1]:
            number = bisect_right(self._starts, line) - 1
            if tables > 0 or line == self._starts[number]:
                number += tables
            self._move_to(self._starts[max(0, min(number, len(self._tables) - 1))])

    def _cursor_line(self) -> int:
        for number, table in enumerate(self._tables):
            if table.seq_id == self._cursor[0]:
                length = self._starts[number + 1] - self._starts[number]
                return self._starts[number] + max(0, min(self._cursor[1], length - 1))
        return self._starts[0]

    def _move_to(self, line: int) -> None:
        if not self._tables:
            return
        line = max(self._starts[0], min(line, self._starts[-1] - 1))
        table, index = self._at(line)
        self._cursor = (table.seq_id, index + self._headers)
        self.show_line(line if line > self._starts[0] else 0)
        self.refresh()
        if self._shows_tokens:
            self._ask()

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        if has_focus:
            self._move_to(self._cursor_line())
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        if self._starts[0] <= line < self._starts[-1]:
            self._move_to(line)

    def action_tokens(self) -> None:
        """Show or hide the tokens of the block at the cursor."""
        self._shows_tokens = not self._shows_tokens
        if self._shows_tokens:
            self._ask()
        else:
            self.post_message(BlockChosen(None))

    def _ask(self) -> None:
        line = self._cursor_line()
        if line >= self._starts[-1]:
            return
        table, index = self._at(line)
        if not table.blocks:
            return
        self.post_message(BlockChosen(table.blocks[max(0, index)], table if table.state == "swapped" else None))

    def line(self, row: int, width: int) -> Parts:
        if row < len(self._lost):
            return [(self._lost[row], "header")]
        table, index = self._at(row)
        parts = self._header(table, width) if index < 0 else self._block(table, index)
        if self.has_focus and row == self._cursor_line():
            rest = width - sum(cell_len(text) for text, _ in parts)
            parts = [*((text, f"{name} cursor") for text, name in parts), (" " * rest, " cursor")]
        return parts

    def _header(self, table: TableView, width: int) -> Parts:
        name = self.memory.table_name(table)
        blocks, runs = len(table.blocks), len(list(contiguous_runs(table.blocks)))
        sizes = (plural(table.num_tokens, "token"), plural(blocks, "block"), plural(runs, "run"))
        facts = " · ".join((table.state, *sizes))
        if len(name) + len(facts) + 3 > width:
            facts = f"{table.state} {count(table.num_tokens)} tok {count(blocks)} bl {plural(runs, 'run')}"
        return [(name, "header"), (f"   {facts}", "swapped" if table.state == "swapped" else "index")]

    def _block(self, table: TableView, index: int) -> Parts:
        pool, block = self.memory.pool, table.blocks[index]
        assert pool is not None
        size, filled = pool.block_size, pool.filled_slots(table, index)
        swapped = table.state == "swapped"
        holders = [] if swapped else pool.holders(block)
        fill = "swapped" if swapped else "shared" if len(holders) > 1 else "owned"
        # Write "index → block", which is clear without the heading.
        parts = [
            (f"{_bracket(table.blocks, index)} ", "run"),
            (f"{index:>{4 if self._headers else 5}} → ", "index"),
            (f"{block:<{6 if self._headers else 7}} ", "block"),
            (bar(filled / size, 4), fill),
        ]
        if not self._headers or filled < size:
            parts.append((f" {filled:>3}/{size:<3}", "index"))
        parts.append((" on the CPU" if swapped else f" ×{len(holders)}", fill))
        if not swapped and block in pool.from_disk:
            parts.append((FROM_DISK, "index"))
        if self._headers and len(holders) > 1:
            others = [other for other, _ in holders if other.seq_id != table.seq_id]
            parts.append((f" {self._listed(table, others)}", "index"))
        return parts

    def _listed(self, table: TableView, others: Sequence[TableView]) -> str:
        """Return the names of the tables ``others`` as a text. Tables of the same request as ``table`` are first.

        Of each request, only the first table is named, followed by the number of its other tables: ``turn 2 +3``.
        """
        by_owner: dict[str, list[TableView]] = {table.owner: []}
        for other in others:
            by_owner.setdefault(other.owner or f"sequence {other.seq_id}", []).append(other)
        return ", ".join(
            self.memory.table_name(tables[0]) + (f" +{len(tables) - 1}" if len(tables) > 1 else "")
            for tables in by_owner.values()
            if tables
        )

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if self._headers:
            if pool is None:
                return Content("no model is loaded")
            sequences, logical = plural(len(pool.tables), "sequence"), count(pool.figures.logical_blocks)
            return Content(f"{sequences} · {logical} logical in {plural(pool.used_blocks, 'block')}")
        if not self._tables:
            return Content(self.memory.eviction_text() or "the conversation holds no blocks")
        table, more = self._tables[0], len(self.memory.current_tables) - 1
        name = self.memory.table_name(table) + (f" (F6: {more} more)" if more else "")
        facts = f"{table.state} · {plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}"
        runs = plural(len(list(contiguous_runs(table.blocks))), "contiguous run")
        where = runs_line(table.blocks, width - len(runs) - 2)
        if "→" in where:
            runs += f": {where}"
        return Content.assemble((name, "bold $foreground"), f"\n{facts}\n{runs}")


def _bracket(blocks: Sequence[int], index: int) -> str:
    """Return the bracket of a block in a run of adjacent blocks: ``┌``, ``│`` or ``└``. A block alone has ``╶``."""
    above = index > 0 and blocks[index - 1] + 1 == blocks[index]
    below = index + 1 < len(blocks) and blocks[index] + 1 == blocks[index + 1]
    return ("╶", "┌", "└", "│")[2 * above + below]


def runs_line(blocks: Sequence[int], width: int) -> str:
    """Return the runs of adjacent blocks in one line of ``width`` cells: ``0–3 → 12–15, 4 → 90``.

    Each run is written as logical → physical block numbers. If not all runs fit, the line ends with the number of runs
    that are left out.
    """
    parts = [f"{span(start, length)} → {span(block, length)}" for start, block, length in contiguous_runs(blocks)]
    line = ""
    for number, part in enumerate(parts):
        rest = len(parts) - number - 1
        more = f", and {rest} more" if rest else ""
        longer = f"{line}, {part}" if line else part
        if len(longer) + len(more) > width:
            return f"{line}, and {rest + 1} more" if line else f"{rest + 1} runs"
        line = longer
    return line
