"""All keys, on one screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ui.screens.dialog import Dialog

KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Talk",
        (
            ("Enter", "send"),
            ("Ctrl+J, Alt+Enter", "new line; Shift+Enter in some terminals"),
            ("Escape", "stop the answer, or cancel the loading"),
            ("Ctrl+C", "copy what is selected; else stop; else quit"),
            ("Ctrl+N", "new conversation; frees the blocks of this one"),
            ("Page Up, Page Down", "scroll by pages; Ctrl+↑ ↓ by lines"),
            ("Ctrl+Home, Ctrl+End", "to the beginning, to the end"),
        ),
    ),
    (
        "Change",
        (
            ("F2", "model: from the list, or a path"),
            ("F3", "sampling: temperature, top-p, seed, …"),
            ("F4", "system prompt"),
            ("Ctrl+R", "load the model again"),
        ),
    ),
    (
        "See",
        (
            ("F5", "show or hide the pool and the block table"),
            ("Tab", "to the transcript, pool, table: arrows scroll"),
            ("Ctrl+T", "light or dark"),
            ("Ctrl+P", "all commands"),
            ("F1, or ? at first", "this help"),
            ("Ctrl+Q", "quit"),
        ),
    ),
)


class HelpScreen(Dialog[None]):
    """The list of keys."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="keys") as box:
            box.border_title = "keys"
            yield Static(_listing())
            yield Static("Escape closes", classes="hint")

    def action_help(self) -> None:
        """F1 again."""
        self.dismiss(None)


def _listing() -> Content:
    lines = []
    for title, keys in KEYS:
        lines.append(Content.styled(title, "bold $text-primary"))
        for key, meaning in keys:
            lines.append(Content.assemble((f"  {key:<20} ", "$foreground"), (meaning, "$text-muted")))
        lines.append(Content(""))
    return Content("\n").join(lines)
