"""Several answers side by side: samples, or beams as they overtake each other. One is accepted, the others go."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Grid, Vertical
from textual.content import Content
from textual.widgets import Static

from minillm.text.safe import clean
from minillm.ui.chat.conversation import Answer, Candidate
from minillm.ui.chat.reasoning import split_reasoning
from minillm.ui.drawn import update_in_place
from minillm.ui.messages import CommandAsked
from minillm.ui.numbers import plural

_NARROWEST = 26  # columns of a card
_MOST_SHOWN = 1500  # characters of a card: the end of a long text, for that is where it grows


class CandidateCard(Static, can_focus=True):
    """One candidate. Enter or a click accepts it."""

    def __init__(self, index: int) -> None:
        super().__init__(Content("…"))
        self.index = index
        self.border_title = str(index + 1)

    def show(self, candidate: Candidate) -> None:
        reasoning, answer = split_reasoning(candidate.text)
        text = clean(answer.strip() or reasoning.strip())
        update_in_place(self, Content(text if len(text) <= _MOST_SHOWN else "… " + text[-_MOST_SHOWN:]))
        self.border_subtitle = candidate_facts(candidate)
        self.set_class(candidate.finish_reason is not None, "-finished")

    def on_click(self) -> None:
        self.post_message(CommandAsked("accept", str(self.index + 1)))

    def on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            self.post_message(CommandAsked("accept", str(self.index + 1)))


def candidate_facts(candidate: Candidate) -> str:
    """``23 tokens · log p -12.3 · score -0.54``."""
    words = [plural(candidate.num_tokens, "token")]
    if candidate.logprob is not None:
        words.append(f"log p {candidate.logprob:.1f}")
    if candidate.score is not None:
        words.append(f"score {candidate.score:.2f}")
    if candidate.finish_reason is not None:
        words.append("✓" if candidate.finish_reason == "stop" else candidate.finish_reason)
    return " · ".join(words)


class CandidatesView(Vertical):
    """The candidates of an answer, in columns where there is room, and below them how it goes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self._cards = [CandidateCard(index) for index in range(len(answer.candidates))]
        self._summary = Static(Content("reading the prompt …"), classes="summary")

    def compose(self) -> ComposeResult:
        with Grid():
            yield from self._cards
        yield self._summary

    def on_mount(self) -> None:
        self.refresh_cards()

    def on_resize(self, event: events.Resize) -> None:
        columns = max(1, min(len(self._cards), event.size.width // _NARROWEST))
        self.query_one(Grid).styles.grid_size_columns = columns

    def refresh_cards(self) -> None:
        """Show the candidates as they stand now."""
        for card, candidate in zip(self._cards, self.answer.candidates, strict=False):
            card.show(candidate)
        done = sum(candidate.finish_reason is not None for candidate in self.answer.candidates)
        if self.answer.time_to_first_token is None and self.answer.is_open:
            return
        if self.answer.is_open:
            text = f"{done} of {len(self._cards)} have ended · 1, 2 … accepts one and stops the others"
        else:
            text = f"1 … {min(9, len(self._cards))}, a click, or Tab and Enter accepts one; the others are freed"
        update_in_place(self._summary, Content(text))
