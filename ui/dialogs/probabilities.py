"""An answer's tokens, coloured by how probable the model held each, with the alternatives at the cursor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region
from textual.widgets import Static

from minillm.service.messages import TokenChoice
from minillm.text.safe import clean
from minillm.ui.dialogs.dialog import Dialog
from minillm.ui.numbers import bar

# Probability from which a token looks so; the unlikely ones are underlined, too, for terminals without colour.
_LOOKS = ((0.9, "$text-muted"), (0.5, "$text-success"), (0.1, "$text-warning"), (0.0, "$text-error underline"))
_LONGEST = 2000  # tokens that are laid out at a time


class ProbabilityScreen(Dialog[None]):
    """Arrows move the cursor from token to token."""

    BINDINGS = [  # noqa: RUF012
        Binding("left", "move(-1)", "Previous token", priority=True),
        Binding("right", "move(1)", "Next token", priority=True),
        Binding("home", "move(-1000000)", "First", priority=True, show=False),
        Binding("end", "move(1000000)", "Last", priority=True, show=False),
        Binding("n", "unlikely", "Next unlikely"),
    ]

    def __init__(self, tokens: Sequence[TokenChoice]) -> None:
        super().__init__()
        self._tokens = tokens[:_LONGEST]
        self._cursor = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "probabilities"
            with VerticalScroll(id="tokens", can_focus=False):
                yield Static(id="token-text")
            yield Static(id="alternatives")
            yield Static(_legend(), classes="hint")

    def on_mount(self) -> None:
        self._show()

    def action_move(self, step: int) -> None:
        self._cursor = max(0, min(len(self._tokens) - 1, self._cursor + step))
        self._show()

    def action_unlikely(self) -> None:
        """On to the next token below one half."""
        after = range(self._cursor + 1, len(self._tokens))
        self._cursor = next((i for i in after if self._tokens[i].logprob < math.log(0.5)), self._cursor)
        self._show()

    def _show(self) -> None:
        parts = []
        for number, token in enumerate(self._tokens):
            look = probability_look(token.logprob)
            parts.append((shown_token(token.text), f"{look} reverse" if number == self._cursor else look))
        self.query_one("#token-text", Static).update(Content.assemble(*parts))
        token = self._tokens[self._cursor]
        lines = [
            Content.assemble(
                (f"  {_visible(text):<18}", "bold" if text == token.text else ""),
                f"{math.exp(logprob):>7.1%} {bar(math.exp(logprob), 20)}",
            )
            for text, logprob in zip(token.top_texts, token.top_logprobs, strict=True)
        ]
        if token.text not in token.top_texts:
            lines.append(
                Content.assemble((f"  {_visible(token.text):<18}", "bold"), f"{math.exp(token.logprob):>7.1%}")
            )
        heading = Content(f"token {self._cursor + 1} of {len(self._tokens)} · log p {token.logprob:.2f}")
        self.query_one("#alternatives", Static).update(Content("\n").join([heading, *lines]))
        # Roughly where the cursor's line is: as far down as its share of the characters before it.
        area = self.query_one("#tokens", VerticalScroll)
        before = "".join(shown_token(token.text) for token in self._tokens[: self._cursor])
        width = max(1, area.size.width)
        line = sum(1 + len(each) // width for each in before.split("\n")) - 1
        area.scroll_to_region(Region(0, max(0, line - 1), 1, 3), animate=False)


def probability_look(logprob: float) -> str:
    """The style of a token of this log-probability."""
    probability = math.exp(min(0.0, logprob))
    return next(look for least, look in _LOOKS if probability >= least)


def shown_token(text: str) -> str:
    """A token in running text: line breaks are seen and made."""
    return clean(text).replace("\n", "⏎\n").replace("\t", "⇥")


def _visible(text: str) -> str:
    shown = clean(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return shown if len(shown) <= 18 else shown[:17] + "…"


def _legend() -> Content:
    names = ("90 %", "50 %", "10 %", "less")
    looks = [(f"from {name}" if name != "less" else name, look) for name, (_, look) in zip(names, _LOOKS, strict=True)]
    parts = [part for look in looks for part in (look, "  ")]
    return Content.assemble(*parts, "← → move · n: next below one half · Escape closes")
