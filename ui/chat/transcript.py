"""The conversation, scrolling: questions, answers with their reasoning, answers to choose from, notes of the app."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Collapsible, Static

from minillm.cache.runs import common_length
from minillm.progress import size
from minillm.text.safe import clean, clean_line
from minillm.ui.chat.conversation import Answer, Candidate, Conversation, Turn
from minillm.ui.chat.gutter import Gutter
from minillm.ui.drawing import update_in_place
from minillm.ui.engine_app import CommandAsked
from minillm.ui.memory.pool import Pool
from minillm.ui.memory.strands import NUM_COLOURS
from minillm.ui.numbers import count, duration, plural
from minillm.ui.textual_internals import Growing

if TYPE_CHECKING:
    from minillm.ui.chat.markdown import ModelMarkdown

_MOST_SHOWN = 4000  # characters of a question; a pasted book is not laid out again at every resize
_MOST_LINES = 40
_NARROWEST = 26  # columns of a candidate's card
_LEAST_COMMON, _MOST_COMMON = 16, 400  # characters with which all candidates begin
WELCOME = """\
Ask something and press Enter.
Ctrl+J begins a new line, Escape stops an answer, F1 lists all keys, / all commands.
/n 3 and a question: three answers that share their memory. /tour shows how in a minute, `minillm demo` in three."""
OPEN, CLOSE = "<think>", "</think>"  # around the reasoning


def shortened(text: str) -> str:
    """The beginning of a long text, and how much more there is."""
    lines = text[:_MOST_SHOWN].split("\n")[:_MOST_LINES]
    shown = "\n".join(lines)
    if len(shown) == len(text):
        return text
    return f"{shown}\n… {size(len(text) - len(shown))} more"


class Question(Static):
    def __init__(self, text: str) -> None:
        super().__init__(Content(shortened(clean(text))))


class Note(Static):
    """A line of the app between the turns. ``kind`` is "info", "warning" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        mark = {"info": "·", "warning": "▲", "error": "✖"}[kind]
        super().__init__(Content(f"{mark} {clean_line(text, 1000)}"), classes=f"-{kind}")


def _new_markdown() -> ModelMarkdown:
    # Its import takes a tenth of the time until the first screen, which needs none.
    from minillm.ui.chat.markdown import ModelMarkdown

    return ModelMarkdown()


@dataclass
class ReasoningSplitter:
    """Cuts a stream of text into (is reasoning, text) pieces; the tags themselves are dropped. A piece that may be the
    beginning of a tag is held back until more comes.
    """

    inside: bool = False
    _held: str = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Take more text; returns the pieces that are certain now."""
        text = self._held + text
        self._held = ""
        pieces: list[tuple[bool, str]] = []
        while text:
            tag = CLOSE if self.inside else OPEN
            at = text.find(tag)
            if at >= 0:
                pieces.append((self.inside, text[:at]))
                self.inside = not self.inside
                text = text[at + len(tag) :]
                continue
            keep = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
            pieces.append((self.inside, text[: len(text) - keep]))
            self._held = text[len(text) - keep :]
            break
        return [(reasoning, piece) for reasoning, piece in pieces if piece]

    def finish(self) -> list[tuple[bool, str]]:
        """End the text: the part that was held back was no tag."""
        held, self._held = self._held, ""
        return [(self.inside, held)] if held else []


def split_reasoning(text: str, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    pieces = splitter.push(text) + splitter.finish()
    return (
        "".join(piece for reasoning, piece in pieces if reasoning),
        "".join(piece for reasoning, piece in pieces if not reasoning),
    )


class ReasoningView(Collapsible):
    """The model's reasoning before its answer, folded: a click or Enter opens it."""

    def __init__(self) -> None:
        self._markdown = _new_markdown()
        self._num_words = 0
        super().__init__(self._markdown, title="reasoning", collapsed=True)

    async def append_text(self, text: str, lines_ahead: int = 0) -> None:
        await self._markdown.append_text(text, lines_ahead)
        self._num_words += len(text.split())
        # Only now: a title that has not been mounted yet would keep its first words.
        self.title = f"reasoning · about {plural(self._num_words, 'word')}"

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
        self.block_marks = Gutter(answer)

    def compose(self) -> ComposeResult:
        yield self.block_marks
        yield self._summary

    async def on_mount(self) -> None:
        if self._pending:  # it was said before it is shown
            await self.end()

    def begin(self, in_reasoning: bool) -> None:
        """The prompt is computed; ``in_reasoning``: the template has opened the reasoning already."""
        self._splitter.inside = in_reasoning

    def add(self, text: str) -> None:
        """More of the answer; it is shown by the next `flush`, so that many tokens cost one layout."""
        self._pending.append(text)

    async def flush(self, lines_ahead: int = 0) -> None:
        """Show the added text. ``lines_ahead``: see `ModelMarkdown.append_text`."""
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            await self._show(self._splitter.push(text), lines_ahead)
            self.update_summary()

    async def end(self) -> None:
        """Show the rest: no more will come."""
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
            await self._part.append_text(text, lines_ahead)

    def update_summary(self) -> None:
        update_in_place(self._summary, Content(summary(self.answer)))


def reading(answer: Answer) -> str:
    """How far the prompt is computed, and for how long it will be."""
    done, total = answer.num_read_tokens, answer.num_prompt_tokens
    if not total:
        return "reading the prompt …"
    left = f" · {duration(answer.reading_left)} left" if answer.reading_left is not None else ""
    return f"reading the prompt: {count(done)} of {plural(total, 'token')}{left}"


def summary(answer: Answer) -> str:
    """One line: length, speed, tokens from the cache, and why it ended."""
    if answer.time_to_first_token is None and answer.finish_reason is None:
        return reading(answer)
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


class CandidateCard(VerticalScroll, can_focus=True):
    """One candidate. Enter or a double click accepts it, Space shows it on the whole screen."""

    ALLOW_MAXIMIZE = True

    def __init__(self, index: int) -> None:
        super().__init__(classes=f"-strand-{index % NUM_COLOURS}")
        self.index = index
        self.border_title = str(index + 1)
        self._text = Static(Content("…"))

    def compose(self) -> ComposeResult:
        yield self._text

    def on_mount(self) -> None:
        self.anchor()  # the end is where a text grows

    def show(self, candidate: Candidate, num_common: int) -> None:
        """Show the text without its first ``num_common`` characters, which are shown above all cards."""
        text = _text_of(candidate)[num_common:]
        update_in_place(self._text, Content(f"… {text}" if num_common else text))
        self.border_subtitle = candidate_facts(candidate)

    def on_click(self, event: events.Click) -> None:
        if event.chain == 2:
            self.post_message(CommandAsked("accept", str(self.index + 1)))

    def on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            self.post_message(CommandAsked("accept", str(self.index + 1)))
        elif event.key == "space":
            event.stop()
            if self.screen.maximized is None:
                self.screen.maximize(self, container=False)
            else:
                self.screen.minimize()


def _text_of(candidate: Candidate) -> str:
    reasoning, answer = split_reasoning(candidate.text)
    return clean(answer.strip() or reasoning.strip())


def num_common(texts: Sequence[str]) -> int:
    """Characters of whole words with which all texts begin; 0 where it is not worth a line of its own."""
    length = min(common_length(texts[0], each) for each in texts)
    while length and not (texts[0][length - 1].isspace() or all(len(each) == length for each in texts)):
        length -= 1
    return length if len(texts) > 1 and length >= _LEAST_COMMON else 0


def candidate_facts(candidate: Candidate) -> str:
    """``score -0.54 · 23 tokens · log p -12.3``: the first ones stay where there is little room."""
    words = [] if candidate.score is None else [f"score {candidate.score:.2f}"]
    words.append(plural(candidate.num_tokens, "token"))
    if candidate.finish_reason is not None:
        words.append("✓" if candidate.finish_reason == "stop" else candidate.finish_reason)
    if candidate.logprob is not None:
        words.append(f"log p {candidate.logprob:.1f}")
    return " · ".join(words)


class CandidatesView(Vertical):
    """The candidates of an answer, in columns where there is room, and below them how it goes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self._cards = [CandidateCard(index) for index in range(len(answer.candidates))]
        self._common = Static(classes="common")
        self._summary = Static(Content(summary(answer)), classes="summary")

    def compose(self) -> ComposeResult:
        yield self._common
        with Grid():
            yield from self._cards
        yield self._summary

    @property
    def focused_index(self) -> int:
        """The number of the card that has the keyboard; of the first where none has."""
        return next((card.index for card in self._cards if card.has_focus), 0)

    async def on_mount(self) -> None:
        await self.flush()

    def on_resize(self, event: events.Resize) -> None:
        columns = max(1, min(len(self._cards), event.size.width // _NARROWEST))
        self.query_one(Grid).styles.grid_size_columns = columns

    async def end(self) -> None:
        await self.flush()

    async def flush(self, lines_ahead: int = 0) -> None:
        """Show the candidates as they stand now."""
        candidates = self.answer.candidates
        common = num_common([_text_of(each) for each in candidates])
        self._common.display = bool(common)
        if common:
            whole = _text_of(candidates[0])[:common].rstrip()
            shown = whole if len(whole) <= _MOST_COMMON else "… " + whole[-_MOST_COMMON:]
            update_in_place(self._common, Content(f"all begin: {shown}"))
        for card, candidate in zip(self._cards, candidates, strict=False):
            card.show(candidate, common)
        self.update_summary()

    def update_summary(self) -> None:
        answer, last = self.answer, min(9, len(self._cards))
        done = sum(candidate.finish_reason is not None for candidate in answer.candidates)
        if answer.time_to_first_token is None and answer.is_open:
            text = summary(answer)
        elif not answer.is_open:
            text = f"1 … {last}, a double click, or Tab and Enter accepts one · Space: the whole screen"
        elif done == len(self._cards):  # a beam search may go on, see `BeamSearchParams.early_stopping`
            text = f"searching for better ones · 1 … {last} accepts one and ends the search"
        else:
            text = f"{done} of {len(self._cards)} have ended · 1 … {last} accepts one and stops the others"
        update_in_place(self._summary, Content(text))


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
        self._pool: Pool | None = None  # as the gutters were shown last

    def compose(self) -> ComposeResult:
        yield _welcome()

    def on_mount(self) -> None:
        self.anchor()

    @property
    def turn_views(self) -> list[TurnView]:
        return [child for child in self.children if isinstance(child, TurnView)]

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
        if any(isinstance(each, TurnView) for each in widgets):
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
