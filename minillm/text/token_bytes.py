"""Convert the entries of a vocabulary to bytes, as the tokenizer's own decoder would."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import tokenizers

from minillm.errors import WeightsError
from minillm.text.safe import clean_line


@dataclass(frozen=True)
class TokenBytes:
    """The rules by which a tokenizer's decoder converts a vocabulary entry to bytes.

    Attributes:
        byte_level: each character of an entry stands for one byte, as in GPT-2.
        space_mark: the text that stands for a space in an entry, such as ``▁``.
        byte_fallback: an entry such as ``<0x0A>`` stands for one byte.
        strips: maximum numbers of spaces to drop at the beginning and at the end of a whole text.
        strips_each: maximum numbers of spaces to drop at the beginning and at the end of each entry.
    """

    byte_level: bool = False
    space_mark: str = ""
    byte_fallback: bool = False
    strips: tuple[int, int] = (0, 0)
    strips_each: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBytes:
        """Return the rules of ``backend``'s decoder. Raises WeightsError if this kind of decoder is not supported."""
        decoder: Any = backend.decoder
        state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        parts = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [part["type"] for part in parts]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if kinds == ["Metaspace"]:
            first = parts[0].get("prepend_scheme", "always") != "never"
            return cls(space_mark=parts[0]["replacement"], strips=(int(first), 0))
        mark, fallback, fused = "", False, False
        strips = {False: (0, 0), True: (0, 0)}
        for part in parts:
            if part["type"] == "Replace" and part.get("content") == " ":
                mark = part["pattern"].get("String") or ""
            elif part["type"] == "ByteFallback":
                fallback = True
            elif part["type"] == "Strip" and part.get("content") == " ":
                left, right = strips[fused]
                strips[fused] = (left + part.get("start", 0), right + part.get("stop", 0))
            elif part["type"] == "Fuse":
                fused = True
            else:
                raise WeightsError(f"tokenizer.json: the decoder {clean_line(part['type'], 60)} is not supported")
        if not mark:
            raise WeightsError(f"tokenizer.json: the decoder {clean_line('+'.join(kinds))} is not supported")
        return cls(space_mark=mark, byte_fallback=fallback, strips=strips[True], strips_each=strips[False])

    def table(self, entries: Sequence[str]) -> list[bytes]:
        """Return the bytes of each entry."""
        if self.byte_level:
            with contextlib.suppress(UnicodeEncodeError):
                joined = "".join(entries).translate(_BYTES).encode("latin-1")  # in one call, for speed
                return [joined[start:end] for start, end in pairwise(accumulate(map(len, entries), initial=0))]
        return [self(entry) for entry in entries]

    def __call__(self, entry: str) -> bytes:
        if self.byte_level:
            try:
                return entry.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                return entry.encode()
        if self.byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", entry):
            data = bytes([int(entry[3:5], 16)])
        else:
            data = entry.replace(self.space_mark, " ").encode()
        left, right = self.strips_each
        first = min(left, len(data) - len(data.lstrip(b" ")))
        return data[first : max(first, len(data) - right, len(data.rstrip(b" ")))]


def _bytes() -> dict[int, int]:
    """Return a table for `str.translate` that inverts GPT-2's map from bytes to printable characters.

    The table maps each of these characters to its byte (Radford et al. 2019). All other code points below 256 are
    mapped to a character outside Latin-1. So encoding a wrong entry as Latin-1 fails.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = dict.fromkeys(others, 0x10FFFF) | {byte: byte for byte in printable}
    return table | {256 + i: byte for i, byte in enumerate(others)}


_BYTES = _bytes()
