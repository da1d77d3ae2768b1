"""Token ids to text, as they come: never half a character, and none lost.

Every token stands for some bytes. A table of them and an incremental UTF-8 decoder are all that streaming needs: bytes
that do not complete a character wait, an invalid sequence becomes U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Self


class StreamingDetokenizer:
    """Decodes one sequence.

    Args:
        table: the bytes of each token id. Ids beyond it have none: embeddings are often padded with rows that no
            token uses.
        prompt_ids: what the sequence begins with; it is not decoded again, but where it ends inside a character, the
            character comes out when it is complete.
        strip_space: drop one leading space of the whole text, prompt included (SentencePiece writes one before the
            first word).
    """

    def __init__(self, table: Sequence[bytes], prompt_ids: Sequence[int] = (), *, strip_space: bool = False) -> None:
        self._table = table
        self._decoder = _utf8_decoder()
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= 4:  # no character is longer
                break
        self._decoder.decode(_incomplete_end(tail))
        self._strip_space = strip_space and not tail

    def copy(self) -> Self:
        """Return a decoder that goes on from here by itself."""
        other = copy(self)
        other._decoder = _utf8_decoder()
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._trim(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _trim(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return _Utf8Decoder(errors="replace")


def _incomplete_end(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character without completing it."""
    decoder = _utf8_decoder()
    decoder.decode(data)
    return decoder.getstate()[0]
