"""Encode a chat piece by piece, and keep the ids of each piece for later turns.

The ``tokenizers`` library first searches a text for added tokens. A piece is the text between two added tokens. The
library encodes each piece independently of the others. So a new turn has to encode only its own pieces.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from tokenizers import AddedToken

_MOST_CHARACTERS = 1 << 21  # maximum characters of all kept pieces: their ids take about one byte per character


class Pieces:
    """Encodes a chat as separate pieces, the texts between added tokens.

    The ids of each piece are kept for later chats.

    All methods are thread-safe.

    Args:
        added: added tokens, as text -> id: only tokens that the tokenizers library searches for before it normalizes a
            text.
        encode: returns the ids of one piece; it calls the tokenizers library.
    """

    def __init__(self, added: Mapping[str, int], encode: Callable[[str], list[int]]) -> None:
        self._added, self._encode = dict(added), encode
        texts = sorted(added, key=len, reverse=True)  # the library, too, takes the longest of several
        begins = "".join(re.escape(text[0]) for text in texts)
        self._pattern = re.compile(f"((?=[{begins}])(?:{'|'.join(map(re.escape, texts))}))" if texts else "((?!))")
        self._kept: OrderedDict[tuple[str | None, str], array[int]] = OrderedDict()
        self._size, self._lock = 0, Lock()

    @classmethod
    def of(
        cls, added: Mapping[int, AddedToken], steps: Mapping[str, Any], encode: Callable[[str], list[int]]
    ) -> "Pieces | None":
        """Return `Pieces` for a tokenizer; None if the ids of a piece may depend on the text around the piece.

        Args:
            added: all added tokens by id.
            steps: normalizer and pre-tokenizer, as in tokenizer.json.
            encode: returns the ids of one piece; it calls the tokenizers library.
        """
        first = {token.content: number for number, token in added.items() if not token.normalized and token.content}
        strips = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        depends = '"prepend_scheme": "first"' in json.dumps(steps)  # only the first piece gets a space
        return None if strips or depends or not first else cls(first, encode)

    def ids(self, text: str, owner: str | None = None) -> list[int]:
        """Return the ids of a text. They are the ids that the tokenizers library returns for the whole text.

        The ids of each piece are kept, for requests of the same ``owner`` only. Otherwise an owner could detect, by
        timing, that another owner has used a text.
        """
        found: list[int] = []
        for number, part in enumerate(self._pattern.split(text)):
            if number % 2:
                found.append(self._added[part])
            elif part:
                found += self._piece(part, owner)
        return found

    def _piece(self, text: str, owner: str | None) -> "array[int]":
        with self._lock:
            if kept := self._kept.get((owner, text)):
                self._kept.move_to_end((owner, text))
                return kept
        ids = array("I", self._encode(text))
        with self._lock:
            if (owner, text) not in self._kept and len(text) <= _MOST_CHARACTERS:
                self._kept[owner, text] = ids
                self._size += len(text)
            while self._size > _MOST_CHARACTERS:
                (_, oldest), _ = self._kept.popitem(last=False)
                self._size -= len(oldest)
        return ids
