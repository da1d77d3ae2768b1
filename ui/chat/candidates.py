"""Widgets that show the candidates of an answer, with a card for each."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from minillm.cache.runs import common_length
from minillm.text.reasoning import split_reasoning
from minillm.text.safe import clean
from minillm.ui.bars import hidden_keys
from minillm.ui.chat.answer_view import summary
from minillm.ui.chat.conversation import Answer, Candidate
from minillm.ui.drawing import update_in_place
from minillm.ui.engine_app import CommandRequested
from minillm.ui.memory.pool import NUM_COLORS
from minillm.ui.numbers import count, plural

_NARROWEST = 26  # minimum width of a card in cells
# The common beginning of all candidates is shown separately: its minimum length, and its shown length, in characters.
_LEAST_COMMON, _MOST_COMMON = 16, 400


class CandidateCard(VerticalScroll, can_focus=True):
    """Shows one candidate. Enter or a double click accepts it, Space shows it in full screen."""

    ALLOW_MAXIMIZE = True
    BINDINGS = [*hidden_keys({"enter": "accept", "space": "whole_screen"})]  # noqa: RUF012

    def __init__(self, index: int) -> None:
        super().__init__(classes=f"-strand-{index % NUM_COLORS}")
        self.index = index
        self.border_title = str(index + 1)
        self._text = Static(Content("…"))
        self._candidate, self._num_common = Candidate(), 0  # arguments of the last `show`
        self._inside = False
        self._same_as: int | None = None

    def compose(self) -> ComposeResult:
        yield self._text

    def on_mount(self) -> None:
        self.anchor()  # scroll along with the growing text

    def end(self) -> None:
        """Scroll back to the beginning of the complete text, unless the reader has scrolled."""
        if self.is_anchored:
            was_at_end = self.scroll_y >= self.max_scroll_y
            self.anchor(False)
            if was_at_end:
                self.scroll_home(animate=False)

    def show(self, candidate: Candidate, num_common: int, inside: bool, same_as: int | None = None) -> None:
        """Show the candidate without its first ``num_common`` characters, which are shown once above all cards.

        Args:
            inside: whether the candidate's text begins inside the model's <think> section.
            same_as: index of an earlier candidate with the same text, if any.
        """
        self._candidate, self._num_common, self._inside, self._same_as = candidate, num_common, inside, same_as
        whole = text_of(candidate, inside)
        common, text = whole[:num_common], whole[num_common:]
        if same_as is not None and not self.is_maximized:
            shown = Content.styled(f"the same as {same_as + 1}", "$text-muted")
        elif not num_common:
            shown = Content(text)
        elif self.is_maximized:  # the line above all cards is hidden
            shown = Content.assemble((common, "$text-muted"), text)
        else:
            shown = Content(f"… {text}")
        update_in_place(self._text, shown)
        depth = "" if candidate.depth is None else f" · {plural(candidate.depth, 'token')} of thought"
        keys = " · Enter accepts · Esc goes back" if self.is_maximized else ""
        self.border_title = f"{self.index + 1}{depth}{keys}"
        self.border_subtitle = candidate_facts(candidate, self.size.width)

    def on_resize(self) -> None:
        self.show(self._candidate, self._num_common, self._inside, self._same_as)

    def on_click(self, event: events.Click) -> None:
        if event.chain == 2:
            self.action_accept()

    def action_accept(self) -> None:
        self.post_message(CommandRequested("accept", str(self.index + 1)))

    def action_whole_screen(self) -> None:
        if self.screen.maximized is None:
            self.screen.maximize(self, container=False)
        else:
            self.screen.minimize()


def text_of(candidate: Candidate, inside: bool = False) -> str:
    """Return a candidate's text for display: the answer, or the reasoning if there is no answer yet.

    ``inside``: the text begins inside the reasoning.
    """
    reasoning, answer = split_reasoning(candidate.text, inside)
    return clean(answer.strip() or reasoning.strip())


def shown_texts(candidates: Sequence[Candidate], inside: bool) -> tuple[str, list[tuple[str, int | None]]]:
    """Return the beginning that candidates share, and for each candidate its text and the index of an equal one.

    The beginning is empty if it is too short to be shown separately. The index is that of the first candidate with the
    same text. It is None if there is none before this candidate, or if one of the two has not ended.
    """
    texts, same_as = [text_of(each, inside) for each in candidates], list[int | None]()
    for index, text in enumerate(texts):
        first = texts.index(text)
        ended = all(candidates[each].finish_reason is not None for each in (first, index))
        same_as.append(first if first < index and ended and text else None)
    pairs = list(zip(texts, same_as, strict=True))
    own = [text for text, same in pairs if same is None]
    return "".join(own[:1])[: num_common(own)], pairs


def common_line(beginning: str) -> str:
    """Return the line above all cards, which shows the common ``beginning``. It is empty without one."""
    whole = beginning.rstrip()
    shown = whole if len(whole) <= _MOST_COMMON else "… " + whole[-_MOST_COMMON:]
    return f"all begin with: {shown}" if shown else ""


def num_common(texts: Sequence[str]) -> int:
    """Return the number of characters that all texts share at their beginning, up to the end of a word.

    Return 0 if these characters are too few to be shown separately.
    """
    if len(texts) < 2:
        return 0
    length = min(common_length(texts[0], each) for each in texts)
    while length and not (texts[0][length - 1].isspace() or all(len(each) == length for each in texts)):
        length -= 1
    return length if length >= _LEAST_COMMON else 0


def candidate_facts(candidate: Candidate, width: int) -> str:
    """Return ``score -0.54 · 23 tokens · log p -12.3``: as many of these items as fit ``width`` cells.

    ``✓`` stands for the finish reason "stop", any other finish reason is written out. Tokens that were computed for
    another candidate are counted separately: ``23 tokens · ✓ · 512 shared``.
    """
    words = [] if candidate.score is None else [f"score {candidate.score:.3f}"]
    words.append(plural(candidate.num_tokens - candidate.num_shared, "token"))
    if candidate.finish_reason is not None:
        words.append("✓" if candidate.finish_reason == "stop" else candidate.finish_reason)
    if candidate.num_shared:
        words.append(f"{count(candidate.num_shared)} shared")
    if candidate.logprob is not None:
        words.append(f"log p {candidate.logprob:.1f}")
    while len(words) > 1 and sum(len(word) + 3 for word in words) - 3 > width - 2:  # the frame takes two columns
        words.pop()
    return " · ".join(words)


class CandidatesView(Vertical):
    """Shows the candidates of an answer, in columns if there is space, and a summary line below them."""

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
        """Return the index of the focused card; 0 if none is focused."""
        return next((card.index for card in self._cards if card.has_focus), 0)

    async def on_mount(self) -> None:
        if self.answer.is_open:
            await self.flush()
        else:
            await self.end()

    def on_resize(self, event: events.Resize) -> None:
        columns = max(1, min(len(self._cards), event.size.width // _NARROWEST))
        self.query_one(Grid).styles.grid_size_columns = columns
        self._cards[-1].styles.column_span = columns - (len(self._cards) - 1) % columns  # fill the last row

    async def end(self) -> None:
        await self.flush()
        for card in self._cards:
            card.end()

    async def flush(self, lines_ahead: int = 0) -> None:
        """Show the current state of the candidates.

        ``lines_ahead`` has no effect here. Only `AnswerView.flush` uses it.
        """
        candidates = self.answer.candidates
        inside = self.answer.in_reasoning
        common, texts = shown_texts(candidates, inside)
        self._common.display = bool(common)
        update_in_place(self._common, Content(common_line(common)))
        for card, candidate, (_, same) in zip(self._cards, candidates, texts, strict=False):
            card.show(candidate, len(common), inside, same)
        self.update_summary()

    def update_summary(self) -> None:
        answer, last = self.answer, min(9, len(self._cards))
        done = sum(candidate.finish_reason is not None for candidate in answer.candidates)
        if answer.time_to_first_token is None and answer.is_open:
            text = summary(answer)
        elif not answer.is_open:
            text = f"1 … {last}, double click or Tab, Enter: accept · Space: full screen"
        elif done == len(self._cards):  # beam search may continue, see `BeamSearchParams.early_stopping`
            text = f"searching for better answers · 1 … {last} accepts one and ends the search"
        else:
            text = f"{done} of {len(self._cards)} have ended · 1 … {last} accepts one and stops the others"
        update_in_place(self._summary, Content(text))
