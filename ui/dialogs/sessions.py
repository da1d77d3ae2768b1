"""The saved conversations: search, resume, delete."""

from __future__ import annotations

import time
from pathlib import Path

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from minillm.text.safe import clean_line
from minillm.ui.chat.sessions import SessionStore, SessionSummary
from minillm.ui.dialogs.dialog import Dialog
from minillm.ui.numbers import plural


class SessionsScreen(Dialog[Path]):
    """Gives back the file of the conversation to resume."""

    BINDINGS = [  # noqa: RUF012
        Binding("down", "next", "Next", show=False),
        Binding("up", "previous", "Previous", show=False),
        Binding("delete", "delete", "Delete", priority=True),
    ]

    def __init__(self, store: SessionStore, search: str = "") -> None:
        super().__init__()
        self._store = store
        self._search = search
        self._found: list[SessionSummary] = []
        self._doomed: Path | None = None  # Delete was pressed once

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "conversations"
            yield Input(self._search, placeholder="words of a question or an answer", compact=True)
            yield OptionList()
            yield Static("", classes="problem")
            yield Static("Enter resumes · ↑ ↓ chooses · Delete twice deletes · Escape closes", classes="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self.query_one(Input).focus()
        self._list()

    def _list(self) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        self._found = self._store.list(self.query_one(Input).value)
        options.clear_options()
        options.add_options([Option(_line(summary)) for summary in self._found])
        if self._found:
            options.highlighted = min(at, len(self._found) - 1)
        self._say("" if self._found else "there is none")

    def _say(self, text: str) -> None:
        self.query_one(".problem", Static).update(Content(text))

    def on_input_changed(self) -> None:
        self._doomed = None
        self._list()

    def on_input_submitted(self) -> None:
        chosen = self._chosen()
        if chosen is not None:
            self.dismiss(chosen.path)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index].path)

    def _chosen(self) -> SessionSummary | None:
        at = self.query_one(OptionList).highlighted
        return self._found[at] if at is not None and self._found else None

    def action_next(self) -> None:
        self._doomed = None
        self.query_one(OptionList).action_cursor_down()

    def action_previous(self) -> None:
        self._doomed = None
        self.query_one(OptionList).action_cursor_up()

    def action_delete(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        if self._doomed != chosen.path:
            self._doomed = chosen.path
            self._say("Delete once more to delete it for good")
            return
        self._store.delete(chosen.path)
        self._doomed = None
        self._list()


def _line(summary: SessionSummary) -> Content:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.saved))
    state = " · interrupted" if summary.interrupted else ""
    facts = f"{when} · {plural(summary.num_turns, 'turn')}{state}  "
    return Content.assemble((facts, "$text-muted"), clean_line(summary.title, 100))
