"""The text of a completion as its tokens come: its characters, its end, and the part that may be shown before."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Self

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class OutputText:
    """The text of one completion, token by token: decoded, searched for stop strings, held back where one may begin.

    A stop string ends the completion if a token behind the first ``min_tokens`` completes it, wherever it begins. Text
    that could be the beginning of one is held back; all else is shown at once. Text that has been shown can be part of
    no later match, so only the held text is searched.
    """

    def __init__(self, detokenizer: StreamingDetokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._not_yet = min_tokens  # tokens to come that cannot complete a stop string
        self._held = ""
        self._immune = 0  # characters of the held text in which no match may end
        self._shown: list[str] = []
        self.matched: str | None = None  # the stop string that has ended the completion

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that may be shown now. Once a stop string has matched, nothing is."""
        self._not_yet -= 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the rest of the text: no more tokens come."""
        return self._take(self._detokenizer.finish()) + self.cut_off()

    def cut_off(self) -> str:
        """Return the text that is held back, without an incomplete character: the completion was cut off."""
        return self._release(len(self._held))

    @property
    def text(self) -> str:
        """All text that may be shown, stop strings excluded."""
        return "".join(self._shown)

    def copy(self) -> Self:
        """Return a completion that goes on from here by itself."""
        other = copy(self)
        other._detokenizer, other._shown = self._detokenizer.copy(), self._shown.copy()
        return other

    def _take(self, text: str) -> str:
        if self.matched is not None:
            return ""
        self._held += text
        if not self._stops:
            return self._release(len(self._held))
        if self._not_yet >= 0:
            self._immune = len(self._held)
        # The one that is complete first; of two that end together the longer. So the cuts do not matter.
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
        """Where ``stop`` ends first behind the immune text, as a key by which matches are ordered."""
        at = self._held.find(stop, max(0, self._immune + 1 - len(stop)))
        return None if at < 0 else (at + len(stop), -len(stop), stop)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop`` without completing it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class StreamingDetokenizer:
    """Decodes one sequence as its tokens come: never half a character, and none lost.

    Every token stands for some bytes. A table of them and an incremental UTF-8 decoder are all that streaming needs:
    bytes that do not complete a character wait, an invalid sequence becomes U+FFFD.

    Args:
        table: the bytes of each token id. Ids beyond it have none: embeddings are often padded.
        prompt_ids: the beginning of the sequence. It is not decoded again, but if it ends inside a character, the
            character comes out when it is complete.
        strips: drop so many spaces at most at the beginning of the whole text, prompt included, and at its end
            (SentencePiece writes one before the first word).
    """

    def __init__(
        self, table: Sequence[bytes], prompt_ids: Sequence[int] = (), *, strips: tuple[int, int] = (0, 0)
    ) -> None:
        self._table = table
        self._decoder = _Utf8Decoder("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= 4:  # no character is longer
                break
        before = _Utf8Decoder("replace")
        before.decode(tail)
        self._decoder.decode(before.getstate()[0])  # the bytes that begin a character without completing it
        self._leading = 0 if tail else strips[0]
        self._trailing, self._held = strips[1], ""

    def copy(self) -> Self:
        """Return a decoder that goes on from here by itself."""
        other = copy(self)
        other._decoder = _Utf8Decoder("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._trim(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """The rest when no more tokens come: U+FFFD for an unfinished character."""
        text = self._trim(self._decoder.decode(b"", final=True))
        self._held = ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _trim(self, text: str) -> str:
        """The text without spaces that are stripped, or may be when no more text comes."""
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
