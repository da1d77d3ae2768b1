"""Token ids to text, as they come: never half a character, and none lost.

Every token stands for some bytes (`minillm.token_bytes`). A table of them and an incremental UTF-8 decoder are all that
streaming needs: bytes that do not complete a character wait, an invalid sequence becomes U+FFFD. Decoding text anew with
each token and comparing, as others do, costs more and shows half characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

_LONGEST_CHARACTER = 4  # bytes


class StreamingDetokenizer:
    """Decodes one sequence of token ids. An id that the table does not have stands for no text.

    Args:
        table: the bytes of each token id.
        prompt_ids: what the sequence begins with. Its text is not repeated; a character that it begins and does not
            finish comes out when it is complete.
        trim_start: what becomes of the bytes of the text's first token, where the decoder drops the space that
            SentencePiece puts before the first word.
    """

    def __init__(
        self, table: Sequence[bytes], prompt_ids: Iterable[int] = (), trim_start: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail, self._trim_start = self._end_of(list(prompt_ids), trim_start)
        self._decoder.setstate((_unfinished(tail), 0))

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._trimmed(self._bytes_of(token_id)))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _trimmed(self, data: bytes) -> bytes:
        if self._trim_start is None or not data:
            return data
        trim, self._trim_start = self._trim_start, None
        return trim(data)

    def _end_of(
        self, prompt_ids: list[int], trim_start: Callable[[bytes], bytes] | None
    ) -> tuple[bytes, Callable[[bytes], bytes] | None]:
        """The prompt's last bytes, and what is still to be trimmed behind it: nothing if it has any text."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail, None if tail else trim_start


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]
