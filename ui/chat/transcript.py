"""The conversation, scrolling: its turns and the app's notes. Only those near the screen are widgets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.reactive import var
from textual.widget import Widget
from textual.widgets import Static

from minillm.text.safe import clean_line
from minillm.ui.chat import window
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.chat.turn_view import TurnView, lines_of
from minillm.ui.memory.pool import Pool
from minillm.ui.textual_internals import Growing, KeepsPlace

WELCOME = """\
Ask something and press Enter.
Ctrl+J begins a new line, Escape stops an answer, F1 lists all keys, / all commands.
/n 3 and a question: three answers that share their memory. /tour shows how in a minute, `minillm demo` in three."""


@dataclass(eq=False)
class Remark:
    """What a note says; see `Note`."""

    text: str
    kind: str


class Note(Static):
    """A line of the app between the turns. ``kind`` is "info", "warning" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        mark = {"info": "·", "warning": "▲", "error": "✖"}[kind]
        super().__init__(Content(f"{mark} {clean_line(text, 1000)}"), classes=f"-{kind}")


class Blank(Widget):
    """The room of turns that are not mounted."""

    BLANK = True  # see `TurnView`

    def __init__(self) -> None:
        super().__init__()
        self.styles.height = 0


class Transcript(KeepsPlace, Growing, VerticalScroll, can_focus=True):
    """Turns and notes in order. One turn can be selected: the keys for edit, copy and the like act on it.

    The turns near the screen are mounted, a part of the list without a gap; `window` says which. Above and below them
    is blank room, as high as the others are, or will be about. All that changes the part holds a lock, for it takes
    several messages, and both the reader and the engine can ask for it.
    """

    BLANK = True  # see `TurnView`

    shown: var[range] = var(range(0))
    """The part of the list that is mounted."""

    def __init__(self) -> None:
        super().__init__()
        self._items: list[Turn | Remark] = []
        self._views: list[TurnView | Note] = []  # of the items that are mounted
        self._heights: dict[Turn | Remark, int] = {}  # of those that were, at this width
        self._conversation = Conversation()
        self._selected: Turn | None = None
        self._pool: Pool | None = None  # as the gutters were shown last
        self._above, self._below = Blank(), Blank()
        self._changing = asyncio.Lock()
        self._follows = False  # a change of the mounted part is due

    def compose(self) -> ComposeResult:
        yield self._above
        yield Static(Content(WELCOME), id="welcome")
        yield self._below

    def on_mount(self) -> None:
        self.anchor()

    @property
    def turn_views(self) -> list[TurnView]:
        """Those of the turns that are mounted."""
        return [view for view in self._views if isinstance(view, TurnView)]

    @property
    def turns(self) -> list[Turn]:
        """All turns, in order."""
        return [item for item in self._items if isinstance(item, Turn)]

    def show_blocks(self, pool: Pool | None) -> None:
        """Show beside the answers in sight which blocks hold them."""
        self._pool, top = pool, self.scroll_offset.y
        for view in self.turn_views[::-1]:
            region = view.virtual_region
            if region.bottom < top:
                break
            if region.y < top + self.size.height and isinstance(view.answer_view, AnswerView):
                view.answer_view.block_marks.show(pool)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.show_blocks(self._pool)
        self._follow()

    def on_resize(self, event: events.Resize) -> None:
        self._heights.clear()
        self.call_after_refresh(self._settle)

    def view_of(self, turn: Turn) -> TurnView | None:
        """The view of a turn; None where it is not mounted."""
        return next((view for view in self.turn_views if view.turn is turn), None)

    async def show_path(self, conversation: Conversation) -> None:
        """Show the conversation's turns; those that are shown already stay as they are."""
        async with self._changing:
            self._conversation = conversation
            turns, before = conversation.turns, self.turns
            same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(before, turns, strict=False)))
            end = len(self._items)
            if before[same:]:
                # All that stands below the first turn that goes belongs to the branch that is left.
                end = self._items.index(before[same])
            if self._selected not in turns:
                self.select(None)
            await self._replace(end, turns[same:])
            for view in self.turn_views:
                view.show_branch(self._branch(view.turn))

    def _branch(self, turn: Turn) -> str:
        siblings = self._conversation.siblings(turn)
        return f"{siblings.index(turn) + 1}/{len(siblings)}" if len(siblings) > 1 else ""

    async def _replace(self, end: int, added: Sequence[Turn | Remark]) -> None:
        """Have other items from number ``end`` on. Turns are brought into sight: a user who asks wants to see the
        answer. A note is only where the reader is at the end.
        """
        self._measure()
        asked = any(isinstance(each, Turn) for each in added)
        with self.app.batch_update():
            if asked:
                await self.query("#welcome").remove()
            shown = self.shown
            if end < shown.stop:
                await self._mount(range(min(shown.start, end), end))
            self._items[end:] = added
            heights, screen = self._all_heights(), max(1, self.size.height)
            if (asked and not self.shown) or end < self.shown.start:
                await self._mount(window.ending(heights, screen))
            elif self.shown.stop == end:
                await self._mount(window.grown(self.shown, heights, screen))
            elif asked:
                await self._mount(window.ending(heights, screen))
            else:
                self._make_room()
        if asked:
            self.anchor()
        self.call_after_refresh(self._settle)

    async def add_note(self, text: str, kind: str = "info") -> None:
        async with self._changing:
            await self._replace(len(self._items), [Remark(text, kind)])

    async def clear(self) -> None:
        """Show the welcome, and nothing else."""
        async with self._changing:
            self._selected, self._kept = None, None
            self._heights.clear()
            with self.app.batch_update():
                await self._mount(range(0))
                self._items.clear()
                self._make_room()
                if not self.query("#welcome"):
                    await self.mount(Static(Content(WELCOME), id="welcome"), after=self._above)
            self.anchor()

    async def _mount(self, wanted: range) -> None:
        """Have this part of the list mounted."""
        kept = range(max(wanted.start, self.shown.start), min(wanted.stop, self.shown.stop))
        if not kept:
            kept = range(wanted.start, wanted.start)
            gone, self._views = self._views, []
        else:
            gone = [*self._views[: kept.start - self.shown.start], *self._views[kept.stop - self.shown.start :]]
            self._views = self._views[kept.start - self.shown.start : kept.stop - self.shown.start]
        if gone:
            await self.remove_children(gone)
        before = [self._view(self._items[each]) for each in range(wanted.start, kept.start)]
        after = [self._view(self._items[each]) for each in range(kept.stop, wanted.stop)]
        first = self._views[0] if self._views else self._below
        self._views = [*before, *self._views, *after]
        if before:
            await self.mount_all(before, before=first)
        if after:
            await self.mount_all(after, before=self._below)
        self.shown = wanted
        self._make_room()

    def _view(self, item: Turn | Remark) -> TurnView | Note:
        if isinstance(item, Remark):
            return Note(item.text, item.kind)
        view = TurnView(item, self._branch(item))
        view.set_class(item is self._selected, "-selected")
        return view

    def _make_room(self) -> None:
        heights = self._all_heights()
        for blank, height in (
            (self._above, sum(heights[: self.shown.start])),
            (self._below, sum(heights[self.shown.stop :])),
        ):
            if blank.styles.height is None or blank.styles.height.value != height:
                blank.styles.height = height

    def _all_heights(self) -> list[int]:
        """Lines of each item: as it was mounted last, or about."""
        width = max(20, self.size.width - 4)
        return [self._heights.get(each) or _lines(each, width) for each in self._items]

    def _measure(self) -> None:
        """Note the heights of what is mounted and has its place; they hold until the width changes."""
        placed = [view for view in [*self._views, self._below] if view.virtual_region.width]
        tops = [view.virtual_region.y - view.styles.margin.top for view in placed]
        known = dict(zip(self._views, (self._items[each] for each in self.shown), strict=True))
        for view, top, bottom in zip(placed, tops, tops[1:], strict=False):
            if bottom > top and not isinstance(view, Blank):
                self._heights[known[view]] = bottom - top

    def _follow(self) -> None:
        """Mount what the reader comes near to, soon."""
        top, screen = self.scroll_offset.y, self.size.height
        spare = int(window.SPARE * screen)
        near_top = self.shown.start > 0 and top - spare < self._above.virtual_region.bottom
        near_end = self.shown.stop < len(self._items) and top + screen + spare > self._below.virtual_region.y
        if (near_top or near_end) and screen and not self._follows:
            self._follows = True
            self.call_after_refresh(self._move)

    async def _move(self) -> None:
        """Mount the part around what is in sight, which stays where it is on the screen."""
        async with self._changing:
            try:
                if not self._items:
                    return
                self._measure()
                heights, screen, top = self._all_heights(), self.size.height, self.scroll_offset.y
                wanted = window.around(
                    heights, top - int(window.AHEAD * screen), top + int((1 + window.AHEAD) * screen)
                )
                if self.shown and any(isinstance(each, Turn) and each.answer.is_open for each in self._mounted_items()):
                    wanted = range(min(wanted.start, self.shown.start), self.shown.stop)  # the answer grows in its view
                await self._show_around(wanted, *window.at(heights, top))
            finally:
                self._follows = False
        self.call_after_refresh(self._settle)

    async def _show_around(self, wanted: range, index: int, line: int) -> None:
        with self.app.batch_update():
            await self._mount(wanted)
            if index in wanted:
                self.keep_place(self._views[index - wanted.start], line)

    def _mounted_items(self) -> list[Turn | Remark]:
        return [self._items[each] for each in self.shown]

    def _settle(self) -> None:
        """After a layout: all has its place. Where it became less than was expected, more is mounted."""
        if self._changing.locked():
            return
        self.give_place_up()
        self._measure()
        self._follow()

    async def bring(self, turn: Turn) -> TurnView | None:
        """Have a turn mounted, and in sight; returns its view, None where the turn is not among those shown."""
        async with self._changing:
            if turn not in self._items:
                return None
            if (view := self.view_of(turn)) is None:
                self._measure()
                heights, screen, index = self._all_heights(), self.size.height, self._items.index(turn)
                top = sum(heights[:index])
                self.release_anchor()
                wanted = window.around(
                    heights, top - int(window.AHEAD * screen), top + int((1 + window.AHEAD) * screen)
                )
                await self._show_around(wanted, index, -(screen // 3))
                view = self.view_of(turn)
                self.call_after_refresh(self._settle)
            return view

    @property
    def selected(self) -> Turn | None:
        return self._selected

    def select(self, turn: Turn | None) -> None:
        """Select a turn, mounted or not, or none."""
        self._selected = turn
        for view in self.turn_views:
            view.set_class(view.turn is turn, "-selected")

    async def go_to(self, turn: Turn) -> None:
        """Select a turn and bring it into sight."""
        self.select(turn)
        view = await self.bring(turn)
        if view is not None:
            self.call_after_refresh(self.scroll_to_widget, view, animate=False)

    async def select_next(self, step: int) -> None:
        """Select the turn below (1) or above (-1) the selected one; past the last one, none."""
        turns = self.turns
        at = turns.index(self._selected) if self._selected in turns else len(turns)
        at = max(0, at + step)
        if at < len(turns):
            await self.go_to(turns[at])
        else:
            self.select(None)


def _lines(item: Turn | Remark, width: int) -> int:
    return 2 if isinstance(item, Remark) else lines_of(item, width)
