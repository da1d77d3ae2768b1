"""Text that changes often, drawn where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from textual.content import Content
from textual.css.styles import RulesMap
from textual.widget import Widget
from textual.widgets import Static


class Drawn(Widget):
    """Shows the content that ``make`` returns for a width and a height in cells. `update` draws only a change."""

    def __init__(self, make: Callable[[int, int], Content], **options: str) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._make = make
        self._shown = Content("")

    def update(self) -> None:
        """Show it anew, in the same room."""
        if not self._content().is_same(self._shown):
            self.refresh()

    def _content(self) -> Content:
        width, height = self.content_size
        return self._make(width, height) if width and height else Content("")

    def render(self) -> Content:
        self._shown = self._content()
        return self._shown


def update_in_place(widget: Static, content: Content, lines_ahead: int = 0) -> None:
    """Show ``content`` in a widget whose width its surroundings set, as ``1fr`` is.

    The screen is laid out anew only where the widget's height changes: a layout costs several times as much as a
    drawing. With ``lines_ahead`` a widget that needs a line takes so many more with it, which the next ones find there,
    until `settle`.
    """
    (width, room), rules = widget.content_size, cast(RulesMap, widget.styles)
    height = content.get_height(rules, width) if width else 0
    if not width or not lines_ahead:
        widget.update(content, layout=not width or widget.visual.get_height(rules, width) != height)
    elif height > room:
        widget.styles.min_height = height + lines_ahead
        widget.update(content, layout=True)
    else:
        widget.update(content, layout=height < room and not widget.styles.has_rule("min_height"))


def settle(widget: Widget) -> None:
    """The widget needs no lines ahead any more."""
    if widget.styles.has_rule("min_height"):
        widget.styles.min_height = None


def flow(items: list[Content], width: int, num_lines: int, gap: int = 2) -> Content:
    """Items side by side on at most ``num_lines`` lines; an item is not broken, and the rest is left out."""
    lines: list[Content] = []
    for item in items:
        if lines and lines[-1].cell_length + gap + item.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], " " * gap, item)
        elif len(lines) == num_lines:
            return Content.assemble(Content("\n").join(lines), " …" if lines[-1].cell_length + 2 <= width else "")
        else:
            lines.append(item)
    return Content("\n").join(lines)
