"""The lines at the top and the bottom of the screen: model, names of the views, loading progress, status, keys."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget

from minillm.progress import Progress, size
from minillm.text.safe import clean_line
from minillm.ui.engine_app import EngineState
from minillm.ui.numbers import bar, count, duration
from minillm.ui.settings import Settings, settings_summary

FULL = 0.8  # if more than this fraction of the context is in use, the status bar shows a warning
_PHASES = {"off": "no model loaded", "loading": "loading", "failed": "not loaded", "crashed": "engine ended"}
_ACTIVITIES = {
    "no model": ("○", "$text-warning"),
    "loading": ("◌", "$text-success"),
    "ready": ("●", "$text-success"),
    "others running": ("◉", "$text-success"),
    "reading": ("◐", "$text-success"),
    "generating": ("◉", "$text-success"),
    "stopping": ("◍", "$text-success"),
    "summarizing": ("◉", "$text-success"),
    "failed": ("✖", "$text-error"),
}


def _spread(left: Content, right: Content, width: int) -> Content:
    """Return a line of ``width`` cells with ``left`` at its left end and ``right`` at its right end."""
    return Content.assemble(left, " " * max(1, width - left.cell_length - right.cell_length), right)


class TitleBar(Widget):
    """Shows the model and its server at the left, and at the right as many of the sampling settings as fit."""

    engine_state: reactive[EngineState] = reactive(EngineState())
    settings: reactive[Settings] = reactive(Settings(""))

    def render(self) -> Content:
        state, width = self.engine_state, self.content_size.width
        left = [clean_line(state.model or self.settings.model, 60)]
        if state.loaded is not None:
            left += [clean_line(state.loaded.device, 20), clean_line(state.loaded.dtype, 20)]
            if state.preparing is not None:
                left.append(f"warming up {state.preparing.done / state.preparing.total:.0%}")
        elif state.phase in _PHASES:
            left.append(_PHASES[state.phase])
        right = settings_summary(self.settings).split(" · ") + ["system prompt"] * bool(self.settings.system)
        if state.server and state.loaded is not None:
            left.insert(1, f"at {clean_line(state.server, 60)}")
        elif state.server:  # its model is not known yet
            left[0] = clean_line(state.server, 60)
        while right and sum(len(word) + 3 for word in left + right) > width:
            right.pop()
        text = Content(" · ").join([Content.styled(left[0], "$text bold"), *map(Content, left[1:])])
        return _spread(text, Content(" · ".join(right)), width)


@dataclass(frozen=True)
class View:
    """The names of a memory view, and the key that opens it. ``short`` is the name for narrow screens."""

    name: str
    key: str
    short: str
    summary: str


VIEWS = (
    View("pool", "f5", "pool", "every block of the cache"),
    View("tables", "f6", "table", "the block tables"),
    View("strands", "f7", "strand", "the text in its blocks, shared until it forks"),
    View("events", "f8", "event", "allocate, fork, copy on write, free, hit, evict, swap"),
    View("memory", "f9", "mem", "used, shared, cached and wasted memory"),
    View("steps", "f10", "step", "the work of each step and its time"),
)
_MARK = "▸"  # marks the current view, for use without color


class ViewTabs(Widget):
    """Shows the names of the memory views, each with the key that opens it. Names are shortened on narrow screens."""

    current: reactive[str] = reactive("pool")

    @dataclass
    class Picked(Message):
        """A view was clicked."""

        view: str

    def render(self) -> Content:
        labels, gap = tab_labels(self.content_size.width)
        parts: list[Content] = []
        for view, (key, title) in zip(VIEWS, labels, strict=True):
            if view.name == self.current:
                part = ((key, "$footer-key-foreground"), (_MARK, "$primary"), (title, "bold $foreground"))
            else:
                part = ((key, "$dim"), (" ", "$primary"), (title, "$dim"))
            parts.append(Content.assemble(*part))
        return Content(" " * gap).join(parts)

    def on_click(self, event: events.Click) -> None:
        labels, gap = tab_labels(self.content_size.width)
        start = self.styles.padding.left
        for view, (key, title) in zip(VIEWS, labels, strict=True):
            end = start + len(key) + 1 + len(title)
            if start <= event.x < end:
                self.post_message(self.Picked(view.name))
            start = end + gap


def tab_labels(width: int) -> tuple[list[tuple[str, str]], int]:
    """Choose labels of the memory views that fit into ``width`` cells.

    Return the key and title of each view, and the number of cells between two views.
    """
    full = [(view.key.upper(), view.name) for view in VIEWS]
    short = [(view.key.upper(), view.short) for view in VIEWS]
    numbers = [(key[1:], title) for key, title in short]  # without the F
    mixed = [short[0], *numbers[1:]]
    for labels, gap in ((full, 3), (full, 2), (full, 1), (short, 1), (mixed, 1), (numbers, 1)):
        if _cells(labels, gap) <= width:
            return labels, gap
    while _cells(numbers, 1) > width and (longest := max(len(title) for _, title in numbers)) > 1:
        at = next(at for at, (_, title) in enumerate(numbers) if len(title) == longest)
        numbers[at] = numbers[at][0], numbers[at][1][:-1]
    return numbers, 1


def _cells(labels: Sequence[tuple[str, str]], gap: int) -> int:
    return sum(len(key) + 1 + len(title) for key, title in labels) + gap * (len(labels) - 1)


class LoadingBar(Widget):
    """Shows the progress and speed of downloading and loading a model."""

    progress: reactive[Progress | None] = reactive(None)
    _label = ""
    _began = (0.0, 0)  # the time when the current label first appeared, and the progress at that time

    def watch_progress(self, loading: Progress | None) -> None:
        if loading is not None and loading.label != self._label:
            self._label = loading.label
            self._began = (time.monotonic(), loading.done)

    def render(self) -> Content:
        if self.progress is None:
            return Content("")
        elapsed = time.monotonic() - self._began[0]
        rate = (self.progress.done - self._began[1]) / elapsed if elapsed > 0.5 else 0.0
        return Content(progress_line(self.progress, rate, self.content_size.width))


def progress_line(loading: Progress, rate: float, width: int) -> str:
    """Return the line that shows ``loading``. ``rate`` is in ``loading.unit`` per second, 0 if unknown."""
    in_bytes, total = loading.unit == "bytes", loading.total
    shown, unit = (size, "") if in_bytes else (count, f" {clean_line(loading.unit, 20)}")
    words = [clean_line(loading.label, 60)]
    if total:
        done = min(loading.done, total)
        words += [bar(done / total, max(4, min(24, width - 60))), f"{shown(done)} of {shown(total)}{unit}"]
        if rate > 0 and in_bytes:
            words.append(f"{size(rate)}/s")
            if done < total:
                words.append(f"{duration((total - done) / rate)} left")
    elif loading.done:
        words.append(f"{shown(loading.done)}{unit}")
    return "  ".join([*words, "esc cancels"])


@dataclass(frozen=True)
class Status:
    """The content of the line below the prompt. Sizes are in tokens and blocks, 0 if unknown."""

    activity: str = "no model"  # a key of `_ACTIVITIES`
    tokens_per_second: float = 0.0
    time_to_first_token: float | None = None
    context_used: int = 0
    context_size: int = 0
    blocks_used: int = 0
    blocks_total: int = 0


class StatusBar(Widget):
    """Shows a `Status`. Parts that do not fit are left out, the least important first."""

    status: reactive[Status] = reactive(Status())

    def render(self) -> Content:
        status, width, gap = self.status, self.content_size.width, Content("   ")
        mark, style = _ACTIVITIES[status.activity]
        left, right = [Content.styled(f"{mark} {status.activity}", style)], []
        if status.tokens_per_second:
            left.append(Content(f"{status.tokens_per_second:.1f} tok/s"))
        if status.time_to_first_token is not None:
            left.append(Content(f"first token {duration(status.time_to_first_token)}"))
        if status.context_size:
            fraction = status.context_used / status.context_size
            meter = f"{bar(fraction, 10)} " if width >= 96 else ""
            used = f"context {meter}{count(status.context_used)}/{count(status.context_size)} ({fraction:.0%})"
            right.append(Content.styled(f"{used} !", "$text-warning bold") if fraction > FULL else Content(used))
        if status.blocks_total:
            right.append(Content(f"blocks {count(status.blocks_used)}/{count(status.blocks_total)}"))
        while len(left) + len(right) > 1 and gap.join(left).cell_length + gap.join(right).cell_length + 1 > width:
            parts = left if len(left) > 2 or (len(left) > 1 and len(right) < 2) else right
            parts.pop()
        return _spread(gap.join(left), gap.join(right), width)


def hidden_keys(actions: Mapping[str, str], *, priority: bool = False) -> list[Binding]:
    """Convert a dictionary key -> action to bindings. The key bar does not show them."""
    return [Binding(key, action, show=False, priority=priority) for key, action in actions.items()]


def named_keys(actions: Mapping[str, tuple[str, str]], *, priority: bool = False) -> list[Binding]:
    """Convert a dictionary name -> (key, action) to bindings.

    The key bar does not show them. Users may replace the keys in ``[keymap]``, under these names.
    """
    return [Binding(key, action, show=False, priority=priority, id=name) for name, (key, action) in actions.items()]


_FIRST_KEYS = ("Keys", "Help", "Quit")


class KeyBar(Widget):
    """Shows as many of the screen's keys as fit. A click on a key presses it.

    Textual's own footer has a widget for each key, and creates all of them again whenever the focus moves. That takes a
    sixth of the time until the first screen.
    """

    ALLOW_SELECT = False

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        if screen.is_current:
            self.refresh()

    def _keys(self) -> list[tuple[str, Content]]:
        """Return the keys that fit, in order, each with its label.

        If not all keys fit, the keys for the menu, the help, the list of commands and quitting have priority.
        """
        found: list[tuple[str, Content, bool]] = [("slash", self._label("/", "Commands"), True)]
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            if binding.show and enabled:
                text = self._label(self.app.get_key_display(binding), binding.description)
                found.append((binding.key, text, binding.description in _FIRST_KEYS))
        space, shown = self.content_size.width, set[int]()
        for at in sorted(range(len(found)), key=lambda at: not found[at][2]):
            if found[at][1].cell_length <= space:
                space -= found[at][1].cell_length
                shown.add(at)
        return [(key, text) for at, (key, text, _) in enumerate(found) if at in shown]

    @staticmethod
    def _label(key: str, description: str) -> Content:
        return Content.assemble((f" {key} ", "bold $footer-key-foreground"), f"{description} ")

    def render(self) -> Content:
        return Content("").join(text for _, text in self._keys())

    def on_click(self, event: events.Click) -> None:
        end = self.styles.padding.left
        for key, text in self._keys():
            end += text.cell_length
            if event.x < end:
                self.app.simulate_key(key)
                return
