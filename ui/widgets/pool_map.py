"""The pool of blocks, a cell each: thousands of them, drawn a line at a time, redrawn only where they changed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ui.pool import BlockState, Pool

_LEVELS = "▁▂▃▄▅▆▇"
_CLASSES = {BlockState.FREE: "free", BlockState.OWNED: "owned", BlockState.SHARED: "shared"}
_GROUP = 8  # blocks between two gaps


class PoolMap(ScrollView, can_focus=True):
    """A row is the number of its first block, then its cells.

    A free block is a dot; a full one its letter on its colour; a partly filled one a bar that rises in its colour.
    """

    COMPONENT_CLASSES = {f"pool-map--{name}" for name in (*_CLASSES.values(), "label")}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._pool: Pool | None = None
        self._per_row = _GROUP
        self._styles: dict[str, Style] = {}

    # --- what it is told ----------------------------------------------------------------------------------------------

    def show_pool(self, pool: Pool | None) -> None:
        """Another pool, or none."""
        self._pool = pool
        self._lay_out()
        self.scroll_home(animate=False)
        self.refresh()

    def blocks_changed(self, blocks: Iterable[int]) -> None:
        """Draw the rows of these blocks again, and bring the last one in use into view."""
        if self._pool is None or not self._per_row:
            return
        used = -1
        rows = set()
        for block in blocks:
            rows.add(block // self._per_row)
            if self._pool.ref_counts[block]:
                used = block
        if len(rows) > self.size.height:
            self.refresh()
        else:
            top, width = self.scroll_offset.y, self.size.width
            for row in rows:
                if 0 <= row - top < self.size.height:
                    self.refresh(Region(0, row - top, width, 1))
        # Whoever has moved into the map looks at it themselves.
        if used >= 0 and not self.has_focus:
            self._show_row(used // self._per_row)

    def _show_row(self, row: int) -> None:
        top, height = self.scroll_offset.y, self.size.height
        if not top <= row < top + height:
            self.scroll_to(y=max(0, row - height // 2), animate=False)

    # --- drawing ------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._lay_out()
        self.refresh()
        if self._pool is not None:
            used = [block for table in self._pool.tables for block in table.blocks]
            if used:
                self._show_row(used[-1] // self._per_row)

    def _lay_out(self) -> None:
        if self._pool is None:
            self.virtual_size = Size(0, 0)
            return
        room = self.scrollable_content_region.width - self._label_width
        groups = max(1, (room + 1) // (_GROUP + 1))
        # A power of two of groups: then the row's first block is a round number.
        self._per_row = _GROUP * (1 << (groups.bit_length() - 1))
        rows = -(-self._pool.num_blocks // self._per_row)
        self.virtual_size = Size(self._label_width + self._per_row + self._per_row // _GROUP - 1, rows)

    @property
    def _label_width(self) -> int:
        return len(str(self._pool.num_blocks - 1)) + 2 if self._pool is not None else 0

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()

    def _style(self, name: str) -> Style:
        if name not in self._styles:
            self._styles[name] = self.get_component_rich_style(f"pool-map--{name}")
        return self._styles[name]

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        row = y + self.scroll_offset.y
        base = self.rich_style
        if self._pool is None or row * self._per_row >= self._pool.num_blocks:
            return Strip.blank(width, base)
        first = row * self._per_row
        segments = [Segment(f"{first:>{self._label_width - 2}}  ", self._style("label"))]
        for block in range(first, min(first + self._per_row, self._pool.num_blocks)):
            if block > first and block % _GROUP == 0:
                segments.append(Segment(" ", base))
            segments.append(self._cell(block))
        return Strip(segments).simplify().adjust_cell_length(width, base)

    def _cell(self, block: int) -> Segment:
        assert self._pool is not None
        state, filled, size = self._pool.state(block), self._pool.filled[block], self._pool.block_size
        style = self._style(_CLASSES[state])
        if state is BlockState.FREE:
            return Segment(state.value, style)
        if filled >= size:
            return Segment(state.value, style)
        level = _LEVELS[min(len(_LEVELS) - 1, filled * (len(_LEVELS) + 1) // size)]
        return Segment(level, Style(color=style.bgcolor, bgcolor=self._style("free").bgcolor))
