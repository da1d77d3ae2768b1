"""An answer's text is read as it comes: what is thought and said, which tools are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Said:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Words of the model to itself."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call begins; its arguments follow."""

    index: int  # among the calls of this answer
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments, which are JSON together."""

    index: int
    text: str


Part = Said | Thought | Called | Arguments


class Reader(Protocol):
    """Takes an answer's text in pieces of any size. The parts do not depend on where it was cut, but for their size."""

    def push(self, text: str) -> list[Part]:
        """More text. Returns the parts that are certain by now."""

    def finish(self) -> list[Part]:
        """The text is complete. Returns the parts that are left."""


class PlainReader:
    """Reads no more into a text than that it was said."""

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []
