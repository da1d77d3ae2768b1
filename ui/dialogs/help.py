"""All keys and commands, on one screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from minillm.ui.chat.slash import COMMANDS
from minillm.ui.dialogs.dialog import Dialog

KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Talk",
        (
            ("Enter", "send"),
            ("Ctrl+J, Alt+Enter", "new line; Shift+Enter in some terminals"),
            ("↑ ↓", "in the first and last line: what was sent before"),
            ("Escape", "stop the answer, cancel the loading or the editing"),
            ("Ctrl+C", "copy what is selected; else stop; else quit"),
            ("Page Up, Page Down", "scroll by pages; Ctrl+↑ ↓ by lines"),
            ("Ctrl+Home, Ctrl+End", "to the beginning, to the end"),
        ),
    ),
    (
        "Turns",
        (
            ("Alt+↑ ↓", "select a turn; without one, keys mean the last"),
            ("Alt+E", "edit the question and ask again, as a branch"),
            ("Alt+R", "regenerate the answer, as a branch"),
            ("Alt+← →", "switch between branches"),
            ("Alt+C", "continue the last answer"),
            ("1 … 9", "accept a candidate, before anything is typed"),
            ("Alt+Y", "copy the answer; /copy code: its last code block"),
            ("Alt+P", "the answer's tokens by probability"),
        ),
    ),
    (
        "Conversations and settings",
        (
            ("Ctrl+N, Ctrl+O", "a new one; a saved one"),
            ("F2, F3, F4", "model, sampling and beams, system prompt"),
            ("Ctrl+T", "light or dark"),
            ("Ctrl+P, /", "all commands"),
            ("F1, or ? at first", "this help"),
            ("Ctrl+Q", "quit"),
        ),
    ),
    (
        "Memory",
        (
            ("F5, F6, F7", "pool, block tables, fork tree; again: hide"),
            ("F8, F9, F10", "events, figures, steps"),
            ("Alt+V", "the view on the whole screen, and back"),
            ("Tab", "into the view: arrows move, its keys are shown there"),
        ),
    ),
)


class HelpScreen(Dialog[None]):
    """The list of keys, then that of commands."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="keys") as box:
            box.border_title = "keys"
            yield Static(_listing())
            yield Static("Escape closes", classes="hint")

    def action_help(self) -> None:
        """F1 again."""
        self.dismiss(None)


def _listing() -> Content:
    commands = tuple((command.usage, command.summary) for command in COMMANDS)
    lines = []
    for title, keys in (*KEYS, ("Commands", commands)):
        lines.append(Content.styled(title, "bold $text-primary"))
        for key, meaning in keys:
            lines.append(Content.assemble((f"  {key:<25} ", "$foreground"), (meaning, "$text-muted")))
        lines.append(Content(""))
    return Content("\n").join(lines)
