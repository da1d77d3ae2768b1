"""The position of one sequence in its grammar."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from minillm.grammar.vocabulary import Vocabulary
from minillm.text.safe import clean_line

if TYPE_CHECKING:
    import llguidance

_NOTHING_ALLOWED = (
    "no token is possible any more: together the request's parameters and its grammar exclude all of them"
)


@dataclass
class Family:
    """State that all copies of a matcher share: in the library, they share one lexer and the limits of its size."""

    has_failed: bool = False  # possibly by the shared lexer: a new matcher must be compiled


class Matcher:
    """A position in a grammar. `minillm.grammar.compiler` creates one at the beginning of a text.

    Attributes:
        state: the library's matcher.
        family: shared by all copies of this matcher.
        error: why the matcher cannot continue, or None. Once set, it stays.
    """

    __slots__ = ("error", "family", "state", "vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, state: llguidance.LLMatcher, family: Family, error: str | None = None
    ) -> None:
        self.vocabulary, self.state, self.family, self.error = vocabulary, state, family, error

    def copy(self) -> Self:
        """Return an independent matcher at the same position."""
        return type(self)(self.vocabulary, self.state.deep_copy(), self.family, self.error)

    @property
    def may_stop(self) -> bool:
        """Return whether the text so far is complete, so that the answer may end here. It may also continue."""
        return self.error is None and self.state.is_accepting()

    def is_complete(self, end_ids: Collection[int]) -> bool:
        """Return whether the text is complete and nothing can follow, so that generation can stop without an end token.

        ``end_ids`` are the request's end tokens. If there are any, a text counts as complete only if the library has
        stopped, because the model may still generate an end token.
        """
        return self.may_stop and (self.state.is_stopped() or (not end_ids and self.is_exhausted))

    @property
    def is_exhausted(self) -> bool:
        """Return whether no token may follow. This takes as long as computing a mask."""
        words = np.zeros((1, self.vocabulary.num_words), dtype=np.uint32)
        self.vocabulary.fill([self.state], words)
        return not words.any()

    def spellings(self) -> list[int]:
        """Return all tokens that may follow if the grammar forces the next bytes, else an empty list.

        Forced bytes can be spelled with different tokens. A mask then has only the first token of one spelling, while
        this list has the first tokens of all spellings.
        """
        text = self.state.compute_ff_bytes()
        return [each for each in self.vocabulary.along(text) if self.state.validate_tokens([each])] if text else []

    def advance(self, token_id: int, *, ends: bool = False) -> None:
        """Advance by a token. ``ends``: the token ends the text. Sets `error` if the grammar does not allow it."""
        if self.error is not None:
            return
        if ends:
            allowed = self.may_stop
        else:
            allowed = token_id < self.vocabulary.size and self.state.consume_token(token_id)
        if not allowed:
            self.note_error()

    def note_error(self) -> None:
        """Set `error` to the library's error. If the library has none, report that no token is allowed."""
        reason = self.state.get_error().split("\n")[0]
        if not reason or reason.startswith("Parser Error: token "):  # the token was not allowed
            self.error = _NOTHING_ALLOWED
        else:
            self.error, self.family.has_failed = f"the grammar failed: {clean_line(reason)}", True
