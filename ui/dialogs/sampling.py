"""How answers come about: a line per parameter of sampling and of beam search, checked by the parameters themselves."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Label, Static

from minillm.errors import UsageError
from minillm.text.safe import clean_line
from minillm.ui.dialogs.dialog import Dialog
from minillm.ui.settings import BEAM_FIELDS, SAMPLING_FIELDS, Settings, field_texts, with_texts


class SamplingScreen(Dialog[Settings]):
    """Gives back the changed settings; a wrong one is named, and the screen stays."""

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def compose(self) -> ComposeResult:
        texts = field_texts(self._settings)
        with Vertical(classes="dialog") as box:
            box.border_title = "sampling"
            with VerticalScroll(id="rows", can_focus=False):
                for item in (*SAMPLING_FIELDS, *BEAM_FIELDS):
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
        texts = {field.id: field.value for field in self.query(Input) if field.id is not None}
        try:
            self.dismiss(with_texts(self._settings, texts))
        except UsageError as error:
            self.query_one(".problem", Static).update(Content(clean_line(str(error), 300)))
