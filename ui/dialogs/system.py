"""The system prompt, to read and to change."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Static, TextArea

from minillm.ui.dialogs.dialog import Dialog


class SystemScreen(Dialog[str]):
    """Gives back the new system prompt; the next answer is computed with it, and its blocks are pinned."""

    BINDINGS = [Binding("ctrl+s", "save", "Save", priority=True)]  # noqa: RUF012

    def __init__(self, system: str) -> None:
        super().__init__()
        self._system = system

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "system prompt"
            yield TextArea(self._system, compact=True, placeholder="none: the model's template may have its own")
            yield Static("Ctrl+S saves, from the next answer on · Escape keeps the old one", classes="hint")

    def on_mount(self) -> None:
        area = self.query_one(TextArea)
        area.focus()
        area.move_cursor(area.document.end)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())
