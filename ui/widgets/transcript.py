"""The conversation, scrolling: it follows the answer unless the reader has scrolled up."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ui.conversation import Answer
from ui.widgets.message import AnswerView, Note, Question

WELCOME = """\
Ask something and press Enter.
Ctrl+J begins a new line, Escape stops an answer, F1 lists all keys."""


class Transcript(VerticalScroll, can_focus=True):
    """Questions, answers and notes in order."""

    def compose(self):  # type: ignore[no-untyped-def]
        yield Static(Content(WELCOME), id="welcome")

    def on_mount(self) -> None:
        self.anchor()

    async def add_turn(self, question: str, answer: Answer) -> AnswerView:
        """A question and its answer, which is still to come; returns what shows it."""
        view = AnswerView(answer)
        await self._add(Question(question), view)
        self.anchor()  # who asks wants to see the answer, wherever they had scrolled to
        return view

    async def remove_turn(self, view: AnswerView) -> None:
        """Take a turn back."""
        children = list(self.children)
        question = children[children.index(view) - 1]
        await self.remove_children([question, view])

    async def add_note(self, text: str, kind: str = "info") -> None:
        await self._add(Note(text, kind))

    async def _add(self, *widgets: Static | AnswerView) -> None:
        await self.query("#welcome").remove()
        await self.mount_all(widgets)

    async def clear(self) -> None:
        """Begin again with the welcome."""
        await self.remove_children()
        await self.mount(Static(Content(WELCOME), id="welcome"))
        self.anchor()
