"""Which model to talk to: those of the manifest, or a path."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from minillm.errors import MinillmError
from minillm.progress import size
from minillm.text.safe import clean_line
from minillm.ui.dialogs.dialog import Dialog
from minillm.weights.files import find_downloaded
from minillm.weights.manifest import ModelEntry, load_manifest


class ModelScreen(Dialog[str]):
    """Gives back a name of the manifest, or a path. A model that is not here yet will be downloaded."""

    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current
        self._names: list[str] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "model"
            yield OptionList()
            yield Static("", classes="problem")
            yield Input(placeholder="or a name, a directory, a .gguf file", compact=True)
            yield Static("Enter loads it; the conversation stays · Escape closes", classes="hint")

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        try:
            entries = list(load_manifest().models.values())
        except MinillmError as error:
            self.query_one(".problem", Static).update(Content(clean_line(str(error), 300)))
            self.query_one(Input).focus()
            return
        self._names = [entry.name for entry in entries]
        width = max(map(len, self._names))
        options.add_options([Option(_line(entry, width, entry.name == self._current)) for entry in entries])
        if self._current in self._names:
            options.highlighted = self._names.index(self._current)
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._names[event.option_index])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())


def _line(entry: ModelEntry, width: int, current: bool) -> Content:
    name = clean_line(entry.name, 40)
    state = "downloaded" if find_downloaded(entry.name) else "gated" if entry.gated else ""
    facts = f"{clean_line(entry.parameters, 8):>6}  {size(entry.size):>7}  {clean_line(entry.license, 20):<20} {state}"
    return Content.assemble("▸ " if current else "  ", (f"{name:<{width}}", "bold"), "  ", (facts, "$text-muted"))
