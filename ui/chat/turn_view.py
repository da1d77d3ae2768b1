"""A turn on the screen: the question, its answer or the candidates for one, and where other branches begin."""

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

_MOST_SHOWN = 4000  # characters of a question; a pasted book is not laid out again at every resize
_MOST_LINES = 40


def shortened(text: str) -> str:
    """The beginning of a long text, and how much more there is."""
    lines = text[:_MOST_SHOWN].split("\n")[:_MOST_LINES]
    shown = "\n".join(lines)
    if len(shown) == len(text):
        return text
    return f"{shown}\n… {size(len(text) - len(shown))} more"


def shown_question(question: str) -> str:
    """A question as it stands on the screen: clean, not too long, with the name of a file in place of its text."""
    return shortened(folded_files(clean(question))[0])


class Question(Static):
    def __init__(self, text: str) -> None:
        super().__init__(Content(shown_question(text)))


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
        self.set_class(bool(branch), "-branches")

    async def show_answer(self) -> None:
        """Build the answer's view anew: a candidate has been accepted, or the text goes on."""
        before, self.answer_view = self.answer_view, _view_of(self.turn)
        await self.mount(self.answer_view, after=before)
        await before.remove()


def _view_of(turn: Turn) -> AnswerView | CandidatesView:
    return CandidatesView(turn.answer) if turn.answer.candidates else AnswerView(turn.answer)


def lines_of(turn: Turn, width: int) -> int:
    """About how many lines a turn takes on a screen of so many columns."""
    answer = turn.answer
    text = "\n".join([answer.text, *(f"\n\n{each.text}" for each in answer.candidates)])
    lines = [*shown_question(turn.question).split("\n"), *text.split("\n")]
    return 4 + sum(1 + len(line) // width for line in lines)
