"""The widget of a turn: question, answer or candidates, and the number of its branch."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from minillm.progress import size
from minillm.text.safe import clean
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.candidates import CandidatesView
from minillm.ui.chat.conversation import Turn
from minillm.ui.chat.files import folded_files
from minillm.ui.textual_internals import Growing

_MOST_SHOWN = 4000  # maximum characters of a question to show, because laying out a pasted book would take too long
_MOST_LINES = 40


def shortened(text: str) -> str:
    """Return the beginning of a long text, followed by a line with the size of the rest."""
    lines = text[:_MOST_SHOWN].split("\n")[:_MOST_LINES]
    shown = "\n".join(lines)
    if len(shown) == len(text):
        return text
    return f"{shown}\n… {size(len(text) - len(shown))} more"


def shown_question(question: str) -> str:
    """Return a question for display: clean, not too long, and with file names instead of the files' texts."""
    return shortened(folded_files(clean(question))[0])


class Question(Static):
    def __init__(self, text: str) -> None:
        super().__init__(Content(shown_question(text)))


class TurnView(Growing, Vertical):
    """Shows a question with its answer or candidates, and the number of its branch."""

    BLANK = True  # children cover this widget, so Textual need not compute its own lines at each new size

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
        """Show a label such as ``2/3`` for the second of three branches. If ``branch`` is empty, hide the label."""
        self._branch.update(Content(f"‹ {branch} ›  Alt+← →" if branch else ""))
        self._branch.display = bool(branch)
        self.set_class(bool(branch), "-branches")

    async def show_answer(self) -> None:
        """Replace the answer's view. Call this when a candidate was accepted, or when the choice was undone."""
        before, self.answer_view = self.answer_view, _view_of(self.turn)
        await self.mount(self.answer_view, after=before)
        await before.remove()


def _view_of(turn: Turn) -> AnswerView | CandidatesView:
    return CandidatesView(turn.answer) if turn.answer.candidates else AnswerView(turn.answer)


def lines_of(turn: Turn, width: int) -> int:
    """Estimate the height of a turn in lines, for a width in cells."""
    answer = turn.answer
    text = "\n".join([answer.text, *(f"\n\n{each.text}" for each in answer.candidates)])
    lines = [*shown_question(turn.question).split("\n"), *text.split("\n")]
    return 4 + sum(1 + len(line) // width for line in lines)
