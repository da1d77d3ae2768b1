"""The app as its screens know it: the engine's process, the settings, notifications, and the messages between them."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from textual import work
from textual.driver import Driver
from textual.message import Message
from textual.reactive import reactive
from textual.theme import Theme

from minillm.errors import UsageError
from minillm.progress import Progress
from minillm.service.client import EngineProcess
from minillm.service.messages import Command, Event, Load, Loaded, LoadFailed, Loading
from minillm.text.safe import clean_line
from minillm.ui.settings import Settings
from minillm.ui.textual_internals import QuietApp

# Colours have meaning: blue is owned and alive, violet is shared, amber warns, red failed.
_COLOURS = {
    "primary": ("#7fa8d1", "#2d6597"),
    "secondary": ("#b596d8", "#7a4bab"),
    "success": ("#8dbb8a", "#35743e"),
    "warning": ("#dcae5f", "#9a6200"),
    "error": ("#e0796c", "#b0352a"),
    "foreground": ("#d3dae1", "#2a2f35"),
    "background": ("#11151a", "#fcfbf8"),
    "surface": ("#171c22", "#f3f1eb"),
    "panel": ("#1f262e", "#e8e5dd"),
}  # dark, light


def _theme(name: str, *, dark: bool) -> Theme:
    colours: dict[str, Any] = {part: shades[0 if dark else 1] for part, shades in _COLOURS.items()}
    blue, ground = colours["primary"], colours["background"]
    footer = {"footer-key-foreground": blue, "footer-background": ground}
    return Theme(name, accent=blue, dark=dark, variables=footer, **colours)


DARK, LIGHT = _theme("minillm-dark", dark=True), _theme("minillm-light", dark=False)


def preferred_theme(name: str = "") -> Theme:
    """The one called ``dark`` or ``light``; without a name by the background that the terminal reports in ``COLORFGBG``
    (rxvt, Konsole, iTerm2); dark where it is silent.
    """
    if name:
        return LIGHT if name == "light" else DARK
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background in ("7", "15") else DARK


Phase = Literal["off", "loading", "ready", "failed", "crashed"]


@dataclass(frozen=True)
class EngineState:
    """The state of the engine's process: the title, the loading bar and the prompt depend on it."""

    phase: Phase = "off"
    model: str = ""
    loading: Progress | None = None  # while phase is "loading"
    loaded: Loaded | None = None  # while phase is "ready"
    error: str = ""  # why phase is "failed" or "crashed"; not cleaned for a terminal


@dataclass
class EngineEvent(Message, bubble=False):
    """From the app to the chat screen: the engine said this, or is in another state."""

    event: Event | EngineState


@dataclass
class EngineCommand(Message):
    """From a screen to the app: tell the engine this."""

    command: Command


@dataclass
class CommandAsked(Message):
    """From a widget of the talk: run this slash command."""

    name: str
    argument: str = ""


class EngineApp(QuietApp):
    """Starts an engine, says how it is, and passes its events on. It knows no screen."""

    engine_state: reactive[EngineState] = reactive(EngineState())
    settings: reactive[Settings] = reactive(Settings(""))

    def __init__(self, settings: Settings, engine_command: Sequence[str], driver_class: type[Driver]) -> None:
        super().__init__(driver_class=driver_class)
        self.set_reactive(EngineApp.settings, settings)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = preferred_theme(settings.theme).name
        self._engine_command = engine_command
        self._engine: EngineProcess | None = None
        self._files = tempfile.TemporaryDirectory(prefix="minillm-", ignore_cleanup_errors=True)

    def pass_on(self, event: Event) -> None:
        """Give an event of the engine to the screen that shows it."""
        raise NotImplementedError

    def load_model(self) -> None:
        """(Re)start the engine with the model of the settings. The conversation stays."""
        self._run_engine(self.settings.model)

    def stop_engine(self) -> None:
        """End the engine, in the midst of loading or not."""
        self.workers.cancel_group(self, "engine")
        self.engine_state = EngineState("off", self.settings.model)

    def choose_model(self, model: str) -> None:
        self.settings = replace(self.settings, model=model)
        self.load_model()

    @work(group="engine", exclusive=True)
    async def _run_engine(self, model: str) -> None:
        """Start a process, load ``model``, pass on its events, until it ends or another one takes its place."""
        log = Path(self._files.name) / "engine.log"
        self.engine_state = EngineState("loading", model, loading=Progress("starting the engine", 0, None, ""))
        try:
            engine = await EngineProcess.start(log, self._engine_command)
        except OSError as error:
            self.engine_state = EngineState("crashed", model, error=f"the engine cannot be started: {error}")
            return
        self._engine = engine
        problem = ""
        try:
            engine.send(Load(model, dict(self.settings.engine)))
            async for event in engine.events():
                match event:
                    case Loading(progress):
                        self.engine_state = EngineState("loading", model, loading=progress)
                    case Loaded():
                        self.engine_state = EngineState("ready", event.model, loaded=event)
                    case LoadFailed(reason):
                        self.engine_state = EngineState("failed", model, error=reason)
                    case _:
                        self.pass_on(event)
        except ValueError as error:
            problem = f"it said something unintelligible: {error}"
        finally:
            await asyncio.shield(engine.stop())  # until then it is there to be stopped by the app's own end
            if self._engine is engine:
                self._engine = None
        if self.engine_state.phase != "failed":
            code = engine.exit_code
            ending = f"was killed (signal {-code})" if code is not None and code < 0 else f"ended (exit code {code})"
            words = problem or engine.last_words() or "it left no message"
            self.engine_state = EngineState("crashed", model, error=f"the engine {ending}: {words}")

    def on_engine_command(self, message: EngineCommand) -> None:
        if self._engine is not None:
            self._engine.send(message.command)

    async def on_unmount(self) -> None:
        self.workers.cancel_all()
        if self._engine is not None:
            await self._engine.stop()
        self._files.cleanup()

    def notify(self, message: str, **options: Any) -> None:
        """Show a notification; ``message`` may hold anything."""
        super().notify(clean_line(message, 400), **{**options, "markup": False})

    def set_theme(self, name: str) -> None:
        """``light``, ``dark``, or empty: the other one.

        Raises:
            UsageError: no such theme.
        """
        themes = {"light": LIGHT, "dark": DARK, "": LIGHT if self.current_theme.dark else DARK}
        if name not in themes:
            raise UsageError(f"the theme is light or dark, not {name!r}")
        self.theme = themes[name].name
