"""Widgets of an answer: the folded reasoning, the growing text, and a summary line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from minillm.text.reasoning import ReasoningSplitter
from minillm.ui.chat.conversation import Answer
from minillm.ui.chat.gutter import Gutter
from minillm.ui.drawing import update_in_place
from minillm.ui.numbers import count, duration, plural
from minillm.ui.textual_internals import Growing

if TYPE_CHECKING:
    from minillm.ui.chat.markdown import ModelMarkdown


def _new_markdown() -> ModelMarkdown:
    # Imported here, because the first screen has no Markdown, and importing takes a tenth of the time until then.
    from minillm.ui.chat.markdown import ModelMarkdown

    return ModelMarkdown()


class ReasoningView(Collapsible):
    """Shows the model's reasoning before its answer. It is folded until a click or Enter opens it."""

    def __init__(self) -> None:
        self._markdown = _new_markdown()
        self._num_words = 0
        super().__init__(self._markdown, title="reasoning", collapsed=True)

    async def append_text(self, text: str, lines_ahead: int = 0) -> None:
        await self._markdown.append_text(text, lines_ahead)
        self._num_words += len(text.split())
        # The title is set last: if it were set before it is mounted, it would keep its first value.
        self.title = f"reasoning · about {plural(self._num_words, 'word')}"

    def end(self) -> None:
        self._markdown.end()


class AnswerView(Growing, Vertical):
    """Shows the growing answer. The line below it says how long the answer is, how fast, and why it ended."""

    BLANK = True  # see `TurnView`

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self._pending: list[str] = [answer.text] if answer.text else []
        self._splitter = ReasoningSplitter(answer.in_reasoning)
        self._part: ReasoningView | ModelMarkdown | None = None  # the part at the end, to which text is added
        self._summary = Static(Content("…"), classes="summary")
        self.block_marks = Gutter(answer)

    def compose(self) -> ComposeResult:
        yield self.block_marks
        yield self._summary

    async def on_mount(self) -> None:
        if self._pending:  # there was text before the view was shown
            await (self.flush() if self.answer.is_open else self.end())

    def begin(self, in_reasoning: bool) -> None:
        """Prepare for the answer's text. Call this when the prompt has been computed.

        ``in_reasoning``: the text begins inside the reasoning, because the prompt ends with the opening tag.
        """
        self._splitter.inside = in_reasoning

    def add(self, text: str) -> None:
        """Collect text of the answer. The next `flush` shows it, so that many tokens share one layout."""
        self._pending.append(text)

    async def flush(self, lines_ahead: int = 0) -> None:
        """Show the collected text.

        ``lines_ahead`` is the number of blank lines that the last paragraph reserves when it grows.
        """
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            await self._show(self._splitter.push(text), lines_ahead)
            self.update_summary()

    async def end(self) -> None:
        """Show the end of the answer's text and the summary line. Call this when the answer is complete."""
        await self.flush()
        await self._show(self._splitter.finish(), lines_ahead=0)
        if self._part is not None:
            self._part.end()
        self.update_summary()

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
            if not self._part.is_attached:  # this view was removed
                return
            await self._part.append_text(text, lines_ahead)

    def update_summary(self) -> None:
        words = summary(self.answer)
        # If the text has reserved blank lines, show the summary in one of them. Below them, it would follow a gap.
        part = None if isinstance(self._part, ReasoningView) else self._part
        ahead = part.show_below(words) if part is not None and self.answer.is_open else 0
        self.block_marks.num_blank = ahead
        update_in_place(self._summary, Content("" if ahead else words))


def reading(answer: Answer) -> str:
    """Return a text about the progress of computing the prompt, with the time left."""
    done, total = answer.num_read_tokens, answer.num_prompt_tokens
    if not total:
        return "reading the prompt …"
    left = f" · {duration(answer.reading_left)} left" if answer.reading_left is not None else ""
    return f"reading the prompt: {count(done)} of {plural(total, 'token')}{left}"


def summary(answer: Answer) -> str:
    """Return a line about an answer: its length, its speed, cached tokens, and why it ended.

    Before the first token, return a text about the progress of computing the prompt instead (`reading`).
    """
    if answer.time_to_first_token is None and answer.finish_reason is None:
        return reading(answer)
    words = []
    if answer.num_output_tokens:
        words.append(plural(answer.num_output_tokens, "token"))
    if answer.finish_reason is None:
        return " · ".join([*words, "…"])
    if answer.tokens_per_second:
        words.append(f"{answer.tokens_per_second:.1f} tok/s")
    if answer.num_guessed_tokens:
        words.append(f"{count(answer.num_guessed_tokens)} drafted")
    if answer.time_to_first_token is not None:
        words.append(f"first token {duration(answer.time_to_first_token)}")
    if answer.num_cached_tokens:
        words.append(f"prompt {count(answer.num_prompt_tokens)}, {count(answer.num_cached_tokens)} cached")
    if answer.num_disk_tokens:
        words.append(f"{plural(answer.num_disk_tokens, 'token')} from disk in {duration(answer.disk_seconds)}")
    if answer.finish_reason != "stop":
        words.append({"length": "cut at the length limit", "abort": "stopped", "lost": "lost"}[answer.finish_reason])
    return " · ".join(words)
