"""The parts of an answer's text: content, thoughts and tool calls, read as the text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TextPart:
    """Content of the message."""

    text: str


@dataclass(frozen=True)
class ThoughtPart:
    """The model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Start of a tool call. Its arguments follow."""

    index: int  # among the calls of this answer
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPart:
    """A piece of a call's arguments. All pieces together are JSON."""

    index: int
    text: str


Part = TextPart | ThoughtPart | CallPart | ArgumentsPart


class Reader(Protocol):
    """Reads an answer's text in pieces of any size. Apart from their lengths, the parts do not depend on the pieces."""

    def push(self, text: str) -> list[Part]:
        """Add more text. Return the parts that are certain by now."""

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""


class PlainReader:
    """Reads all text as content."""

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []
