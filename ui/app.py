"""The app: owns the engine's process, says how it is, and passes events on. It knows no widget's insides."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from textual import events, work
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.driver import Driver
from textual.reactive import reactive
from textual.screen import Screen
from textual.worker import WorkerFailed

from minillm.errors import MinillmError, UsageError
from minillm.service.client import ENGINE_COMMAND, EngineProcess
from minillm.service.messages import Load, Loaded, LoadFailed, Loading
from minillm.text.safe import clean, clean_line
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.screen import ChatScreen
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.dialogs.help import HelpScreen
from minillm.ui.dialogs.palette import Palette
from minillm.ui.messages import EngineCommand, EngineEvent, EngineState
from minillm.ui.settings import Settings
from minillm.ui.terminal import TerminalDriver, check_terminal, ending_on_signals
from minillm.ui.theme import DARK, LIGHT, preferred_theme

_SETTLED = 2.0  # seconds after which the first screen is there
_SOON = 0.01  # seconds between two looks whether a screen has its widgets


class ChatApp(App[None]):
    """``minillm chat``."""

    TITLE = "minillm"
    CSS_PATH = [Path(__file__).parent / name for name in ("app.tcss", "memory/memory.tcss")]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall")]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        Binding("f1", "help", "Help"),
        Binding("ctrl+t", "toggle_theme", "Light or dark", show=False),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]

    engine_state: reactive[EngineState] = reactive(EngineState())
    settings: reactive[Settings] = reactive(Settings(""))

    def __init__(
        self,
        settings: Settings,
        store: SessionStore | None = None,
        resumed: Conversation | None = None,
        *,
        question: str = "",
        engine_command: Sequence[str] = ENGINE_COMMAND,
        driver_class: type[Driver] = TerminalDriver,
    ) -> None:
        """``store``: where conversations are saved; ``resumed``: the one to go on with; ``question``: what is asked
        first; ``engine_command``: the program that plays the engine.
        """
        super().__init__(driver_class=driver_class)
        self.set_reactive(ChatApp.settings, settings)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = preferred_theme(settings.theme).name
        self._engine_command = engine_command
        self._engine: EngineProcess | None = None
        self.chat = ChatScreen(store or SessionStore.of_user())
        self._resumed = resumed
        self._question = question
        self._files = tempfile.TemporaryDirectory(prefix="minillm-", ignore_cleanup_errors=True)
        self._typed_early: deque[events.InputEvent | events.Paste] = deque()

    # --- the engine's process -----------------------------------------------------------------------------------------

    def get_default_screen(self) -> Screen:
        # With the classes of its size from the start, all widgets are styled once less before the first paint.
        for breakpoints, cells in zip((self.HORIZONTAL_BREAKPOINTS, self.VERTICAL_BREAKPOINTS), self.size, strict=True):
            self.chat.update_classes({max(each for each in breakpoints if each[0] <= cells)[1]: True}, update=False)
        return self.chat

    def refresh_css(self, animate: bool = True) -> None:
        """Style everything anew, for another theme.

        The first theme is chosen before anything is there to be styled. What Textual would parse for it, a tenth of the
        time until the first paint, it parses again with the screen: then the theme's colours are all that is needed.
        """
        if self.chat.is_attached:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    async def on_mount(self) -> None:
        # Importing torch in the other process takes a whole core: the first paint goes first.
        self.call_after_refresh(self.load_model)
        if self._resumed is not None:
            self.chat.call_later(self.chat.open_conversation, self._resumed)
        if self._question:
            self._ask(self._question)

    @work
    async def _ask(self, question: str) -> None:
        """Put a question into the prompt, and send it once the model is ready, unless it has been changed by then."""
        while not self.chat.is_mounted:
            await asyncio.sleep(_SOON)
        prompt = self.chat.query_one(PromptInput)
        prompt.text = question
        with contextlib.suppress(MinillmError):  # the chat says why the model does not load
            await self.until_ready()
            if prompt.text == question:
                prompt.post_message(PromptInput.Submitted(question))

    def load_model(self) -> None:
        """(Re)start the engine with the model of the settings. The conversation stays."""
        self._run_engine(self.settings.model)

    def stop_engine(self) -> None:
        """End the engine, in the midst of loading or not."""
        self.workers.cancel_group(self, "engine")
        self.engine_state = EngineState("off", self.settings.model)

    def choose_model(self, model: str) -> None:
        """Go on with another model."""
        self.settings = replace(self.settings, model=model)
        self.load_model()

    @work(group="engine", exclusive=True)
    async def _run_engine(self, model: str) -> None:
        """Start a process, load ``model``, pass on what it says, until it ends or another one takes its place."""
        log = Path(self._files.name) / "engine.log"
        self.engine_state = EngineState("loading", model, loading=Loading("starting the engine", 0, None, ""))
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
                if isinstance(event, Loading):
                    self.engine_state = EngineState("loading", model, loading=event)
                elif isinstance(event, Loaded):
                    self.engine_state = EngineState("ready", model, loaded=event)
                elif isinstance(event, LoadFailed):
                    self.engine_state = EngineState("failed", model, error=event.error)
                else:
                    self.chat.post_message(EngineEvent(event))
        except ValueError as error:
            problem = f"it said something unintelligible: {error}"
        finally:
            await asyncio.shield(engine.stop())  # until then it is there to be stopped by the app's own end
            if self._engine is engine:
                self._engine = None
        if self.engine_state.phase != "failed":
            words = problem or engine.last_words() or "it left no message"
            self.engine_state = EngineState("crashed", model, error=f"{_ending(engine.exit_code)}: {words}")

    async def until_ready(self) -> None:
        """Wait until the model can be asked.

        Raises:
            MinillmError: it does not load, or the engine ended.
        """
        while self.chat.engine_phase != "ready":
            if self.engine_state.phase in ("failed", "crashed"):
                raise MinillmError(self.engine_state.error)
            await asyncio.sleep(0.05)

    def on_engine_command(self, message: EngineCommand) -> None:
        if self._engine is not None:
            self._engine.send(message.command)

    async def on_unmount(self) -> None:
        self.chat.save()
        self.workers.cancel_all()
        if self._engine is not None:
            await self._engine.stop()
        self._files.cleanup()

    # --- what belongs to no screen ------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """What is typed at a screen that has no widgets yet waits for them.

        Pasted text passes the filter here, before any widget sees it.
        """
        if isinstance(event, events.Paste) and not event.is_forwarded:
            text = event.text.replace("\r\n", "\n").replace("\r", "\n")
            event = events.Paste(clean(text))
        if isinstance(event, events.InputEvent | events.Paste) and not event.is_forwarded:
            self._typed_early.append(event)
            await self._take_typed()
        else:
            await super().on_event(event)

    async def _take_typed(self) -> None:
        """Textual gives keys to a screen from the moment it is pushed, and its actions would find nothing there."""
        while self._typed_early and self.screen.is_mounted:
            await super().on_event(self._typed_early.popleft())
        if self._typed_early:
            self.set_timer(_SOON, self._take_typed)

    def say(self, text: str, *, severity: str = "information") -> None:
        """A notification; ``text`` may hold anything."""
        self.notify(clean_line(text, 400), severity=severity, markup=False)  # type: ignore[arg-type]

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_toggle_theme(self) -> None:
        self.set_theme("")

    def set_theme(self, name: str) -> None:
        """``light``, ``dark``, or empty: the other one.

        Raises:
            UsageError: no such theme.
        """
        themes = {"light": LIGHT, "dark": DARK, "": LIGHT if self.current_theme.dark else DARK}
        if name not in themes:
            raise UsageError(f"the theme is light or dark, not {name!r}")
        self.theme = themes[name].name

    def action_help_quit(self) -> None:
        """ctrl+c where nothing else takes it: close what is open above the chat."""
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        if isinstance(screen, ChatScreen):
            yield from screen.commands()

    # --- endings ------------------------------------------------------------------------------------------------------

    def leave(self, code: int) -> None:
        """End with this exit code, as soon as there is a whole screen to take down."""
        if self.chat.is_mounted:
            self.exit(return_code=code)
        else:
            asyncio.get_running_loop().call_later(_SOON, self.leave, code)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the app, if one did."""
        error = self._exception
        return error.__cause__ or error.error if isinstance(error, WorkerFailed) else error

    def _fatal_error(self) -> None:
        """Textual would print a traceback with all local variables; `run` says it in one line."""
        self._close_messages_no_wait()

    def _print_error_renderables(self) -> None:
        self._exit_renderables.clear()


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the engine was killed (signal {-exit_code})"
    return f"the engine ended (exit code {exit_code})"


def run(app: ChatApp) -> int:
    """Run the app in this process's terminal. Returns the exit code: 143 after SIGTERM, 129 after SIGHUP.

    Raises:
        UsageError: the terminal is none, or cannot be drawn on.
        Exception: what ended the app, if it was a defect; the terminal is restored by then.
    """
    check_terminal()

    def collect_garbage() -> None:
        gc.freeze()  # what is there by now stays
        gc.enable()

    async def until_the_end() -> None:
        asyncio.get_running_loop().call_later(_SETTLED, collect_garbage)
        with ending_on_signals(app.leave):
            await app.run_async()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(until_the_end())
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
