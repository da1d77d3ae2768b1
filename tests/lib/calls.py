"""Read tool calls from a text that arrives in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, TextPart


def together(parts: list[Part]) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls; the parts must come in order."""
    names: list[str] = []
    arguments: list[str] = []
    said = ""
    for part in parts:
        match part:
            case TextPart(text):
                assert text
                said += text
            case CallPart(index, call_id, name):
                assert index == len(names)
                assert call_id.isalnum()
                assert len(call_id) == 9
                names.append(name)
                arguments.append("")
            case ArgumentsPart(index, text):
                assert index == len(names) - 1
                arguments[index] += text
    for text in (said, *arguments):
        text.encode("utf-8")
    return said, [
        (name, json.loads(text, parse_constant=pytest.fail)) for name, text in zip(names, arguments, strict=True)
    ]


def read(reader: Any, text: str, cuts: list[int]) -> list[Part]:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()
