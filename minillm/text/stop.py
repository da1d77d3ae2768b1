"""When a completion ends, and what of its text may be shown before it does."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Finds stop strings in text that arrives in pieces, wherever the pieces are cut.

    Text that could be the beginning of a stop string is held back; all else is passed on at once. What has been passed
    on can be part of no later match, so only the held text is searched.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; returns what may be shown. Once a stop string matched, nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        # The one that is complete first; of two that end together the longer. So the cuts do not matter.
        match = min(
            ((self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held),
            default=None,
        )
        if match is not None:
            end, _, self.matched = match
            shown, self._held = self._held[: end - len(self.matched)], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The text still held back: the completion ended without completing a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
