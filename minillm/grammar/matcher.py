"""How far one sequence has come in its grammar."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Self

import numpy as np

from minillm.grammar.vocabulary import Vocabulary
from minillm.text.safe import clean_line

if TYPE_CHECKING:
    import llguidance

_NOTHING_ALLOWED = (
    "no token is possible any more: together the request's parameters and its grammar exclude all of them"
)


class Matcher:
    """A place in a grammar. `minillm.grammar.compiler` makes one for the beginning of a text.

    Attributes:
        state: the library's own.
        error: why it can go no further; None while all is well. It stays then.
    """

    __slots__ = ("error", "state", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, state: llguidance.LLMatcher, error: str | None = None) -> None:
        self.vocabulary, self.state, self.error = vocabulary, state, error

    def copy(self) -> Self:
        """Another matcher at this place, which goes on by itself."""
        return type(self)(self.vocabulary, self.state.deep_copy(), self.error)

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

    def advance(self, token_id: int, *, ends: bool = False) -> None:
        """Go on by a token; ``ends`` says that it is not text, but ends it. Sets `error` where that is not allowed."""
        if self.error is not None:
            return
        if ends:
            allowed = self.may_stop
        else:
            allowed = token_id < self.vocabulary.size and self.state.validate_tokens([token_id]) == 1
            allowed = allowed and self.state.consume_token(token_id)
        if self.state.is_error():
            self.note_error()
        elif not allowed:
            self.error = _NOTHING_ALLOWED

    def note_error(self) -> None:
        """Set `error` to the library's own."""
        reason = self.state.get_error().split("\n")[0] or self.state.stop_reason()
        self.error = f"the grammar failed: {clean_line(reason)}"
