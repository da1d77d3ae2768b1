"""The text of a completion, token by token: decoding, stop strings, and the part that can already be shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Self

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class OutputText:
    """The text of one completion: decodes tokens, and searches for stop strings.

    The completion ends at the first match of a stop string. A match that ends within the first ``min_tokens`` tokens is
    ignored. Text that could be the beginning of a stop string is *buffered*. All other text is *shown*, which means
    that `push` returns it. Shown text cannot be part of a later match, so only the buffered text is searched.
    """

    def __init__(self, detokenizer: StreamingDetokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Begin with an empty text. ``stops`` are the stop strings.

        A match that ends within the first ``min_tokens`` tokens is ignored.
        """
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._not_yet = min_tokens  # number of next tokens in which no match may end
        self._buffer = ""
        self._immune = 0  # number of characters at the beginning of the buffered text in which no match may end
        self._shown: list[str] = []
        self.matched: str | None = None  # the stop string that has ended the completion

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that can be shown now. It is empty after a stop string has matched."""
        self._not_yet -= 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the remaining text, including text that was held back. Call this after the last token."""
        return self._take(self._detokenizer.finish()) + self.cut_off()

    def cut_off(self) -> str:
        """Return the text that was held back because a stop string might follow. An incomplete character is dropped.

        Call this for an aborted completion.
        """
        return self._release(len(self._buffer))

    @property
    def text(self) -> str:
        """The text shown so far, without stop strings."""
        return "".join(self._shown)

    def copy(self) -> Self:
        """Return an independent copy that continues from here."""
        other = copy(self)
        other._detokenizer, other._shown = self._detokenizer.copy(), self._shown.copy()
        return other

    def _take(self, text: str) -> str:
        """Add decoded text. Return the text that can be shown now: the part that cannot belong to a later match."""
        if self.matched is not None:
            return ""
        self._buffer += text
        if not self._stops:
            return self._release(len(self._buffer))
        if self._not_yet >= 0:
            self._immune = len(self._buffer)
        # Take the match that ends first, and of several such matches the longest. This choice does not depend on how
        # the text is split into tokens.
        match = min((found for stop in self._stops if (found := self._find(stop)) is not None), default=None)
        if match is None:
            return self._release(len(self._buffer) - max(overlap(self._buffer, stop) for stop in self._stops))
        end, _, self.matched = match
        shown = self._release(end - len(self.matched))
        self._buffer = ""
        return shown

    def _release(self, count: int) -> str:
        """Move the first ``count`` characters from the buffered text to the shown text, and return them."""
        shown, self._buffer = self._buffer[:count], self._buffer[count:]
        self._immune = max(0, self._immune - count)
        if shown:
            self._shown.append(shown)
        return shown

    def _find(self, stop: str) -> tuple[int, int, str] | None:
        """Find the first match of ``stop`` in the buffered text. Ignore matches that end within ``min_tokens`` tokens.

        Return (end, -length, ``stop``) of the match, or None. The caller sorts the matches of all stop strings by this
        key: the smallest key is the match that ends the completion.
        """
        at = self._buffer.find(stop, max(0, self._immune + 1 - len(stop)))
        return None if at < 0 else (at + len(stop), -len(stop), stop)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that is also a suffix of ``text``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class StreamingDetokenizer:
    """Decodes one sequence token by token. A character is returned only when it is complete, and no character is lost.

    Every token stands for some bytes. Streaming needs only a table of these bytes and an incremental UTF-8 decoder. The
    bytes of an incomplete character wait for the next token. An invalid byte sequence becomes U+FFFD.

    Args:
        table: the bytes of each token, by id. Ids beyond the table, as in a padded embedding, have no bytes.
        prompt_ids: the tokens of the prompt, which are not returned. If the prompt ends inside a character, this
            character is returned once it is complete.
        strips: maximum numbers of spaces to drop at the beginning and at the end of the whole text, prompt included.
            SentencePiece adds a space before the first word.
    """

    def __init__(
        self, table: Sequence[bytes], prompt_ids: Sequence[int] = (), *, strips: tuple[int, int] = (0, 0)
    ) -> None:
        """Begin after the prompt. If the prompt's last character is incomplete, keep the bytes of this character."""
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
        self._trailing, self._buffer = strips[1], ""

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
        """Return the rest of the text after the last token. An incomplete character becomes U+FFFD."""
        text = self._trim(self._decoder.decode(b"", final=True))
        self._buffer = ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id outside the table."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _trim(self, text: str) -> str:
        """Return ``text`` without the leading and trailing spaces that ``strips`` says to drop.

        Spaces at the end of ``text`` are held back until more text arrives, because only the last spaces of all are
        dropped.
        """
        while self._leading and text:
            self._leading -= 1
            if text[0] != " ":
                self._leading = 0
            else:
                text = text[1:]
        if self._trailing:
            text = self._buffer + text
            end = max(len(text.rstrip(" ")), len(text) - self._trailing)
            text, self._buffer = text[:end], text[end:]
        return text
