"""How often parts of the screen are drawn.

Where the model computes on the same cores, drawing takes their time from it: on two cores both threads of a matrix
product wait for the one whose core draws. So the pause after a drawing is as long as its share of a core allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from textual.timer import Timer
from textual.widget import Widget

_SHORTEST = 0.1  # seconds from one drawing to the next
_GATHER = 0.005  # seconds in which every widget has told the screen that it changed: one drawing then, not several


class Drawing:
    """A part of the screen that is drawn when there is news.

    Beside a model that computes on the same cores it is drawn no more often than takes ``share`` of one core, but once
    in ``longest`` seconds.
    """

    def __init__(self, widget: Widget, draw: Callable[[], Awaitable[None]], *, share: float, longest: float) -> None:
        self.beside_model = False  # see `pace`
        self._widget, self._draw = widget, draw
        self._share, self._longest = share, longest
        self._interval = _SHORTEST
        self._timer: Timer | None = None  # until the next drawing
        self._drawn_at = 0.0

    @property
    def interval(self) -> float:
        """Seconds from one drawing to the next."""
        return self._interval if self.beside_model else _SHORTEST

    def pace(self, beside_model: bool) -> None:
        """Note whether a model computes on the same cores. If not, a drawing that waits is made soon."""
        if beside_model == self.beside_model:
            return
        self.beside_model = beside_model
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
            self.soon()

    def soon(self) -> None:
        """There is news: draw, when the last time is long enough ago."""
        if self._timer is None:
            wait = self._drawn_at + self.interval - time.monotonic()
            self._timer = self._widget.set_timer(max(0.01, wait), self._run)

    async def _run(self) -> None:
        self._timer, self._drawn_at = None, time.monotonic()
        began = time.process_time()
        with self._widget.app.batch_update():
            await self._draw()
            await asyncio.sleep(_GATHER)
        self._widget.call_after_refresh(self._spent, began)

    def _spent(self, began: float) -> None:
        """The screen is drawn."""
        wanted = (time.process_time() - began) / self._share
        self._interval += (min(max(wanted, _SHORTEST), self._longest) - self._interval) / 2
