"""The parts of an answer's text: content, reasoning and tool calls. Readers find them while the text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TextPart:
    """A piece of the answer's content: neither reasoning nor a tool call."""

    text: str


@dataclass(frozen=True)
class ThoughtPart:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """The start of a tool call. Its arguments follow as `ArgumentsPart`."""

    index: int  # index of the call in this answer
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPart:
    """A piece of the arguments of call ``index``. Joined, all pieces of a call are the JSON text of an object."""

    index: int
    text: str


Part = TextPart | ThoughtPart | CallPart | ArgumentsPart


class Reader(Protocol):
    """Splits an answer's text into parts while the text arrives in pieces.

    However the text is divided into pieces, the parts have the same types and, joined, the same contents.
    """

    def push(self, text: str) -> list[Part]:
        """Add text. Return the parts that later text can no longer change."""

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""


class PlainReader:
    """Reads all text as content, without reasoning and calls."""

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []
