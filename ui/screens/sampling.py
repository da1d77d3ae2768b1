"""How the model samples: a line per parameter, checked by `SamplingParams` itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Label, Static

from minillm.errors import UsageError
from minillm.text import clean_line
from ui.screens.dialog import Dialog
from ui.settings import SAMPLING_FIELDS, read_sampling, sampling_text


class SamplingScreen(Dialog[dict[str, Any]]):
    """Gives back the parameters; a wrong one is named, and the screen stays."""

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        super().__init__()
        self._sampling = sampling

    def compose(self) -> ComposeResult:
        texts = sampling_text(self._sampling)
        with Vertical(classes="dialog") as box:
            box.border_title = "sampling"
            with VerticalScroll(id="rows", can_focus=False):
                for item in SAMPLING_FIELDS:
                    with Horizontal(classes="row"):
                        yield Label(item.name)
                        yield Input(texts[item.name], id=item.name, compact=True, select_on_focus=True)
                        yield Static(item.hint, classes="hint", markup=False)
            yield Static("", classes="problem")
            yield Static("Enter saves, from the next answer on · Escape keeps the old ones", classes="hint")

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    def on_input_submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        texts = {item.name: self.query_one(f"#{item.name}", Input).value for item in SAMPLING_FIELDS}
        try:
            self.dismiss(read_sampling(texts, self._sampling))
        except UsageError as error:
            self.query_one(".problem", Static).update(Content(clean_line(str(error), 300)))
