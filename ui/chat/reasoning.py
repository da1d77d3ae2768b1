"""Split model output into reasoning, between its tags, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"  # tags around the reasoning


@dataclass
class ReasoningSplitter:
    """Splits streamed text into (is reasoning, text) pieces without the tags.

    Text that may begin a tag is held back until more arrives.
    """

    inside: bool = False
    _held: str = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Add text. Return the pieces that are certain now."""
        text = self._held + text
        self._held = ""
        pieces: list[tuple[bool, str]] = []
        while text:
            tag = CLOSE if self.inside else OPEN
            at = text.find(tag)
            if at >= 0:
                pieces.append((self.inside, text[:at]))
                self.inside = not self.inside
                text = text[at + len(tag) :]
                continue
            keep = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
            pieces.append((self.inside, text[: len(text) - keep]))
            self._held = text[len(text) - keep :]
            break
        return [(reasoning, piece) for reasoning, piece in pieces if piece]

    def finish(self) -> list[tuple[bool, str]]:
        """End the text. The part that was held back is no tag."""
        held, self._held = self._held, ""
        return [(self.inside, held)] if held else []


def split_reasoning(text: str, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    pieces = splitter.push(text) + splitter.finish()
    return (
        "".join(piece for reasoning, piece in pieces if reasoning),
        "".join(piece for reasoning, piece in pieces if not reasoning),
    )
