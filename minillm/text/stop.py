"""The text of a completion, token by token: decoding, stop strings, and the part that can already be shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Self

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class OutputText:
    """The text of one completion: decodes tokens, and searches for stop strings.

    A stop string ends the completion if a token after the first ``min_tokens`` completes it. The stop string may begin
    earlier. Text that could begin a stop string is held back; all other text is shown at once. Shown text cannot be
    part of a later match, so only the held text is searched.
    """

    def __init__(self, detokenizer: StreamingDetokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Begin with an empty text. The first of ``stops`` to match after ``min_tokens`` tokens ends it."""
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._not_yet = min_tokens  # number of next tokens that must not complete a stop string
        self._held = ""
        self._immune = 0  # characters of the held text in which no match may end
        self._shown: list[str] = []
        self.matched: str | None = None  # the stop string that has ended the completion

    def push(self, token_id: int) -> str:
        """Add a token; return the text that can be shown now, which is empty after a stop string has matched."""
        self._not_yet -= 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the rest of the text, including text that was held back. Call it after the last token."""
        return self._take(self._detokenizer.finish()) + self.cut_off()

    def cut_off(self) -> str:
        """Return the text that was held back, without an incomplete character. Call it for an aborted completion."""
        return self._release(len(self._held))

    @property
    def text(self) -> str:
        """The shown text, without stop strings."""
        return "".join(self._shown)

    def copy(self) -> Self:
        """Return an independent copy that continues from here."""
        other = copy(self)
        other._detokenizer, other._shown = self._detokenizer.copy(), self._shown.copy()
        return other

    def _take(self, text: str) -> str:
        """Add decoded text; return the part that no stop string can still match."""
        if self.matched is not None:
            return ""
        self._held += text
        if not self._stops:
            return self._release(len(self._held))
        if self._not_yet >= 0:
            self._immune = len(self._held)
        # Take the match that ends first, and the longest one of those: this does not depend on the split into tokens.
        match = min((found for stop in self._stops if (found := self._find(stop)) is not None), default=None)
        if match is None:
            return self._release(len(self._held) - max(_overlap(self._held, stop) for stop in self._stops))
        end, _, self.matched = match
        shown = self._release(end - len(self.matched))
        self._held = ""
        return shown

    def _release(self, count: int) -> str:
        """Show the first ``count`` characters of the held text."""
        shown, self._held = self._held[:count], self._held[count:]
        self._immune = max(0, self._immune - count)
        if shown:
            self._shown.append(shown)
        return shown

    def _find(self, stop: str) -> tuple[int, int, str] | None:
        """Find the first match of ``stop`` after the immune text.

        Return a sort key (end, -length, ``stop``), or None.
        """
        at = self._held.find(stop, max(0, self._immune + 1 - len(stop)))
        return None if at < 0 else (at + len(stop), -len(stop), stop)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class StreamingDetokenizer:
    """Decodes one sequence token by token. Characters are never split, and none is lost.

    Every token stands for some bytes. Streaming needs only a table of these bytes and an incremental UTF-8 decoder. The
    bytes of an incomplete character wait for the next token, and an invalid sequence becomes U+FFFD.

    Args:
        table: the bytes of each token id. Larger ids have none: embeddings are often padded.
        prompt_ids: the beginning of the sequence. It is not decoded again, but if it ends inside a character, that
            character is returned once it is complete.
        strips: maximum number of spaces to drop at the beginning of the whole text, prompt included, and at its end.
            SentencePiece adds one before the first word.
    """

    def __init__(
        self, table: Sequence[bytes], prompt_ids: Sequence[int] = (), *, strips: tuple[int, int] = (0, 0)
    ) -> None:
        """Begin after the prompt. If its last character is incomplete, keep that character's bytes."""
        self._table = table
        self._decoder = _Utf8Decoder("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= 4:  # the longest character
                break
        before = _Utf8Decoder("replace")
        before.decode(tail)
        self._decoder.decode(before.getstate()[0])  # the bytes of an incomplete character
        self._leading = 0 if tail else strips[0]
        self._trailing, self._held = strips[1], ""

    def copy(self) -> Self:
        """Return an independent copy that continues from here."""
        other = copy(self)
        other._decoder = _Utf8Decoder("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> str:
        """Return the text that this token completes. It is empty if the last character is still incomplete."""
        return self._trim(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """Return the rest after the last token. An incomplete character becomes U+FFFD."""
        text = self._trim(self._decoder.decode(b"", final=True))
        self._held = ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id outside the table."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _trim(self, text: str) -> str:
        """Drop the spaces that ``strips`` asks for, and return the rest of ``text``.

        Spaces at its end are held back, because they are dropped only if no more text follows.
        """
        while self._leading and text:
            self._leading -= 1
            if text[0] != " ":
                self._leading = 0
            else:
                text = text[1:]
        if self._trailing:
            text = self._held + text
            end = max(len(text.rstrip(" ")), len(text) - self._trailing)
            text, self._held = text[:end], text[end:]
        return text
