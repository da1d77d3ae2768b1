"""The conversation, scrolling: it follows the answer unless the reader has scrolled up."""

from __future__ import annotations

from itertools import takewhile

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.chat.message import AnswerView, CandidatesView, Note, Question
from minillm.ui.textual_internals import Growing

WELCOME = """\
Ask something and press Enter.
Ctrl+J begins a new line, Escape stops an answer, F1 lists all keys, / all commands."""


class TurnView(Growing, Vertical):
    """A question, its answer or the candidates for one, and where other branches begin here."""

    BLANK = True  # its children draw all that there is: Textual need not make its lines, anew with each new size

    def __init__(self, turn: Turn, branch: str) -> None:
        super().__init__()
        self.turn = turn
        self.answer_view: AnswerView | CandidatesView = _view_of(turn)
        self._branch = Static(classes="branch")
        self.show_branch(branch)

    def compose(self) -> ComposeResult:
        yield self._branch
        yield Question(self.turn.question)
        yield self.answer_view

    def show_branch(self, branch: str) -> None:
        """``2/3``: the second of three branches; empty where there is only one."""
        self._branch.update(Content(f"‹ {branch} ›  Alt+← →" if branch else ""))
        self._branch.display = bool(branch)

    async def show_answer(self) -> None:
        """Build the answer's view anew: a candidate has been accepted, or the text goes on."""
        before, self.answer_view = self.answer_view, _view_of(self.turn)
        await self.mount(self.answer_view, after=before)
        await before.remove()


def _welcome() -> Static:
    return Static(Content(WELCOME), id="welcome")


def _view_of(turn: Turn) -> AnswerView | CandidatesView:
    return CandidatesView(turn.answer) if turn.answer.candidates else AnswerView(turn.answer)


class Transcript(Growing, VerticalScroll, can_focus=True):
    """Turns and notes in order. One turn can be selected: the keys for edit, copy and the like act on it."""

    BLANK = True  # see `TurnView`

    def __init__(self) -> None:
        super().__init__()
        self._selected: TurnView | None = None

    def compose(self) -> ComposeResult:
        yield _welcome()

    def on_mount(self) -> None:
        self.anchor()

    @property
    def turn_views(self) -> list[TurnView]:
        return [child for child in self.children if isinstance(child, TurnView)]

    def view_of(self, turn: Turn) -> TurnView | None:
        return next((view for view in self.turn_views if view.turn is turn), None)

    async def show_path(self, conversation: Conversation) -> None:
        """Show the conversation's turns; those that are shown already stay as they are."""
        turns, views = conversation.turns, self.turn_views
        same = sum(1 for _ in takewhile(lambda pair: pair[0].turn is pair[1], zip(views, turns, strict=False)))
        if views[same:]:
            # All that stands below the first turn that goes belongs to the branch that is left.
            await self.remove_children(self.children[self.children.index(views[same]) :])
        if self._selected not in self.turn_views:
            self.select(None)
        added = [TurnView(turn, "") for turn in turns[same:]]
        if added:
            await self._add(*added)
        for view in self.turn_views:
            siblings = conversation.siblings(view.turn)
            place = siblings.index(view.turn) + 1
            view.show_branch(f"{place}/{len(siblings)}" if len(siblings) > 1 else "")
        if added:
            self.anchor()  # a user who asks wants to see the answer

    async def add_note(self, text: str, kind: str = "info") -> None:
        await self._add(Note(text, kind))

    async def _add(self, *widgets: Static | TurnView) -> None:
        await self.query("#welcome").remove()
        await self.mount_all(widgets)

    async def clear(self) -> None:
        self._selected = None
        await self.remove_children()
        await self.mount(_welcome())
        self.anchor()

    @property
    def selected(self) -> Turn | None:
        return self._selected.turn if self._selected is not None else None

    def select(self, view: TurnView | None) -> None:
        if self._selected is not None:
            self._selected.remove_class("-selected")
        self._selected = view
        if view is not None:
            view.add_class("-selected")
            self.scroll_to_widget(view, animate=False)

    def select_next(self, step: int) -> None:
        """Select the turn below (1) or above (-1) the selected one; past the last one, none."""
        views = self.turn_views
        at = views.index(self._selected) if self._selected in views else len(views)
        at = max(0, at + step)
        self.select(views[at] if at < len(views) else None)
