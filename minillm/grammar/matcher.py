"""The position of one sequence in its grammar."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from minillm.errors import RequestError
from minillm.grammar.vocabulary import Vocabulary
from minillm.text.safe import clean_line

if TYPE_CHECKING:
    import llguidance

_NOTHING_ALLOWED = RequestError(
    "no token is possible any more: together the request's parameters and its grammar exclude all of them",
    is_usage=True,
)


@dataclass
class Family:
    """The state that a matcher and all its copies share. In llguidance, the copies share one lexer with size limits."""

    has_failed: bool = False  # the shared lexer may have failed, so a new matcher must be compiled


class Matcher:
    """The position of one text in a grammar. `minillm.grammar.compiler` creates matchers at the beginning of a text.

    Attributes:
        state: the matcher of the library llguidance.
        family: the state that all copies of this matcher share.
        error: why the matcher cannot continue, or None. An error is never removed.
    """

    __slots__ = ("error", "family", "state", "vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, state: llguidance.LLMatcher, family: Family, error: RequestError | None = None
    ) -> None:
        self.vocabulary, self.state, self.family, self.error = vocabulary, state, family, error

    def copy(self) -> Self:
        """Return an independent matcher at the same position."""
        return type(self)(self.vocabulary, self.state.deep_copy(), self.family, self.error)

    @property
    def may_stop(self) -> bool:
        """Return whether the text so far is complete, so that the answer may end here. The text may also continue."""
        return self.error is None and self.state.is_accepting()

    def is_complete(self, end_ids: Collection[int]) -> bool:
        """Return whether the text is complete and nothing can follow it. Generation can then stop without an end token.

        ``end_ids`` are the request's end tokens. If the request has end tokens, the result may be False although
        nothing can follow. This saves computing a mask: the model generates an end token as the next token.
        """
        return self.may_stop and (self.state.is_stopped() or (not end_ids and self.is_exhausted))

    @property
    def is_exhausted(self) -> bool:
        """Return whether no token may follow. This takes as long as the computation of a mask."""
        words = np.zeros((1, self.vocabulary.num_words), dtype=np.uint32)
        self.vocabulary.fill([self.state], words)
        return not words.any()

    def spellings(self) -> list[int]:
        """Return all tokens that may come next, if the grammar forces the next bytes. Otherwise return an empty list.

        Several sequences of tokens can spell the forced bytes. A mask allows only the first token of one of these
        spellings. The returned list has the first tokens of all spellings.
        """
        text = self.state.compute_ff_bytes()
        return [each for each in self.vocabulary.along(text) if self.state.validate_tokens([each])] if text else []

    def advance(self, token_id: int, *, ends: bool = False) -> None:
        """Advance by a token. ``ends``: the token ends the text. If the grammar forbids the token, set `error`."""
        if self.error is not None:
            return
        if ends:
            allowed = self.may_stop
        else:
            allowed = token_id < self.vocabulary.size and self.state.consume_token(token_id)
        if not allowed:
            self.note_error()

    def note_error(self) -> None:
        """Set `error` to the error that llguidance reports.

        If it reports none, the error says that no token is allowed.
        """
        reason = self.state.get_error().split("\n")[0]
        if not reason or reason.startswith("Parser Error: token "):  # the token was not allowed
            self.error = _NOTHING_ALLOWED
        else:
            self.error = RequestError(f"the grammar failed: {clean_line(reason)}", is_usage=True)
            self.family.has_failed = True
