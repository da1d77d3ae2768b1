"""Separate a model's reasoning, which is between ``<think>`` and ``</think>``, from the answer after it."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

from minillm.text.stop import overlap

OPEN, CLOSE = "<think>", "</think>"  # tags around the reasoning
Pieces = list[tuple[bool, str]]  # (whether it is reasoning, text without the tags) of each piece; no text is empty
PROMPT_END = 8  # number of a prompt's last tokens to search for an opening tag, which may be followed by white space


def is_opened(decode: Callable[[list[int]], str], prompt: list[int]) -> bool:
    """Return whether a prompt ends with the opening tag, so that generation begins inside the reasoning.

    Args:
        decode: returns the text of token ids.
        prompt: the prompt's token ids.
    """
    return decode(prompt[-PROMPT_END:]).rstrip().endswith(OPEN)


def is_unfinished(answer: str, *, inside: bool = False) -> bool:
    """Return whether the reasoning at the beginning of ``answer`` has no end yet.

    ``inside``: the prompt ends with the opening tag, so the answer begins inside the reasoning.
    """
    return (inside or answer.lstrip(string.whitespace).startswith(OPEN)) and CLOSE not in answer


def _cut(text: str, tag: str) -> tuple[str, bool, str]:
    """Split ``text`` at the first ``tag``. Return the text before it, whether it was found, and the remaining text.

    If the tag was not found, the remaining text is the end of ``text`` that may be the beginning of a tag.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, True, after
    kept = overlap(text, tag)
    return text[: len(text) - kept], False, text[len(text) - kept :]


@dataclass
class ReasoningSplitter:
    """Splits streamed text into reasoning and answer, which may alternate.

    Text that may be the beginning of a tag is held back until more text arrives. ``inside`` is whether the text begins
    inside the reasoning.
    """

    inside: bool = False
    _buffer: str = ""

    def push(self, text: str) -> Pieces:
        """Add text. Return the pieces that are now certain to be reasoning or answer."""
        pieces = []
        found, self._buffer = True, self._buffer + text
        while found:
            piece, found, self._buffer = _cut(self._buffer, CLOSE if self.inside else OPEN)
            if piece:
                pieces.append((self.inside, piece))
            self.inside ^= found
        return pieces

    def finish(self) -> Pieces:
        """End the text. Return the text that was held back because a tag could follow. It is ordinary text now."""
        buffer, self._buffer = self._buffer, ""
        return [(self.inside, buffer)] if buffer else []


class LeadingReasoning:
    """Splits streamed text that may begin with reasoning. In the answer after the reasoning, tags are ordinary text.

    White space around the reasoning is dropped. Only ASCII white space may be before an opening tag in the text:
    `reasoning_budget` searches for the tag in bytes.

    Args:
        inside: the text begins inside the reasoning, for example because the prompt ends with the opening tag.
        has_reasoned: the text continues reasoning, so white space at its beginning belongs to it.
    """

    def __init__(self, *, inside: bool, has_reasoned: bool = False) -> None:
        self._buffer = ""
        self._stage = self._reasoning if inside else self._start
        self._has_reasoned = has_reasoned

    def push(self, text: str) -> Pieces:
        """Add text. Return the pieces that are now certain to be reasoning or answer."""
        self._buffer += text
        return self._stage(final=False)

    def finish(self) -> Pieces:
        """End the text. Return the remaining pieces."""
        return self._stage(final=True)

    def _start(self, *, final: bool) -> Pieces:
        text = self._buffer.lstrip(string.whitespace)
        if text.startswith(OPEN):
            self._buffer = text.removeprefix(OPEN)
            self._stage = self._reasoning
        elif OPEN.startswith(text) and not final:
            return []
        else:
            self._stage = self._answer
        return self._stage(final=final)

    def _reasoning(self, *, final: bool) -> Pieces:
        text = self._buffer if self._has_reasoned else self._buffer.lstrip()
        piece, closed, after = _cut(text, CLOSE)
        if final and not closed:
            piece, self._buffer = text, ""
        else:
            piece = piece.rstrip()
            self._buffer = after if closed else text[len(piece) :]
        self._has_reasoned |= bool(piece)
        pieces = [(True, piece)] if piece else []
        if not closed:
            return pieces
        self._stage = self._gap
        return pieces + self._gap(final=final)

    def _gap(self, *, final: bool) -> Pieces:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return []
        self._stage = self._answer
        return self._answer(final=final)

    def _answer(self, *, final: bool) -> Pieces:
        text, self._buffer = self._buffer, ""
        return [(False, text)] if text else []


def split_reasoning(text: str, inside: bool = False) -> tuple[str, str]:
    """Return (reasoning, answer) of a complete text. ``inside``: the text begins inside the reasoning."""
    splitter = ReasoningSplitter(inside)
    pieces = splitter.push(text) + splitter.finish()
    return (
        "".join(piece for reasoning, piece in pieces if reasoning),
        "".join(piece for reasoning, piece in pieces if not reasoning),
    )
