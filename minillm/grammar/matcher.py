"""How far one sequence has come in its grammar."""

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
    """All copies of a matcher: the library has them share one lexer, and with it the bounds of its size."""

    has_failed: bool = False  # it may be the lexer's fault: a new matcher must be compiled


class Matcher:
    """A place in a grammar. `minillm.grammar.compiler` makes one for the beginning of a text.

    Attributes:
        state: the library's own.
        family: shared by the copies.
        error: why it can go no further; None while all is well. It stays then.
    """

    __slots__ = ("error", "family", "state", "vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, state: llguidance.LLMatcher, family: Family, error: str | None = None
    ) -> None:
        self.vocabulary, self.state, self.family, self.error = vocabulary, state, family, error

    def copy(self) -> Self:
        """Another matcher at this place, which goes on by itself."""
        return type(self)(self.vocabulary, self.state.deep_copy(), self.family, self.error)

    @property
    def may_stop(self) -> bool:
        """Whether the text so far is complete."""
        return self.error is None and self.state.is_accepting()

    def is_complete(self, end_ids: Collection[int]) -> bool:
        """Whether the text is complete, and nothing may follow but one of ``end_ids``, which needs no waiting for."""
        return self.may_stop and (self.state.is_stopped() or (not end_ids and self.is_exhausted))

    @property
    def is_exhausted(self) -> bool:
        """Whether no token may follow; finding it out takes as long as a mask."""
        words = np.zeros((1, self.vocabulary.num_words), dtype=np.uint32)
        self.vocabulary.fill([self.state], words)
        return not words.any()

    def spellings(self) -> list[int]:
        """Return the tokens that may follow where only one text can; a mask has the first of one spelling alone."""
        text = self.state.compute_ff_bytes()
        return [each for each in self.vocabulary.along(text) if self.state.validate_tokens([each])] if text else []

    def advance(self, token_id: int, *, ends: bool = False) -> None:
        """Go on by a token; ``ends`` says that it is not text, but ends it. Sets `error` where that is not allowed."""
        if self.error is not None:
            return
        if ends:
            allowed = self.may_stop
        else:
            allowed = token_id < self.vocabulary.size and self.state.consume_token(token_id)
        if not allowed:
            self.note_error()

    def note_error(self) -> None:
        """Set `error`: the library's own, or that no token is left."""
        reason = self.state.get_error().split("\n")[0]
        if not reason or reason.startswith("Parser Error: token "):  # it was given one that may not follow
            self.error = _NOTHING_ALLOWED
        else:
            self.error, self.family.has_failed = f"the grammar failed: {clean_line(reason)}", True
