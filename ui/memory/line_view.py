"""Many lines about the memory, each made when it is seen: no widget per line, no list of the lines out of sight."""

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip

from minillm.service.messages import TableView
from minillm.ui.memory.pool import Memory
from minillm.ui.textual_internals import SteadyScrollView

Parts = list[tuple[str, str]]
"""A line: texts, each with its component class. " cursor" behind the class adds the style of that one."""


@dataclass
class BlockChosen(Message):
    """The reader is at a block now, or at none. It is one of the host's if ``table`` holds it there."""

    block: int | None
    table: TableView | None = None


class FactsChanged(Message):
    """A key has changed the way that a list is shown: the lines of facts around it are out of date."""


class LineView(SteadyScrollView, can_focus=True):
    """Lines that a subclass draws in `line`. With ``follows``, the last one stays in view unless the reader has
    scrolled up.
    """

    follows = False

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self._at_end = True
        self._base: Style | None = None
        self._styles: dict[str, Style] = {}  # by component class
        self._drawn: dict[int, Parts] = {}  # each line of the screen

    def begin_anew(self) -> None:
        """There is another pool, or none."""
        self.set_lines(0)

    def catch_up(self) -> None:
        """Show the memory as it stands now."""
        raise NotImplementedError

    def line(self, row: int, width: int) -> Parts:
        """The texts of line ``row``; the part beyond ``width`` cells is cut."""
        raise NotImplementedError

    def headline(self, width: int, height: int) -> Content:
        """The facts above the lines, for a room of so many cells."""
        return Content("")

    def set_lines(self, num_lines: int, dropped: int = 0) -> None:
        """There are ``num_lines`` now, after the first ``dropped`` ones have gone."""
        size = Size(0, num_lines)
        if size != self.virtual_size:
            if self.has_scrollbar_for(num_lines):
                # Nothing moves: a layout of the whole screen would be for the scrollbar's length alone.
                self.set_reactive(LineView.virtual_size, size)
                if self.show_vertical_scrollbar:
                    self.vertical_scrollbar.window_virtual_size = num_lines
            else:
                self.virtual_size = size
        if (self.follows and self._at_end) or self.scroll_offset.y > self.max_scroll_y:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)
        elif dropped:
            self.scroll_to(y=max(0, self.scroll_offset.y - dropped), animate=False, force=True)
        self.refresh_changed()

    def refresh_changed(self) -> None:
        """Draw the lines in view that differ from the screen: making a line costs far less than drawing it."""
        width, height = self.scrollable_content_region.width, self.size.height
        changed = [y for y in range(height) if self._line_at(y, width) != self._drawn.get(y)]
        if len(changed) > height // 2:
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def show_line(self, row: int, *, centred: bool = False) -> None:
        """Bring a line into view, in the middle or just so."""
        top, height = self.scroll_offset.y, self.size.height
        if height and not top <= row < top + height:
            nearest = row if row < top else row - height + 1
            self.scroll_to(y=max(0, row - height // 2) if centred else nearest, animate=False, force=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._at_end = round(new_value) >= self.max_scroll_y

    def on_resize(self) -> None:
        if self.follows and self._at_end:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base = None
        self._styles.clear()

    def _style(self, name: str) -> Style:
        """That of a component class. Textual's own cache takes several times as long."""
        style = self._styles.get(name)
        if style is None:
            kind, _, cursor = name.partition(" ")
            style = self.get_component_rich_style(kind) if kind else Style()
            if cursor:
                style += self.get_component_rich_style(cursor, partial=True)
            self._styles[name] = style
        return style

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        parts = self._drawn[y] = self._line_at(y, width)
        if self._base is None:
            self._base = self.rich_style  # a property of Textual that walks the tree at each call
        segments = [Segment(text, self._style(name)) for text, name in parts]
        return Strip(segments).adjust_cell_length(width, self._base)

    def _line_at(self, y: int, width: int) -> Parts:
        row = y + self.scroll_offset.y
        return self.line(row, width) if 0 <= row < self.virtual_size.height else []
