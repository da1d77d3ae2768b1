"""The bytes that each vocabulary entry stands for.

A tokenizer's decoder says how entries spell bytes. Two ways are in use: byte-level BPE writes each byte as one printable
character (Radford et al. 2019), SentencePiece writes text with ``▁`` for the space and ``<0xE2>`` for single bytes (Kudo
and Richardson 2018).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from minillm.errors import WeightsError
from minillm.text import clean_line

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """How vocabulary entries spell bytes.

    ``trim_start`` is applied to the first token of a text, or is None: see `StreamingDetokenizer`.
    """

    to_bytes: Callable[[str], bytes]
    trim_start: Callable[[bytes], bytes] | None = None


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """Read a tokenizer's decoder.

    Raises:
        WeightsError: it is of a kind that is not supported.
    """
    if backend.decoder is None:
        raise WeightsError("tokenizer.json: it has no decoder, and joining tokens by spaces is not supported")
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    match [part["type"] for part in parts]:
        case ["ByteLevel"]:
            return Spelling(byte_level)
        case ["Metaspace"]:
            mark, keeps = parts[0]["replacement"], parts[0].get("prepend_scheme") == "never"
            # Every mark in the first token is dropped, not only its first character: that is what the library does.
            return Spelling(lambda text: _marked(text, mark), None if keeps else lambda data: data.replace(b" ", b""))
        case ["Replace", *others] if others in _AFTER_REPLACE:
            return _sentencepiece(parts)
    names = "+".join(clean_line(str(part["type"]), 40) for part in parts)
    raise WeightsError(f"tokenizer.json: the decoder {names} is not supported")


_AFTER_REPLACE = (["Fuse"], ["ByteFallback", "Fuse"], ["Fuse", "Strip"], ["ByteFallback", "Fuse", "Strip"])


def _sentencepiece(parts: list[dict[str, Any]]) -> Spelling:
    mark = parts[0]["pattern"].get("String")
    if mark is None or parts[0]["content"] != " ":
        raise WeightsError("tokenizer.json: a decoder that replaces anything but one text by a space is not supported")
    strips = parts[-1] if parts[-1]["type"] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strips["content"] != " " or strips["start"] > 1 or strips["stop"]:
        raise WeightsError("tokenizer.json: a decoder that strips more than one leading space is not supported")
    has_bytes = any(part["type"] == "ByteFallback" for part in parts)

    def to_bytes(text: str) -> bytes:
        if has_bytes and (single := _BYTE.fullmatch(text)):
            return bytes([int(single[1], 16)])
        return _marked(text, mark)

    return Spelling(to_bytes, (lambda data: data.removeprefix(b" ")) if strips["start"] else None)


def _marked(text: str, mark: str) -> bytes:
    return text.replace(mark, " ").encode("utf-8", errors="replace")


def byte_level(text: str) -> bytes:
    """The bytes that ``text`` spells in GPT-2's alphabet; its own UTF-8 where a character is not of the alphabet."""
    try:
        return text.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace")


def _alphabet() -> dict[int, int]:
    """Character -> byte. Latin-1 characters that spell nothing are sent outside Latin-1, where encoding fails."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    spelled = {0x100 + number: byte for number, byte in enumerate(others)}
    return dict.fromkeys(others, 0xFFFD) | {byte: byte for byte in printable} | spelled


_TO_BYTE = _alphabet()


def shown(data: bytes) -> str:
    """``data`` as text for a display, bytes that are no UTF-8 as ``<0xE2>``."""
    text = data.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)
