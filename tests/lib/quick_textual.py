"""Leave out work of Textual that no test observes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import RenderableType

if TYPE_CHECKING:
    from textual._compositor import Compositor
    from textual.geometry import Region


@contextmanager
def quick() -> Iterator[None]:
    """Patch Textual while the context is open, if tests of the chat run."""
    if "textual.app" not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _parse_once(patch)
        _join_no_lines(patch)
        _wait_for_busy_widgets(patch)
        yield


def _parse_once(patch: pytest.MonkeyPatch) -> None:
    """Parse each style sheet once for all apps. The result depends only on its text and the theme's colors."""
    from textual.css.stylesheet import Stylesheet

    parse, parsed = Stylesheet._parse_rules, dict[Any, Any]()

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = tuple(self._variables.items()), args, tuple(kwargs.items())
        if key not in parsed:
            parsed[key] = parse(self, *args, **kwargs)
        return parsed[key]

    patch.setattr(Stylesheet, "_parse_rules", once)


def _join_no_lines(patch: pytest.MonkeyPatch) -> None:
    """Draw all changed widgets, and do not join them to lines. Without a terminal nobody reads those."""
    from textual._compositor import Compositor
    from textual.geometry import Region

    def full(self: Compositor, simplify: bool = False) -> RenderableType | None:
        if simplify:
            return whole(self, simplify)
        self._dirty_regions.clear()
        _draw(self, self.size.region)
        return None

    def partial(self: Compositor) -> None:
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        if regions:
            _draw(self, Region.from_union(regions).intersection(self.size.region))

    whole = Compositor.render_full_update
    patch.setattr(Compositor, "render_full_update", full)
    patch.setattr(Compositor, "render_partial_update", partial)


def _draw(compositor: Compositor, crop: Region) -> None:
    """Draw the widgets in ``crop`` that have a visible line in no cache."""
    for widget, (region, clip) in compositor.visible_widgets.items():
        if crop.overlaps(clip) and (visible := region.intersection(clip)):
            visible = visible.translate(-region.offset)
            cache, lines = widget._styles_cache, visible.line_range
            drawn = cache._cache.keys() - cache._dirty_lines if cache._width == region.width else set[int]()
            if not drawn.issuperset(lines):
                widget.render_lines(visible)


def _wait_for_busy_widgets(patch: pytest.MonkeyPatch) -> None:
    """Let a Pilot send a message to each widget that has others to handle. Textual sends one to each of 80 widgets."""
    from textual.pilot import Pilot, WaitForScreenTimeout

    def waits(ready: asyncio.Event) -> bool:
        return bool(ready._waiters and not ready.is_set())

    async def wait_for_screen(self: Pilot[Any], timeout: float = 30) -> bool:
        app, num_busy, handled = self.app, 0, asyncio.Event()
        if not app._screen_stacks[app._current_mode]:
            return False

        def count_down() -> None:
            nonlocal num_busy
            num_busy -= 1
            if num_busy == 0:
                handled.set()

        busy = [each for each in app.screen.walk_children() if not waits(each._message_queue.ready_event)]
        for pump in (app, app.screen, *busy):
            num_busy += pump.call_later(count_down)
        if num_busy:
            tasks = [asyncio.create_task(event.wait()) for event in (handled, app._exception_event)]
            done, pending = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            if not done:
                raise WaitForScreenTimeout("widgets do not handle their messages")
        return not num_busy

    patch.setattr(Pilot, "_wait_for_screen", wait_for_screen)
