"""What opens above the chat: closed by Escape, which changes nothing."""

from __future__ import annotations

from typing import TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen

Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """A box in the middle; it gives back what was chosen, or None."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "close", "Close", priority=True),
        Binding("ctrl+c", "close", "Close", priority=True, show=False),
    ]

    def action_close(self) -> None:
        self.dismiss(None)
