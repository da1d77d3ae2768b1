"""A conversation's block table: logical block -> physical block, fill, owners, and the runs they form."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from minillm.service.messages import TableView
from ui.numbers import bar
from ui.pool import Pool, Run, contiguous_runs

HEADING = "logical  physical   filled    ×"


class BlockTableView(ScrollView, can_focus=True):
    """A row per logical block. The bracket on the left joins blocks that lie side by side in the pool."""

    COMPONENT_CLASSES = {f"block-table--{name}" for name in ("run", "index", "block", "owned", "shared")}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._pool: Pool | None = None
        self._table: TableView | None = None
        self._brackets: list[str] = []

    def show_table(self, pool: Pool | None, table: TableView | None) -> None:
        """Show a table of a pool; its end stays in view, for that is where it grows."""
        followed = self.scroll_offset.y >= self.max_scroll_y
        self._pool, self._table = pool, table
        blocks = table.blocks if table is not None else []
        self._brackets = [mark for run in contiguous_runs(blocks) for mark in _bracket(run)]
        self.virtual_size = Size(len(HEADING) + 2, len(blocks))
        if followed and not self.has_focus:
            self.scroll_end(animate=False, immediate=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        row = y + self.scroll_offset.y
        if self._pool is None or self._table is None or row >= len(self._table.blocks):
            return Strip.blank(width, base)
        block = self._table.blocks[row]
        size = self._pool.block_size
        filled = self._pool.filled_slots(self._table, row)
        count = self._pool.ref_counts[block] if block < self._pool.num_blocks else 0
        fill = self._style("shared" if count > 1 else "owned")
        # "index → block" so that it reads without the heading, too.
        segments = [
            Segment(f"{self._brackets[row]} ", self._style("run")),
            Segment(f"{row:>5} → ", self._style("index")),
            Segment(f"{block:<7} ", self._style("block")),
            Segment(bar(filled / size, 4), fill),
            Segment(f" {filled:>3}/{size:<3}", self._style("index")),
            Segment(f" ×{count}", fill),
        ]
        return Strip(segments).adjust_cell_length(width, base)

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"block-table--{name}")


def _bracket(run: Run) -> list[str]:
    """``╶`` for a block alone, ``┌ │ └`` along a run."""
    if run.length == 1:
        return ["╶"]
    return ["┌", *["│"] * (run.length - 2), "└"]


def runs_line(blocks: list[int], width: int) -> str:
    """All runs in one line: ``0–3 → 12–15, 4 → 90``; what does not fit is counted."""
    parts = [f"{_span(run.start, run.length)} → {_span(run.block, run.length)}" for run in contiguous_runs(blocks)]
    line = ""
    for number, part in enumerate(parts):
        rest = len(parts) - number - 1
        more = f", and {rest} more" if rest else ""
        longer = f"{line}, {part}" if line else part
        if len(longer) + len(more) > width:
            return f"{line}, and {rest + 1} more" if line else f"{rest + 1} runs"
        line = longer
    return line


def _span(start: int, length: int) -> str:
    return str(start) if length == 1 else f"{start}–{start + length - 1}"
