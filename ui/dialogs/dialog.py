"""Dialogs above the chat. Escape closes them and changes nothing."""

from __future__ import annotations

from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.screen import ModalScreen

Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """A box in the middle; it gives back its result, or None."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "close", "Close", priority=True),
        Binding("ctrl+c", "close", "Close", priority=True, show=False),
    ]

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close. The second Enter or click of two in a moment finds it closed, and does nothing.

        Textual would close the top screen instead, or end with an error where that is the chat.
        """
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()

    def action_close(self) -> None:
        self.dismiss(None)
