"""Draw text that changes often, and limit how often parts of the screen are drawn.

If the model computes on the app's CPU cores, drawing slows the model down. On two cores, a matmul runs in two threads.
One of them shares its core with drawing, and the other waits for it. So each drawing is followed by a pause, which
limits drawing to a fraction of a core.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

from textual.content import Content
from textual.css.styles import RulesMap
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

_SHORTEST = 0.1  # minimum seconds between drawings
_GATHER = 0.005  # seconds to wait for drawing requests of other widgets that have changed, to draw them all at once


class TextCanvas(Widget):
    """Shows the content that ``make(width, height)`` returns for the widget's size in cells.

    `update` calls ``make`` again, and redraws only if the content has changed.
    """

    def __init__(self, make: Callable[[int, int], Content], **options: str) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._make = make
        self._shown = Content("")

    def update(self) -> None:
        """Redraw if the content has changed. The screen is not laid out again."""
        if not self._content().is_same(self._shown):
            self.refresh()

    def _content(self) -> Content:
        width, height = self.content_size
        return self._make(width, height) if width and height else Content("")

    def render(self) -> Content:
        self._shown = self._content()
        return self._shown


def update_in_place(widget: Static, content: Content, lines_ahead: int = 0) -> None:
    """Show ``content`` in a widget with a width set by its container, such as ``1fr``.

    The screen is laid out again only if the widget's height changes, because a layout takes several times as long as a
    drawing. With ``lines_ahead``, a widget that grows also reserves that number of blank lines, so that its height
    changes less often. `settle` frees these lines.
    """
    (width, height_before), rules = widget.content_size, cast(RulesMap, widget.styles)
    height = content.get_height(rules, width) if width else 0
    if not width or not lines_ahead:
        widget.update(content, layout=not width or widget.visual.get_height(rules, width) != height)
    elif height > height_before:
        widget.styles.min_height = height + lines_ahead
        widget.update(content, layout=True)
    else:
        widget.update(content, layout=height < height_before and not widget.styles.has_rule("min_height"))


def line_of(widget: Static, beginning: str) -> int:
    """Return the index of the line of ``widget`` in which ``beginning`` ends, a text with which its content begins."""
    return Content(beginning).get_height(cast(RulesMap, widget.styles), max(1, widget.content_size.width)) - 1


def settle(widget: Widget) -> None:
    """Free the blank lines that `update_in_place` reserved in ``widget``."""
    if widget.styles.has_rule("min_height"):
        widget.styles.min_height = None


def flow(items: list[Content], width: int, num_lines: int, gap: int = 2) -> Content:
    """Return the items in at most ``num_lines`` lines. Items are not broken. Items that do not fit are left out."""
    lines: list[Content] = []
    for item in items:
        if lines and lines[-1].cell_length + gap + item.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], " " * gap, item)
        elif len(lines) == num_lines:
            return Content.assemble(Content("\n").join(lines), " …" if lines[-1].cell_length + 2 <= width else "")
        else:
            lines.append(item)
    return Content("\n").join(lines)


class Drawing:
    """Draws a part of the screen when it changes, but not too often.

    If the model computes on the app's CPU cores, drawing takes at most ``share`` of one core, but happens at least once
    in ``longest`` seconds.
    """

    def __init__(self, widget: Widget, draw: Callable[[], Awaitable[None]], *, share: float, longest: float) -> None:
        self.beside_model = False  # whether the model computes on the app's CPU cores: see `pace`
        self._widget, self._draw = widget, draw
        self._share, self._longest = share, longest
        self._interval = _SHORTEST
        self._timer: Timer | None = None  # runs until the next drawing; None if no drawing is requested
        self._drawn_at = 0.0

    @property
    def interval(self) -> float:
        """Return the current minimum time between drawings, in seconds."""
        return self._interval if self.beside_model else _SHORTEST

    def pace(self, beside_model: bool) -> None:
        """Set whether the model computes on the app's CPU cores, which limits how often drawing happens.

        If a drawing is already requested, it is rescheduled.
        """
        if beside_model == self.beside_model:
            return
        self.beside_model = beside_model
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
            self.soon()

    def soon(self) -> None:
        """Request a drawing. It happens as soon as the interval since the last one has passed."""
        if self._timer is None:
            wait = self._drawn_at + self.interval - time.monotonic()
            self._timer = self._widget.set_timer(max(0.01, wait), self._run)

    def at_once(self) -> None:
        """Draw now, regardless of the interval. Only for rare changes."""
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._widget.set_timer(0.01, self._run)

    async def _run(self) -> None:
        self._timer, self._drawn_at = None, time.monotonic()
        began = time.process_time()
        with self._widget.app.batch_update():
            await self._draw()
            await asyncio.sleep(_GATHER)
        self._widget.call_after_refresh(self._spent, began)

    def _spent(self, began: float) -> None:
        wanted = (time.process_time() - began) / self._share
        self._interval += (min(max(wanted, _SHORTEST), self._longest) - self._interval) / 2
