"""The dialogs above the chat. Escape closes them without changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.cells import cell_len, set_cell_size
from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from minillm.errors import MinillmError, UsageError
from minillm.progress import rate, size
from minillm.service.messages import Erase, TokenChoice
from minillm.text.safe import clean, clean_line
from minillm.ui.bars import hidden_keys
from minillm.ui.chat.conversation import Fork
from minillm.ui.chat.sessions import SessionStore, SessionSummary
from minillm.ui.drawing import line_of
from minillm.ui.engine_app import EngineCommand
from minillm.ui.keys_in_order import OrderedInput
from minillm.ui.numbers import bar, plural
from minillm.ui.settings import BEAM_FIELDS, SAMPLING_FIELDS, Settings, field_texts, with_texts
from minillm.ui.textual_internals import EarlyInputPalette, FillsTerminal, Options, SteadyTextArea

if TYPE_CHECKING:
    from minillm.fit.verdicts import DeviceMemory
    from minillm.weights.manifest import ModelEntry

Result = TypeVar("Result")


class Dialog(FillsTerminal, ModalScreen[Result]):
    """A box in the middle of the screen. Closing it returns a result, or None."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "close", "Close", priority=True),
        Binding("ctrl+c", "close", "Close", priority=True, show=False),
    ]

    def __init__(self, title: str, hint: str | Content, *parts: Widget, scrolls: bool = False) -> None:
        """Create the dialog.

        ``scrolls``: the parts may be taller than the screen. They can then be scrolled, and the hint is on the frame,
        where it stays visible. Otherwise the hint is the last line in the box.
        """
        super().__init__()
        self._box = (
            VerticalScroll(*parts, classes="dialog")
            if scrolls
            else Vertical(*parts, Static(hint, classes="hint"), classes="dialog")
        )
        self._box.border_title, self._box.border_subtitle = title, hint if scrolls else ""

    def compose(self) -> ComposeResult:
        yield self._box

    def on_mount(self) -> None:
        self.app.clear_notifications()  # earlier notifications would cover the dialog

    def say(self, problem: object) -> None:
        self.query_one(".problem", Static).update(Content(clean_line(str(problem), 300)))

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close the dialog. If it is closed already, as by a second Enter right after the first, do nothing.

        Textual itself would close the screen on top instead, or fail if this screen is the chat.
        """
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()

    def action_close(self) -> None:
        self.dismiss(None)


class Palette(EarlyInputPalette):
    """Textual's command palette, but it runs only one command, even if Enter is pressed several times."""

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _take_only_one(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        if not self.is_active:
            event.prevent_default()  # the palette is closed; Textual would close the chat and run the command again

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close the palette, unless it is closed already.

        A second Escape or click right after the first does nothing.
        """
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()


class SystemScreen(Dialog[str]):
    """Edits the system prompt and returns it.

    The next answer uses the new system prompt. The system prompt's blocks stay pinned in the cache.
    """

    BINDINGS = [Binding("ctrl+s", "save", "Save", priority=True)]  # noqa: RUF012

    def __init__(self, system: str) -> None:
        self._area = SteadyTextArea(system, compact=True, placeholder="none: the model's template may have its own")
        hint = "Ctrl+S saves for your next question · Escape keeps the old one"
        super().__init__("system prompt", hint, self._area)

    def on_mount(self) -> None:
        self._area.focus()
        self._area.move_cursor(self._area.document.end)

    def action_save(self) -> None:
        self.dismiss(self._area.text.strip())


class SamplingScreen(Dialog[Settings]):
    """Edits the parameters of sampling and beam search, one per line. Returns the settings with the new values.

    An error names the invalid parameter.
    """

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+s", "save", "Save", priority=True),
        *hidden_keys({"up": "app.focus_previous", "down": "app.focus_next"}),
    ]

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        texts = field_texts(settings)
        self._fields = {
            name: OrderedInput(text, compact=True, select_on_focus=True, id=name) for name, text in texts.items()
        }
        rows = [
            Horizontal(
                Label(each.name),
                self._fields[each.name],
                Static(each.hint, classes="hint", markup=False),
                classes="row",
            )
            for each in (*SAMPLING_FIELDS, *BEAM_FIELDS)
        ]
        hint = "Enter saves for your next question · Escape keeps the old ones"
        area = VerticalScroll(*rows, id="rows", can_focus=False)
        super().__init__("sampling", hint, area, Static("", classes="problem"))

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    def on_input_submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        try:
            self.dismiss(with_texts(self._settings, {name: field.value for name, field in self._fields.items()}))
        except UsageError as error:
            self.say(error)


class ModelScreen(Dialog[str]):
    """Lets the user select a model, and returns its name or path. A missing model is downloaded when it is loaded."""

    def __init__(self, settings: Settings, gpu: int = 0) -> None:
        """Create the dialog. ``gpu``: memory of the engine's GPU in bytes, 0 without a GPU."""
        self._current, self._engine, self._gpu = settings.model, settings.engine, gpu
        self._options = Options()
        self._input = OrderedInput(placeholder="or type a name, a directory, a .gguf file", compact=True)
        hint = "Enter loads the model and keeps the conversation · Escape closes"
        super().__init__("model", hint, self._options, Static("", classes="problem"), self._input)

    def on_mount(self) -> None:
        from minillm.weights.files import find_downloaded  # imported here, so that other dialogs open sooner
        from minillm.weights.manifest import load_manifest

        try:
            entries = load_manifest().models
        except MinillmError as error:
            self.say(error)
            self._input.focus()
            return
        width, devices = max(map(len, entries)), self._devices()
        for name, entry in entries.items():
            here = any(find_downloaded(form.name) for form in entry.all_forms())
            state = "here" if here else "gated" if entry.gated else ""
            state = f"{fit_of(entry, devices):<21} {state:<5}"
            facts = f"{clean_line(entry.parameters, 8):>6}  {size(entry.size):>8}"
            mark, bold = "▸ " if name == self._current else "  ", f"{clean_line(name, 40):<{width}}"
            license_name = clean_line(entry.license, 20)
            line = Content.assemble(mark, (bold, "bold"), "  ", (f"{facts}  {state} {license_name}", "$text-muted"))
            self._options.add_option(Option(line, id=name))
        if self._current in entries:
            self._options.highlighted = list(entries).index(self._current)
        self._options.focus()

    def _devices(self) -> list[DeviceMemory]:
        """Return the devices of this machine, with the bandwidths that the engine process has measured."""
        from minillm import system
        from minillm.config import EngineConfig
        from minillm.fit.verdicts import devices_of
        from minillm.loading.bandwidth import kept_gpu_rate, kept_rate

        cpu_rate, gpu_rate = kept_rate(system.processor()), kept_gpu_rate() if self._gpu else None
        return devices_of(EngineConfig(**self._engine), system.memory(), self._gpu, cpu_rate, gpu_rate)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())


def fit_of(entry: ModelEntry, devices: Sequence[DeviceMemory]) -> str:
    """Return a text for the list: where the model fits, the quantization that would be loaded, and its speed."""
    from minillm.fit.sizes import sized_entry
    from minillm.fit.verdicts import IN_LOW_BITS, verdicts

    forms = entry.all_forms()
    found = verdicts([sized_entry(form) for form in forms], devices)
    form, verdict = next((pair for pair in zip(forms, found, strict=True) if pair[1].taken), (entry, found[0]))
    if not verdict.taken:
        return "low-bit" if any(each.where == IN_LOW_BITS for each in found) else "too large"
    speed = "" if verdict.tokens_per_second is None else f"{rate(verdict.tokens_per_second):>4} tok/s"
    return f"{verdict.where} {form.form if entry.forms else '':<6} {speed}"


class SessionsScreen(Dialog[Path]):
    """Lists the saved conversations, with search and delete. Returns the file of the conversation to resume."""

    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"up": "move('up')", "down": "move('down')"}),
        Binding("delete", "delete", "Delete", priority=True),
    ]

    def __init__(self, store: SessionStore, search: str, deleted: Callable[[Path], None]) -> None:
        """Create the dialog. ``deleted`` is called with the file of each conversation that the user has deleted."""
        self._store, self._deleted = store, deleted
        self._found: list[SessionSummary] = []
        self._doomed: Path | None = None  # the file to delete if Delete is pressed again
        self._input = OrderedInput(search, placeholder="search titles, questions and answers", compact=True)
        self._options = Options()
        hint = "Enter resumes · ↑ ↓ move · Delete twice deletes · Escape closes"
        super().__init__("conversations", hint, self._input, self._options, Static("", classes="problem"))

    def on_mount(self) -> None:
        self._options.can_focus = False
        self._input.focus()
        self._list()

    def _list(self) -> None:
        options, self._doomed = self._options, None
        at = options.highlighted or 0
        self._found = self._store.list(self._input.value)
        options.clear_options()
        lines = []
        for each in self._found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.saved))
            facts = f"{when} · {plural(each.num_turns, 'turn')}{' · interrupted' if each.interrupted else ''}  "
            lines.append(Option(Content.assemble((facts, "$text-muted"), each.title), id=each.path.name))
        options.add_options(lines)
        if self._found:
            options.highlighted = min(at, len(self._found) - 1)
        self.say("" if self._found else "no conversation found")

    def on_input_changed(self) -> None:
        self._list()

    def _chosen(self) -> Path | None:
        at = self._options.highlighted
        return None if at is None else self._found[at].path

    def on_input_submitted(self) -> None:
        if (path := self._chosen()) is not None:
            self.dismiss(path)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        # By name, because the list may have changed since.
        path = next((each.path for each in self._found if each.path.name == event.option_id), None)
        if path is not None:
            self.dismiss(path)

    def action_move(self, where: str) -> None:
        self._doomed = None
        getattr(self._options, f"action_cursor_{where}")()

    def action_delete(self) -> None:
        path = self._chosen()
        if path is not None and path == self._doomed:
            try:
                self.post_message(EngineCommand(Erase(self._store.delete(path))))
            except MinillmError as error:
                self.say(error)
                return
            self._deleted(path)
            self._list()
        elif path is not None:
            self._doomed = path
            self.say("Press Delete again to delete it for good")


# (minimum probability, its label, style of tokens with it). Unlikely tokens are underlined, for use without color.
_LOOKS = (
    (0.9, "≥ 90 %", "$text-muted"),
    (0.5, "≥ 50 %", "$text-success"),
    (0.1, "≥ 10 %", "$text-warning"),
    (0.0, "less", "$text-error underline"),
)
_LONGEST = 2000  # maximum number of tokens to show


class ProbabilityScreen(Dialog[Fork]):
    """Shows an answer's tokens, colored by probability, with the alternatives to the token at the cursor.

    If the user chooses an alternative, returns a `Fork`: the answer up to the cursor, and the alternative.
    """

    BINDINGS = [  # noqa: RUF012
        Binding("left", "move(-1)", "Previous token", priority=True),
        Binding("right", "move(1)", "Next token", priority=True),
        Binding("up", "choose(-1)", "Alternative above", priority=True),
        Binding("down", "choose(1)", "Alternative below", priority=True),
        Binding("enter", "fork", "Continue from it", priority=True),
        *hidden_keys({"home": "move(-1000000)", "end": "move(1000000)"}, priority=True),
        Binding("n", "unlikely", "Next unlikely"),
    ]

    def __init__(self, tokens: Sequence[TokenChoice]) -> None:
        self._tokens = tokens[:_LONGEST]
        self._cursor = self._chosen = 0  # index of the token at the cursor; index of the chosen alternative
        legend = [part for _, words, look in _LOOKS for part in ((words, look), "  ")]
        self._text, self._alternatives = Static(), Static(id="alternatives")
        self._area = VerticalScroll(self._text, id="tokens", can_focus=False)
        hint = Content.assemble(*legend, "← → move · n: next below 50 % · ↑ ↓ and Enter: continue from there")
        super().__init__("probabilities", hint, self._area, self._alternatives, Static("", classes="problem"))

    def on_mount(self) -> None:
        self._go_to(0)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)  # redraw the bars for the new width

    def _go_to(self, place: int) -> None:
        self._cursor = max(0, min(len(self._tokens) - 1, place))
        said = self._tokens[self._cursor]
        self._chosen = next((i for i, each in enumerate(_alternatives(said)) if each.text != said.text), 0)
        self.say("")
        self._show()

    def action_move(self, step: int) -> None:
        self._go_to(self._cursor + step)

    def action_unlikely(self) -> None:
        after = range(self._cursor + 1, len(self._tokens))
        self._go_to(next((i for i in after if self._tokens[i].logprob < math.log(0.5)), self._cursor))

    def action_choose(self, step: int) -> None:
        self._chosen = (self._chosen + step) % len(_alternatives(self._tokens[self._cursor]))
        self._show()

    def action_fork(self) -> None:
        tokens = list(self._tokens[: self._cursor])
        chosen = _alternatives(self._tokens[self._cursor])[self._chosen]
        fork = Fork([*tokens, chosen])
        if not chosen.text:
            self.say("this token has no text; the answer would end here")
        elif "\ufffd" in fork.text:
            self.say("this token is part of a character; choose one before or after it")
        else:
            self.dismiss(fork)

    def _show(self) -> None:
        chances = [math.exp(min(0.0, token.logprob)) for token in self._tokens]
        looks = [next(look for least, _, look in _LOOKS if chance >= least) for chance in chances]
        looks[self._cursor] += " reverse"
        # Show each line break as a symbol, followed by the break itself.
        texts = [clean(token.text).replace("\n", "⏎\n").replace("\t", "⇥") for token in self._tokens]
        self._text.update(Content.assemble(*zip(texts, looks, strict=True)))
        token = self._tokens[self._cursor]
        lines = [Content(f"token {self._cursor + 1} of {len(self._tokens)} · log p {token.logprob:.2f}")]
        bar_width = max(0, min(20, self._area.size.width - 30))  # after mark, token and figure
        for number, each in enumerate(_alternatives(token)):
            chance = math.exp(each.logprob)
            figures = f"{chance:>7.1%} {bar(chance, bar_width)}"
            looks_of = "bold" if each.text == token.text else ""
            mark = "▸" if number == self._chosen else " "
            lines.append(Content.assemble((mark, "$text-accent"), (_visible(each.text), looks_of), figures))
        self._alternatives.update(Content("\n").join(lines))
        line = line_of(self._text, "".join(texts[: self._cursor + 1]).rstrip("\n"))
        lines_shown = max(1, min(3, self._area.size.height))
        self._area.scroll_to_region(Region(0, max(0, line - lines_shown // 2), 1, lines_shown), animate=False)


def _alternatives(token: TokenChoice) -> list[TokenChoice]:
    """Return the most probable tokens at a token's position, each as a `TokenChoice`.

    The sampled token is always included.
    """
    pairs = list(zip(token.top_texts, token.top_logprobs, strict=True))
    if token.text not in token.top_texts:
        pairs.append((token.text, token.logprob))
    return [TokenChoice(text, logprob, token.top_texts, token.top_logprobs) for text, logprob in pairs]


def _visible(text: str) -> str:
    """Return a token's text, padded to a column of 20 cells, with symbols for invisible characters."""
    shown = clean(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "  " + set_cell_size(shown if cell_len(shown) <= 18 else set_cell_size(shown, 17).rstrip() + "…", 18)
