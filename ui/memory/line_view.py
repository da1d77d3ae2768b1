"""Base class of views with many lines. A line is computed only when it is visible, and is not a widget."""

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
"""A line: texts, each with its component class. " cursor" after the class adds the style of the cursor."""


@dataclass
class BlockChosen(Message):
    """The user has selected a block, or has removed the selection (``block=None``).

    A block without ``table`` is on the device. Otherwise the block is in host memory and belongs to ``table``.
    """

    block: int | None
    table: TableView | None = None


class FactsChanged(Message):
    """A key press has changed how a list is shown. The texts above and below the list must be redrawn."""


class LineView(SteadyScrollView, can_focus=True):
    """A scrolling view of lines. A subclass implements `line`.

    If ``follows`` is true, the view scrolls along with new lines at its end, unless the user has scrolled up.
    """

    follows = False

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self._at_end = True
        self._base: Style | None = None
        self._styles: dict[str, Style] = {}  # component class -> style
        self._drawn: dict[int, Parts] = {}  # line of the screen -> the texts last drawn in it

    def reset(self) -> None:
        """Reset the view. Called when the pool is replaced or removed."""
        self.set_lines(0)

    def catch_up(self) -> None:
        """Show the current state of the memory. A subclass implements this."""
        raise NotImplementedError

    def line(self, row: int, width: int) -> Parts:
        """Return the texts of line ``row``. Text beyond ``width`` cells is cut off. A subclass implements this."""
        raise NotImplementedError

    def headline(self, width: int, height: int) -> Content:
        """Return the text above the lines, for a size in cells."""
        return Content("")

    def set_lines(self, num_lines: int, dropped: int = 0) -> None:
        """Set the number of lines.

        ``dropped`` is the number of lines that were removed at the beginning. The remaining lines have moved up by this
        number.
        """
        size = Size(0, num_lines)
        if size != self.virtual_size:
            if self.has_scrollbar_for(num_lines):
                # Nothing moves, so only the scrollbar's length changes. No layout of the whole screen is needed.
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
        """Redraw the visible lines that have changed.

        To find these lines, compute all visible lines again. This costs far less than drawing them.
        """
        width, height = self.scrollable_content_region.width, self.size.height
        changed = [y for y in range(height) if self._line_at(y, width) != self._drawn.get(y)]
        if len(changed) > height // 2:
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def show_line(self, row: int, *, centred: bool = False) -> None:
        """Scroll a line into view: to the middle if ``centred``, else as little as possible."""
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
        """Return the style of a component class. Textual's own cache is several times slower."""
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
            self._base = self.rich_style  # a Textual property that walks up the widget tree at each call
        segments = [Segment(text, self._style(name)) for text, name in parts]
        return Strip(segments).adjust_cell_length(width, self._base)

    def _line_at(self, y: int, width: int) -> Parts:
        row = y + self.scroll_offset.y
        return self.line(row, width) if 0 <= row < self.virtual_size.height else []
