"""A sequence's reasoning, token by token, and the limit on its length.

When the reasoning reaches the limit, minillm forces the next tokens, so that they spell a text that closes the
reasoning. Then the answer follows. Where a sequence is in its reasoning is derived from its tokens alone. So forked and
recomputed sequences are right as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

from minillm.errors import MinillmError
from minillm.text.reasoning import CLOSE, OPEN
from minillm.text.tokenizer import Tokenizer

CLOSING = f"\n\nEnough thinking; I will answer now.\n{CLOSE}\n\n"  # the text that is forced at the limit
CLOSED = f"\n\n{CLOSE}\n\n"  # the text that is forced if the limit is 0
NO_LIMIT = 1 << 24  # tokens, more than any context has
_OPEN, _CLOSE = OPEN.encode(), CLOSE.encode()


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around a model's reasoning, as tokens.

    Attributes:
        opening: the id of the opening tag, such as ``<think>``; None if the tag is not one token.
        closing: the ids of the text that is forced when the reasoning limit is reached: a sentence and the closing tag.
        closed: the ids of the text that is forced if the limit is 0: the closing tag.
        spelled: the bytes of both tags by token id; empty unless each tag is one token. The tokenizer's own table has
            no bytes for special tokens.
    """

    tokenizer: Tokenizer
    opening: int | None
    closing: tuple[int, ...]
    closed: tuple[int, ...]
    spelled: dict[int, bytes]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return a model's tags; None if neither its vocabulary nor its chat template has them."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=True, continues=True))

        try:
            tags, closing, closed = (ids(OPEN), ids(CLOSE)), ids(CLOSING), ids(CLOSED)
        except MinillmError:  # the model has no embedding for a tag, or its tokenizer fails
            return None
        are_tokens = all(len(each) == 1 for each in tags) and tags[0] != tags[1]  # not both unknown
        if not are_tokens and CLOSE not in tokenizer.chat_template:
            return None
        spelled = {tags[0][0]: _OPEN, tags[1][0]: _CLOSE} if are_tokens else {}
        return cls(tokenizer, tags[0][0] if are_tokens else None, closing, closed, spelled)

    def text(self, token_id: int) -> bytes:
        """Return the bytes of a token, even if it is a special token for a tag."""
        return self.spelled.get(token_id) or self.tokenizer.token_bytes(token_id)

    def is_open(self, prompt: Sequence[int], end_ids: Collection[int]) -> bool:
        """Return whether a prompt ends inside reasoning. Only the text after the last of ``end_ids`` counts."""
        after = b""
        for token_id in reversed(prompt):
            if token_id in end_ids:
                break
            after = self.text(token_id) + after[: len(_CLOSE)]
            if _CLOSE in after:
                return False
            if _OPEN in after:
                return True
        return False


class _Stage(Enum):
    START = auto()  # nothing but white space so far, or a part of the opening tag
    INSIDE = auto()  # the next token may continue the reasoning
    CLOSING = auto()  # the limit is reached, and the next token is forced
    OVER = auto()  # the next token belongs to the answer


class ReasoningPosition:
    """The position of a sequence in its reasoning.

    Methods get all tokens of the sequence, including the prompt, as ``token_ids``. They describe the token that comes
    next, after ``token_ids``.

    Attributes:
        first: index of the first token of reasoning.
        count: number of reasoning tokens so far.

    Args:
        limit: maximum number of tokens between the tags. Tags and forced tokens do not count.
        is_open: the prompt ends inside reasoning.
        first: number of prompt tokens.
        has_grammar: the answer has a grammar. Then the first generated token begins the reasoning or the answer, unless
            ``is_open``.
    """

    def __init__(
        self, tags: ReasoningTags, limit: int, *, is_open: bool, first: int, has_grammar: bool = False
    ) -> None:
        self.tags, self.limit, self.first, self.count = tags, limit, first, 0
        self._seen, self._has_grammar, self._num_forced, self._tail = first, has_grammar, 0, b""
        self._stage = _Stage.START
        if is_open:
            self._begin()

    def copy(self, limit: int | None = None) -> Self:
        """Return an independent copy at this position. ``limit`` is the limit of the copy; None: the same limit.

        If `count` has reached the copy's limit already, the next token is forced.
        """
        other = copy(self)
        if limit is not None:
            other.limit = limit
            if other._stage is _Stage.INSIDE and other.count >= limit:
                other._stage = _Stage.CLOSING
        return other

    def depth(self, token_ids: list[int]) -> int | None:
        """Return the number of reasoning tokens so far, or None unless the next token may continue the reasoning."""
        return self.count if self._follow(token_ids) is _Stage.INSIDE else None

    def is_inside(self, token_ids: list[int]) -> bool:
        """Return whether the next token belongs to the reasoning or to the text that closes it."""
        return self._follow(token_ids) in (_Stage.INSIDE, _Stage.CLOSING)

    def may_open(self, token_ids: list[int]) -> int | None:
        """Return the id of the opening tag if the next token may be this tag although the grammar forbids it.

        Return None if the answer has no grammar, or if the next token may not open the reasoning.
        """
        starts = self._follow(token_ids) is _Stage.START
        return self.tags.opening if starts and self._has_grammar else None

    def covers(self, token_ids: list[int], token_id: int) -> bool:
        """Return whether ``token_id``, as the next token, would belong to the reasoning or to one of the tags around
        it.
        """
        return self.is_inside(token_ids) or token_id == self.may_open(token_ids)

    def forced(self, token_ids: list[int]) -> int | None:
        """Return the id to which the next token is forced; None if it is not forced."""
        return self._forced_ids[self._num_forced] if self._follow(token_ids) is _Stage.CLOSING else None

    def num_free(self, token_ids: list[int]) -> int:
        """Return the minimum number of next tokens that are not forced, whichever tokens are generated."""
        stage = self._follow(token_ids)
        if stage is _Stage.OVER:
            return NO_LIMIT
        return {_Stage.START: 1 + self.limit, _Stage.INSIDE: self.limit - self.count}.get(stage, 0)

    @property
    def _forced_ids(self) -> tuple[int, ...]:
        return self.tags.closing if self.limit else self.tags.closed

    def _begin(self) -> None:
        self._stage = _Stage.INSIDE if self.limit else _Stage.CLOSING

    def _follow(self, token_ids: list[int]) -> _Stage:
        """Process the tokens that were added since the last call. Return the stage in which the next token is
        generated.
        """
        while self._seen < len(token_ids) and self._stage is not _Stage.OVER:
            self._push(token_ids[self._seen])
            self._seen += 1
        return self._stage

    def _push(self, token_id: int) -> None:
        if self._stage is _Stage.CLOSING:
            self._num_forced += 1
            if self._num_forced == len(self._forced_ids):
                self._stage = _Stage.OVER
            return
        tail = self._tail + self.tags.text(token_id)
        if self._stage is _Stage.START:
            tail = tail.lstrip()
            if tail.startswith(_OPEN):
                self.first = self._seen + 1
                self._begin()
                tail = tail.removeprefix(_OPEN)  # a token such as ``></`` is in both tags
            elif not _OPEN.startswith(tail) or self._has_grammar:
                self._stage = _Stage.OVER
        elif _CLOSE in tail:
            self._stage = _Stage.OVER
        else:
            self.count += 1
            tail = tail[1 - len(_CLOSE) :]
            if self.count == self.limit:
                self._stage = _Stage.CLOSING
        self._tail = tail


def reasoning(tags: ReasoningTags, output: list[int], *, is_open: bool) -> ReasoningPosition:
    """Return how much of ``output`` is reasoning, as a `ReasoningPosition`.

    ``output`` has all generated tokens of a sequence. The caller reads the attributes ``first`` and ``count``. No limit
    applies, so the text that the limit forced counts as reasoning.
    """
    position = ReasoningPosition(tags, NO_LIMIT, is_open=is_open, first=0)
    position._follow(output)
    return position
