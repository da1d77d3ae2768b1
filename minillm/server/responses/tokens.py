"""Find the tokens of each piece of an answer's text, for log-probabilities."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minillm.service.call_messages import Completion, Text, Token


@dataclass
class TokenFinder:
    """Finds the tokens of the pieces of an answer's text. Both arrive in order. Some text belongs to no piece.

    A token belongs to a piece if its bytes are a part of the piece's text. A token without text belongs to the item
    around it.
    """

    _tokens: list[tuple[Token, int, int]] = field(default_factory=list)  # of no piece so far, with start and end
    _text: str = ""  # text of the tokens that no piece has taken
    _at: int = 0  # position of `_text` in the answer
    _num_old: int = 0  # number of characters of `_text` that had arrived before the last call of `add`
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def add(self, tokens: list[Token], *, is_last: bool) -> None:
        """Add the next tokens. ``is_last``: no more tokens follow."""
        self._num_old = len(self._text)
        for token in tokens:
            start = self._at + len(self._text)
            self._text += self._decoder.decode(token.raw)
            is_open = bool(self._decoder.getstate()[0])  # the next character begins with bytes of this token
            self._tokens.append((token, start, self._at + len(self._text) + is_open))
        if is_last:
            self._text += self._decoder.decode(b"", True)

    def skip_call(self) -> None:
        """Skip the text of a call, which ended in the tokens of the last `add`."""
        self._drop(self._num_old)
        self._num_old = 0

    def take(self, text: str, *, continues: bool = False) -> list[Token]:
        """Return the tokens of ``text``, which is the next piece. ``continues``: the last piece is of the same item."""
        text = text if text in self._text else text.removeprefix("\n")  # a reader adds a line break after a call
        begin, end = self._find(text, continues)
        first, last = self._at + begin, self._at + end
        before = [each for each in self._tokens if each[1] < last]
        self._tokens = self._tokens[len(before) :]
        self._drop(end)
        return [token for token, _, ends in before if continues or ends > first]

    def skip(self, text: str) -> None:
        """Skip ``text``, the next piece. A token that also has text after the piece can belong to the next one."""
        self._drop(self._find(text, continues=False)[1])

    def _find(self, text: str, continues: bool) -> tuple[int, int]:
        """Return begin and end of the next piece in `_text`. Tags before an item's first piece may contain its text."""
        begin = self._text.find(text) if continues else self._text.rfind(text)
        return (begin, begin + len(text)) if begin >= 0 else (0, len(self._text))

    def _drop(self, count: int) -> None:
        """Drop the first ``count`` characters of the text, and their tokens."""
        self._text, self._at = self._text[count:], self._at + count
        self._tokens = [each for each in self._tokens if each[2] > self._at or each[1] == each[2] == self._at]


def by_token(text: Text | Completion) -> list[Text | Completion]:
    """Split a text into one text per token, so that it is read like a stream.

    Return the text itself if its tokens do not begin with it, as in a stream that waits for a stop string.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(token.raw) for token in text.tokens]
    whole = "".join(pieces) + decoder.decode(b"", bool(text.finish_reason))
    if len(pieces) < 2 or not whole.startswith(text.text):
        return [text]
    found: list[Text | Completion] = []
    rest = text.text
    for token, piece in zip(text.tokens[:-1], pieces, strict=False):
        found.append(Text("", text.index, rest[: len(piece)], 0, [token]))
        rest = rest[len(piece) :]
    return [*found, msgspec.structs.replace(text, text=rest, tokens=text.tokens[-1:])]
