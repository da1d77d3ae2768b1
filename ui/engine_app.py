"""The base class of the app: engine process, settings, notifications, and the messages between app and screens."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from textual import work
from textual.driver import Driver
from textual.message import Message
from textual.reactive import reactive
from textual.theme import Theme

from minillm.errors import MinillmError
from minillm.progress import Progress
from minillm.service.client import CommandClient
from minillm.service.messages import Command, Event, Load, Loaded, LoadFailed, Loading, Preparing
from minillm.text.safe import clean_line
from minillm.ui.preferences import Preferences, PreferencesFile
from minillm.ui.settings import Settings
from minillm.ui.textual_internals import CrashStoringApp
from minillm.ui.themes import find_theme, for_terminal

Phase = Literal["off", "loading", "ready", "failed", "crashed"]


@dataclass(frozen=True)
class EngineState:
    """The state of the engine process, as shown by the title, the loading bar and the prompt."""

    phase: Phase = "off"
    model: str = ""
    loading: Progress | None = None  # set while the phase is "loading"
    loaded: Loaded | None = None  # set while the phase is "ready"
    preparing: Preparing | None = None  # set while the engine compiles kernels and records CUDA graphs in idle moments
    error: str = ""  # the reason for the phase "failed" or "crashed"; not cleaned for a terminal
    server: str = ""  # address of the engine's server; empty for an engine on this machine


@dataclass
class EngineEvent(Message, bubble=False):
    """Sends an event or a new state of the engine to the chat screen."""

    event: Event | EngineState


@dataclass
class EngineCommand(Message):
    """Asks the app to send a command to the engine."""

    command: Command


@dataclass
class CommandRequested(Message):
    """Asks the chat pane to run a slash command."""

    name: str
    argument: str = ""


class EngineApp(CrashStoringApp):
    """Runs the engine process, publishes its state, and passes on its events. It does not depend on any screen."""

    engine_state: reactive[EngineState] = reactive(EngineState())
    settings: reactive[Settings] = reactive(Settings(""))

    def __init__(
        self,
        settings: Settings,
        engine_command: Sequence[str],
        driver_class: type[Driver],
        preferences_file: PreferencesFile | None = None,
        server: str = "",
    ) -> None:
        super().__init__(driver_class=driver_class)
        self._preferences_file = preferences_file  # None: nothing is saved
        self.preferences = Preferences() if preferences_file is None else preferences_file.read()
        self.set_reactive(EngineApp.settings, settings)
        self._use_theme(find_theme(settings.theme))
        self._engine_command, self._server = engine_command, server
        self._engine: CommandClient | None = None

    def pass_on(self, event: Event) -> None:
        """Pass an event of the engine to the screen. A subclass implements this."""
        raise NotImplementedError

    def load_model(self) -> None:
        """Start or restart the engine with the model in the settings. The conversation stays."""
        self._run_engine(self.settings.model)

    def stop_engine(self) -> None:
        """Stop the engine process, even while it loads a model."""
        self.workers.cancel_group(self, "engine")
        self._show_state("off", self.settings.model)

    def _show_state(self, phase: Phase, model: str, **facts: Any) -> None:
        self.engine_state = EngineState(phase, model, server=self._server, **facts)

    def choose_model(self, model: str) -> None:
        self.settings = replace(self.settings, model=model)
        self.load_model()

    @work(group="engine", exclusive=True)
    async def _run_engine(self, model: str) -> None:
        """Start a process, load ``model``, and pass on events until the process ends or is replaced."""
        self._show_state("loading", model, loading=Progress("starting the engine", 0, None, ""))
        try:
            engine = CommandClient(self._engine_command)
        except OSError as error:
            self._show_state("crashed", model, error=f"the engine cannot be started: {error}")
            return
        problem = ""
        try:
            await engine.connect()
            self._engine = engine
            engine.send(Load(model, dict(self.settings.engine)))
            async for event in engine.events():
                match event:
                    case Loading(progress):
                        self._show_state("loading", model, loading=progress)
                    case Loaded():
                        self._show_state("ready", event.model, loaded=event)
                    case Preparing(done, total):
                        preparing = event if done < total else None
                        self.engine_state = replace(self.engine_state, preparing=preparing)
                    case LoadFailed(reason):
                        self._show_state("failed", model, error=reason)
                    case _:
                        self.pass_on(event)
        except ValueError as error:
            who = f"server at {self._server}" if self._server else "engine"
            problem = f"the {who} sent an invalid message: {error}"
        finally:
            await asyncio.shield(engine.process.stop())  # meanwhile, `on_unmount` may stop it as well
            if self._engine is engine:
                self._engine = None
        if self.engine_state.phase != "failed":
            code = await engine.process.wait()
            ending = f"was killed (signal {-code})" if code < 0 else f"ended (exit code {code})"
            words = engine.last_words() or "it left no message"
            self._show_state("crashed", model, error=problem or f"the engine {ending}: {words}")

    def on_engine_command(self, message: EngineCommand) -> None:
        if self._engine is not None:
            self._engine.send(message.command)

    def call_user(self, title: str) -> None:
        """Ring the bell, and show in the window's title that an answer is ready.

        ``title`` is the conversation's title. Control characters in it are replaced.
        """
        self.bell()
        self.set_window_title(f"✓ {clean_line(title, 80)} · minillm")

    async def on_unmount(self) -> None:
        self.restore_window_title()
        self.workers.cancel_all()
        if self._engine is not None:
            await self._engine.process.stop()

    def notify(self, message: str, **options: Any) -> None:
        """Show a notification, and remove the previous one. Control characters in ``message`` are replaced."""
        self.clear_notifications()
        super().notify(clean_line(message, 400), **{**options, "markup": False})

    def watch_settings(self, before: Settings, after: Settings) -> None:
        """Save the settings that the user changed."""
        preferences = self.preferences.changed(before, after)
        if self._preferences_file is not None and preferences != self.preferences:
            self.save_preferences(preferences)

    def save_preferences(self, preferences: Preferences) -> None:
        """Save ``preferences`` for the next start. If that fails, show an error."""
        self.preferences = preferences
        self._try_to(lambda file: file.write(preferences))

    def _try_to(self, write: Callable[[PreferencesFile], None]) -> None:
        if self._preferences_file is not None:
            try:
                write(self._preferences_file)
            except MinillmError as error:
                self.notify(f"this will not be saved: {error}")

    def set_theme(self, name: str) -> None:
        """Switch to the theme with this name. Without a name, switch between light and dark.

        Raises:
            UsageError: there is no such theme.
        """
        name = name or ("light" if self.current_theme.dark else "dark")
        self._use_theme(find_theme(name))
        self._try_to(lambda file: file.write_theme(name))

    def _use_theme(self, theme: Theme) -> None:
        theme = for_terminal(theme, self.console.color_system, without_color=self.no_color)
        self.register_theme(theme)
        self.theme = theme.name
