"""All keys and commands, on one screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from minillm.ui.chat.slash import CommandTable
from minillm.ui.dialogs.dialog import Dialog

# Keys and their meanings, under titles; a command's name in braces stands for its key.
KEYS = {
    "Talk": {
        "Enter": "send",
        "Ctrl+J, Alt+Enter": "new line; Shift+Enter in some terminals",
        "↑ ↓": "in the first and last line: what was sent before",
        "Escape": "stop the answer, cancel the loading or the editing",
        "Ctrl+C": "copy what is selected; else stop; else quit",
        "Page Up, Page Down": "scroll by pages; Ctrl+↑ ↓ by lines",
        "Ctrl+Home, Ctrl+End": "to the beginning, to the end",
    },
    "Turns": {
        "Alt+↑ ↓": "select a turn; without one, keys mean the last",
        "{edit}": "edit the question and ask again, as a branch",
        "{regenerate}": "regenerate the answer, as a branch",
        "{branch}": "switch between branches",
        "{continue}": "continue the last answer",
        "{accept}": "accept a candidate, before anything is typed",
        "{copy}": "copy the answer; /copy code: its last code block",
        "{probabilities}": "the answer's tokens by probability",
    },
    "Conversations and settings": {
        "{new}, {sessions}": "a new one; a saved one",
        "{model}, {sampling}, {system}": "model, sampling and beams, system prompt",
        "{theme}": "light or dark",
        "Ctrl+P, /": "all commands",
        "{help}, or ? at first": "this help",
        "{quit}": "quit",
    },
    "Memory": {
        "{pool}, {tables}, {tree}": "pool, block tables, fork tree; again: hide",
        "{events}, {memory}, {steps}": "events, figures, steps",
        "Alt+V": "the view on the whole screen, and back",
        "Tab": "into the view: arrows move, its keys are shown there",
    },
}


class HelpScreen(Dialog[None]):
    """The list of keys, then that of commands."""

    def __init__(self, commands: CommandTable) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="keys") as box:
            box.border_title = "keys"
            yield Static(_listing(self._commands))
            yield Static("Escape closes", classes="hint")


def _listing(table: CommandTable) -> Content:
    keys_of = {command.name: command.shown_key for command in table}
    commands = {command.usage: command.summary for command in table}
    lines = []
    for title, keys in {**KEYS, "Commands": commands}.items():
        lines.append(Content.styled(title, "bold $text-primary"))
        for key, meaning in keys.items():
            shown = f"  {key.format_map(keys_of):<25} "
            lines.append(Content.assemble((shown, "$foreground"), (meaning, "$text-muted")))
        lines.append(Content(""))
    return Content("\n").join(lines)
