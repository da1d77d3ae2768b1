"""The parts of the transcript: a question, an answer, a note of the app."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from minillm.progress import size
from minillm.text.safe import clean, clean_line
from minillm.ui.chat.conversation import Answer
from minillm.ui.chat.reasoning import ReasoningSplitter
from minillm.ui.drawn import update_in_place
from minillm.ui.numbers import count, duration, plural
from minillm.ui.textual_internals import Growing

if TYPE_CHECKING:
    from minillm.ui.chat.markdown import ModelMarkdown

_MOST_SHOWN = 4000  # characters of a question; a pasted book is not laid out again at every resize
_MOST_LINES = 40


def shortened(text: str) -> str:
    """The beginning of a long text, and how much more there is."""
    lines = text[:_MOST_SHOWN].split("\n")[:_MOST_LINES]
    shown = "\n".join(lines)
    if len(shown) == len(text):
        return text
    return f"{shown}\n… {size(len(text) - len(shown))} more"


class Question(Static):
    """The user's words."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(shortened(clean(text))))


class Note(Static):
    """A line of the app between the turns. ``kind`` is "info", "warning" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        mark = {"info": "·", "warning": "▲", "error": "✖"}[kind]
        super().__init__(Content(f"{mark} {clean_line(text, 1000)}"), classes=f"-{kind}")


def _new_markdown() -> ModelMarkdown:
    from minillm.ui.chat.markdown import (
        ModelMarkdown,  # takes a tenth of the time until the first screen, which needs none
    )

    return ModelMarkdown()


class ReasoningView(Collapsible):
    """The model's reasoning before its answer, folded: a click or Enter opens it."""

    def __init__(self) -> None:
        self._markdown = _new_markdown()
        self._num_words = 0
        super().__init__(self._markdown, title="reasoning", collapsed=True)

    async def append_text(self, text: str, lines_ahead: int = 0) -> None:
        self._num_words += len(text.split())
        self.title = f"reasoning · about {plural(self._num_words, 'word')}"
        await self._markdown.append_text(text, lines_ahead)

    def end(self) -> None:
        self._markdown.end()


class AnswerView(Growing, Vertical):
    """The model's answer, growing, and below it one line about its length, speed and end."""

    BLANK = True  # see `TurnView`

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self._pending: list[str] = [answer.text] if answer.text else []
        self._splitter = ReasoningSplitter(answer.in_reasoning)
        self._part: ReasoningView | ModelMarkdown | None = None  # the one that grows now
        self._summary = Static(Content("…"), classes="summary")

    def compose(self) -> ComposeResult:
        yield self._summary

    async def on_mount(self) -> None:
        if self._pending:  # it was said before it is shown
            await self.flush()
            await self.end()
            self.update_summary()

    def begin(self, in_reasoning: bool) -> None:
        """The prompt is computed; ``in_reasoning``: the template has opened the reasoning already."""
        self._splitter.inside = in_reasoning

    def add(self, text: str) -> None:
        """More of the answer; it is shown by the next `flush`, so that many tokens cost one layout."""
        self._pending.append(text)

    async def flush(self, lines_ahead: int = 0) -> bool:
        """Show the added text; False if there was none. ``lines_ahead``: see `ModelMarkdown.append_text`."""
        if not self._pending:
            return False
        text = "".join(self._pending)
        self._pending.clear()
        await self._show(self._splitter.push(text), lines_ahead)
        return True

    async def end(self) -> None:
        """No more will come."""
        await self._show(self._splitter.finish(), lines_ahead=0)
        if self._part is not None:
            self._part.end()

    async def _show(self, pieces: list[tuple[bool, str]], lines_ahead: int) -> None:
        for reasoning, text in pieces:
            if self._part is None or isinstance(self._part, ReasoningView) != reasoning:
                text = text.lstrip()
                if not text:
                    continue
                if self._part is not None:
                    self._part.end()
                self._part = ReasoningView() if reasoning else _new_markdown()
                await self.mount(self._part, before=self._summary)
            await self._part.append_text(text, lines_ahead)

    def update_summary(self) -> None:
        """Show how it went, or that it goes on."""
        update_in_place(self._summary, Content(summary(self.answer)))


def summary(answer: Answer) -> str:
    """One line: length, speed, tokens from the cache, and why it ended."""
    if answer.time_to_first_token is None and answer.finish_reason is None:
        return "reading the prompt …"
    words = []
    if answer.num_output_tokens:
        words.append(plural(answer.num_output_tokens, "token"))
    if answer.finish_reason is None:
        return " · ".join([*words, "…"])
    if answer.tokens_per_second:
        words.append(f"{answer.tokens_per_second:.1f} tok/s")
    if answer.time_to_first_token is not None:
        words.append(f"first token {duration(answer.time_to_first_token)}")
    if answer.num_cached_tokens:
        words.append(f"prompt {count(answer.num_prompt_tokens)}, {count(answer.num_cached_tokens)} cached")
    if answer.finish_reason != "stop":
        words.append({"length": "cut at its longest", "abort": "stopped", "lost": "lost"}[answer.finish_reason])
    return " · ".join(words)
