"""A scrolling list of any length. It mounts widgets only for the items near the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.reactive import var
from textual.widget import Widget

from minillm.ui.chat import window
from minillm.ui.textual_internals import Growing, HoldsPosition

Item = TypeVar("Item", bound=Hashable)


class Blank(Widget):
    """Blank space in place of the items that are not mounted."""

    BLANK = True  # see `TurnView`

    def __init__(self) -> None:
        super().__init__()
        self.styles.height = 0


class LongList(HoldsPosition, Growing, VerticalScroll, Generic[Item]):
    """A list of items, each with a view (a widget) while it is mounted. Subclasses create the views.

    The mounted items are a run of consecutive items near the visible items; `minillm.ui.chat.window` chooses them.
    Blank space above and below the mounted items has the measured or estimated height of all other items.

    A lock protects every change of the mounted items. A change takes several messages, and scrolling can trigger
    another change at any time. If the caller is cancelled, the change goes on: half of it would leave views without
    items.
    """

    BLANK = True  # see `TurnView`

    shown: var[range] = var(range(0))
    """The indices of the mounted items."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.views: list[Widget] = []  # the views of the mounted items
        self._heights: dict[Item, int] = {}  # measured heights at the current width, in lines
        self._above, self._below = Blank(), Blank()
        self._changing = asyncio.Lock()
        self._follows = False  # whether a change of the mounted items is scheduled

    def compose(self) -> ComposeResult:
        yield self._above
        yield self._below

    def view_for(self, item: Item) -> Widget:
        """Create the view of an item. A subclass implements this."""
        raise NotImplementedError

    def lines_for(self, item: Item, width: int) -> int:
        """Estimate an item's height in lines, for a width in cells. Used for items that were not mounted yet.

        A subclass implements this.
        """
        raise NotImplementedError

    def grows(self, item: Item) -> bool:
        """Return whether an item grows, so that its view must stay mounted. A subclass implements this."""
        raise NotImplementedError

    @property
    def is_settled(self) -> bool:
        """Return whether all items near the screen are mounted and laid out."""
        return not (self._follows or self._changing.locked() or self.place is not None)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follow()

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Arrange the views, and schedule the changes of the mounted items that must follow this layout."""
        if self.is_anchored_to_end and self.shown.stop < len(self.items):
            self.call_after_refresh(self._follow)  # this layout scrolls, without a message about it
        if self.waits_for_layout:
            self.call_after_refresh(self._settle)
        return super().arrange(size, optimal)

    def on_resize(self, event: events.Resize) -> None:
        self._heights.clear()
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        """Measure and estimate all heights again. Call this after a layout if the list's width has changed."""
        if not self._changing.locked():
            self._measure()
            self._resize_blanks()
            self._settle()

    async def replace_items(self, end: int, added: Sequence[Item], *, into_sight: bool) -> None:
        """Replace the items from index ``end`` on by ``added``.

        With ``into_sight``, scroll to the end of the list, wherever the reader is.
        """
        await asyncio.shield(self._replace_items(end, added, into_sight=into_sight))

    async def _replace_items(self, end: int, added: Sequence[Item], *, into_sight: bool) -> None:
        async with self._changing:
            self._measure()
            with self.app.batch_update():
                if end < self.shown.stop:
                    await self._mount(range(min(self.shown.start, end), end))
                for item in self.items[end:]:
                    self._heights.pop(item, None)
                self.items[end:] = added
                heights, screen = self._all_heights(), max(1, self.size.height)
                if (into_sight and not self.shown) or end < self.shown.start:
                    await self._mount(window.ending(heights, screen))
                elif self.shown.stop == end:
                    await self._mount(window.grown(self.shown, heights, screen))
                elif into_sight:
                    await self._mount(window.ending(heights, screen))
                else:
                    self._resize_blanks()
            if into_sight:
                self.anchor()
        self.call_after_refresh(self._settle)

    async def bring_item(self, item: Item) -> None:
        """Mount an item and scroll to it. Do nothing if the item is mounted already or is not in the list."""
        await asyncio.shield(self._bring_item(item))

    async def _bring_item(self, item: Item) -> None:
        async with self._changing:
            if item not in self.items or self.items.index(item) in self.shown:
                return
            self._measure()
            heights, index = self._all_heights(), self.items.index(item)
            self.release_anchor()
            await self._show_around(self._around(heights, sum(heights[:index])), index, -(self.size.height // 3))
        self.call_after_refresh(self._settle)

    async def _mount(self, wanted: range) -> None:
        """Mount the items with the indices ``wanted``, and remove the views of all other items."""
        kept = range(max(wanted.start, self.shown.start), min(wanted.stop, self.shown.stop))
        if not kept:
            kept = range(wanted.start, wanted.start)
            gone, self.views = self.views, []
        else:
            gone = [*self.views[: kept.start - self.shown.start], *self.views[kept.stop - self.shown.start :]]
            self.views = self.views[kept.start - self.shown.start : kept.stop - self.shown.start]
        if gone:
            await self.remove_children(gone)
        before = [self.view_for(self.items[each]) for each in range(wanted.start, kept.start)]
        after = [self.view_for(self.items[each]) for each in range(kept.stop, wanted.stop)]
        first = self.views[0] if self.views else self._below
        self.views = [*before, *self.views, *after]
        if before:
            await self.mount_all(before, before=first)
        if after:
            await self.mount_all(after, before=self._below)
        self.shown = wanted
        self._resize_blanks()

    def _resize_blanks(self) -> None:
        heights = self._all_heights()
        for blank, height in (
            (self._above, sum(heights[: self.shown.start])),
            (self._below, sum(heights[self.shown.stop :])),
        ):
            if blank.styles.height is None or blank.styles.height.value != height:
                blank.styles.height = height

    def _all_heights(self) -> list[int]:
        """Return the height of each item in lines, as last measured or estimated."""
        width = max(20, self.size.width - 4)
        return [self._heights.get(each) or self.lines_for(each, width) for each in self.items]

    def _measure(self) -> None:
        """Record the heights of mounted items that are laid out. Heights are valid until the list's width changes."""
        placed = [view for view in [*self.views, self._below] if view.virtual_region.width]
        tops = [view.virtual_region.y - view.styles.margin.top for view in placed]
        known = dict(zip(self.views, (self.items[each] for each in self.shown), strict=True))
        for view, top, bottom in zip(placed, tops, tops[1:], strict=False):
            if bottom > top and not isinstance(view, Blank):
                self._heights[known[view]] = bottom - top

    def _follow(self) -> None:
        """Schedule a change of the mounted items if the screen has come near the first or the last mounted item."""
        top, screen = self.scroll_offset.y, self.size.height
        spare = int(window.SPARE * screen)
        near_top = self.shown.start > 0 and top - spare < self._above.virtual_region.bottom
        near_end = self.shown.stop < len(self.items) and top + screen + spare > self._below.virtual_region.y
        if (near_top or near_end) and screen and not self._follows:
            self._follows = True
            self.call_after_refresh(self._move)

    async def _move(self) -> None:
        """Mount the items around the visible ones. The visible items stay in place on the screen.

        If the next layout will scroll elsewhere (`hold_position`), do nothing: `_settle` checks again after it.
        """
        async with self._changing:
            try:
                if self.items and self.place is None:
                    self._measure()
                    heights, top = self._all_heights(), self.scroll_offset.y
                    await self._show_around(self._around(heights, top), *window.at(heights, top))
            finally:
                self._follows = False
        self.call_after_refresh(self._settle)

    def _around(self, heights: list[int], top: int) -> range:
        """Return the indices of the items to mount for a screen that begins at line ``top``."""
        screen = self.size.height
        wanted = window.around(heights, top - int(window.AHEAD * screen), top + int((1 + window.AHEAD) * screen))
        if any(self.grows(self.items[each]) for each in self.shown):
            wanted = range(min(wanted.start, self.shown.start), self.shown.stop)
        return wanted

    async def _show_around(self, wanted: range, index: int, line: int) -> None:
        with self.app.batch_update():
            await self._mount(wanted)
            if index in wanted:
                self.hold_position(self.views[index - wanted.start], line)

    def _settle(self) -> None:
        """Finish a change of the mounted items, once the screen has been laid out.

        If items are smaller than estimated, mount more items. If the layout has not happened yet, do nothing: `arrange`
        calls this method again.
        """
        if self._changing.locked() or self.waits_for_layout:
            return
        self.release_position()
        self._measure()
        self._follow()
