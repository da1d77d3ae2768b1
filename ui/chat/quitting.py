"""Quitting the chat without losing work by accident."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.ui.chat.chat_pane import ChatPane

_GRACE = 3.0  # maximum seconds between two presses of a key that quits


def unfinished_work(pane: ChatPane) -> str:
    """Describe the work that would be lost by quitting now: an answer, or unsent text.

    Return "" if nothing would be lost.
    """
    if pane.run is not None or pane.compaction is not None:
        return "an answer is being generated"
    return "your text is not sent" if pane.waiting.unsent else ""


class QuitKey:
    """A key that quits only when it is pressed twice."""

    def __init__(self) -> None:
        self._pressed_at = -_GRACE

    def is_repeated(self, pane: ChatPane, key: str, reason: str = "") -> bool:
        """Return whether this is the second press within `_GRACE` seconds. After the first press, show a notice.

        ``reason`` is the work that would be lost.
        """
        before, self._pressed_at = self._pressed_at, time.monotonic()
        if self._pressed_at - before < _GRACE:
            return True
        pane.notify(": ".join(filter(None, [reason, f"press {key} again to quit"])), timeout=_GRACE)
        return False


async def offer_draft(pane: ChatPane) -> None:
    """Let ↑ bring back the text that was left unsent at the end of the last chat."""
    if draft := pane.store.take_draft():
        pane.prompt.remember(draft)
        await pane.transcript.add_note("press ↑ to bring back your unsent text")
