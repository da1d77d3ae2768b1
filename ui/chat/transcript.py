"""The scrolling list of the conversation's turns and the app's notes. Only items near the screen have widgets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from minillm.text.safe import clean_line
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.chat.long_list import LongList
from minillm.ui.chat.turn_view import TurnView, lines_of
from minillm.ui.memory.pool import Pool

WELCOME = """\
Ask something and press Enter.
Ctrl+J starts a new line, Escape stops an answer, F1 lists all keys, / lists all commands.
/n 3: three answers that share memory. /tour and `minillm demo` show how."""


@dataclass(eq=False)
class Remark:
    """The content of a `Note`. The content stays in the list when the note's widget is removed.

    The widget exists only while the note is near the screen.
    """

    text: str
    kind: str


class Note(Static):
    """A note of the app between the turns. ``kind`` is "info", "tour", "warning" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        mark = {"info": "·", "tour": "▶", "warning": "▲", "error": "✖"}[kind]
        super().__init__(Content(f"{mark} {clean_line(text, 1000)}"), classes=f"-{kind}")


class Transcript(LongList[Turn | Remark], can_focus=True):
    """Shows turns and notes in order. One turn can be selected for commands such as edit and copy."""

    def __init__(self) -> None:
        super().__init__()
        self._conversation = Conversation()
        self._selected: Turn | None = None
        self._pool: Pool | None = None  # the pool that the gutters last showed

    def compose(self) -> ComposeResult:
        above, below = super().compose()
        yield above
        yield _welcome()
        yield below

    def on_mount(self) -> None:
        self.anchor()

    @property
    def turn_views(self) -> list[TurnView]:
        """Return the views of the turns that are mounted."""
        return [view for view in self.views if isinstance(view, TurnView)]

    @property
    def turns(self) -> list[Turn]:
        """Return all turns in order, mounted or not."""
        return [item for item in self.items if isinstance(item, Turn)]

    def show_blocks(self, pool: Pool | None) -> None:
        """Show the state of the cache blocks next to the visible answers."""
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

    def view_of(self, turn: Turn) -> TurnView | None:
        """Return the view of a turn; None if the turn is not mounted."""
        return next((view for view in self.turn_views if view.turn is turn), None)

    async def show_path(self, conversation: Conversation) -> None:
        """Show the visible path of a conversation. Turns that are shown already keep their views."""
        self._conversation = conversation
        turns, before = conversation.turns, self.turns
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(before, turns, strict=False)))
        if self._selected not in turns:
            self.select(None)
        if turns[same:]:
            await self.query("#welcome").remove()
        # Everything after the first removed turn belongs to the branch that is no longer shown.
        end = self.items.index(before[same]) if before[same:] else len(self.items)
        added: list[Turn | Remark] = []
        for turn in turns[same:]:
            added += [turn, *(Remark(note, "tour") for note in turn.notes)]
        await self.replace_items(end, added, into_sight=bool(added))
        for view in self.turn_views:
            view.show_branch(self._branch(view.turn))

    def _branch(self, turn: Turn) -> str:
        siblings = self._conversation.siblings(turn)
        return f"{siblings.index(turn) + 1}/{len(siblings)}" if len(siblings) > 1 else ""

    async def add_note(self, text: str, kind: str = "info") -> None:
        """Add a note. If the reader is at the end of the conversation, the note is scrolled into view."""
        await self.replace_items(len(self.items), [Remark(text, kind)], into_sight=False)

    async def clear(self) -> None:
        """Remove all turns and notes, and show the welcome text."""
        self._selected = None
        await self.replace_items(0, [], into_sight=False)
        if not self.query("#welcome"):
            await self.mount(_welcome(), after=0)
        self.anchor()

    def view_for(self, item: Turn | Remark) -> TurnView | Note:
        if isinstance(item, Remark):
            return Note(item.text, item.kind)
        view = TurnView(item, self._branch(item))
        view.set_class(item is self._selected, "-selected")
        return view

    def lines_for(self, item: Turn | Remark, width: int) -> int:
        return 2 if isinstance(item, Remark) else lines_of(item, width)

    def grows(self, item: Turn | Remark) -> bool:
        return isinstance(item, Turn) and item.answer.is_open

    async def bring(self, turn: Turn) -> TurnView | None:
        """Mount a turn and scroll to it. Return the turn's view; None if the turn is not in the visible path."""
        await self.bring_item(turn)
        return self.view_of(turn)

    @property
    def selected(self) -> Turn | None:
        return self._selected

    def select(self, turn: Turn | None) -> None:
        """Select a turn, which may be mounted or not. None removes the selection."""
        self._selected = turn
        for view in self.turn_views:
            view.set_class(view.turn is turn, "-selected")

    async def go_to(self, turn: Turn) -> None:
        """Select a turn and scroll to it."""
        self.select(turn)
        view = await self.bring(turn)
        if view is not None:
            self.call_after_refresh(self.scroll_to_widget, view, animate=False)

    async def select_next(self, step: int) -> None:
        """Select the next (``step`` 1) or previous (-1) turn. After the last turn, remove the selection."""
        turns = self.turns
        at = turns.index(self._selected) if self._selected in turns else len(turns)
        at = max(0, at + step)
        if at < len(turns):
            await self.go_to(turns[at])
        else:
            self.select(None)


def _welcome() -> Static:
    return Static(Content(WELCOME), id="welcome")
