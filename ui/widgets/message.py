"""What one side said: a question, an answer, or a notice of the app."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from minillm.text import clean, clean_line
from ui.conversation import Answer
from ui.numbers import count, duration, plural, size
from ui.widgets.markdown import ModelMarkdown

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
    """What the user said."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(shortened(clean(text))))


class Note(Static):
    """Something the app says between the messages. ``kind`` is "info", "warning" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        mark = {"info": "·", "warning": "▲", "error": "✖"}[kind]
        super().__init__(Content(f"{mark} {clean_line(text, 1000)}"), classes=f"-{kind}")


class AnswerView(Vertical):
    """What the model says, growing, and one line below it about how it went."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self._pending: list[str] = []
        self._markdown = ModelMarkdown()
        self._summary = Static(Content("…"), classes="summary")

    def compose(self) -> ComposeResult:
        yield self._markdown
        yield self._summary

    def add(self, text: str) -> None:
        """More of the answer; it is shown by the next `flush`, so that many tokens cost one layout."""
        self._pending.append(text)

    async def flush(self) -> bool:
        """Show what was added; False if there was nothing."""
        if not self._pending:
            return False
        text = "".join(self._pending)
        self._pending.clear()
        await self._markdown.append_text(text)
        return True

    def update_summary(self) -> None:
        """Show how it went, or that it goes on."""
        self._summary.update(Content(summary(self.answer)))


def summary(answer: Answer) -> str:
    """One line: how long, how fast, what came from the cache, why it ended."""
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
