"""The app of ``minillm chat``: start, exit, and the keys that all screens share."""

import asyncio
import contextlib
import gc
import io
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from textual import events, work
from textual.app import SystemCommand
from textual.driver import Driver
from textual.screen import Screen

from minillm.errors import MinillmError
from minillm.service.messages import Event
from minillm.service.process import ENGINE_COMMAND
from minillm.text.safe import clean
from minillm.ui.chat.commands import COMMANDS
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.quitting import offer_draft, unfinished_work
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat_screen import ChatScreen, bindings_by_name, key_of
from minillm.ui.engine_app import EngineApp, EngineEvent
from minillm.ui.preferences import PreferencesFile
from minillm.ui.settings import Settings
from minillm.ui.terminal import check_terminal, ending_on_signals, pasted_text
from minillm.ui.textual_internals import TerminalDriver

_SETTLED = 2.0  # after this many seconds, the first screen is complete
_JOINERS = ("\u200c", "\u200d")  # invisible characters that Persian, Indic scripts and emoji need
_SOON = 0.01  # seconds between two checks for a screen's widgets


class ChatApp(EngineApp):
    """The app of ``minillm chat``."""

    TITLE = "minillm"
    CSS_PATH = [Path(__file__).parent / name for name in ("app.tcss", "memory/memory.tcss")]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall"), (32, "-high")]  # noqa: RUF012
    BINDINGS = [*COMMANDS.bindings("app", "everywhere")]  # noqa: RUF012

    def __init__(
        self,
        settings: Settings,
        store: SessionStore | None = None,
        resumed: Conversation | None = None,
        *,
        question: str = "",
        preferences_file: PreferencesFile | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        server: str = "",
        driver_class: type[Driver] = TerminalDriver,
    ) -> None:
        """Create the app.

        Args:
            store: the directory of saved conversations.
            resumed: the conversation to continue.
            question: a question to ask first.
            preferences_file: stores changed settings for the next start.
            engine_command: the program to run as the engine process.
            server: address of the server that ``engine_command`` connects to; empty for an engine on this machine.
        """
        super().__init__(settings, engine_command, driver_class, preferences_file, server)
        if settings.keymap:
            from minillm.ui.keymap import checked_keymap

            self.set_keymap(checked_keymap(settings.keymap, bindings_by_name()))
        self.chat = ChatScreen(store or SessionStore.of_user())
        self._resumed = resumed
        self._question = question
        self.unsaved: MinillmError | None = None  # the error if the conversation could not be saved at the end
        self._typed_early: deque[events.InputEvent | events.Paste] = deque()

    def get_default_screen(self) -> Screen:
        # Set the CSS classes for the screen's size now. Textual would set them later, and style all widgets again.
        for breakpoints, cells in zip((self.HORIZONTAL_BREAKPOINTS, self.VERTICAL_BREAKPOINTS), self.size, strict=True):
            self.chat.update_classes({max(each for each in breakpoints if each[0] <= cells)[1]: True}, update=False)
        return self.chat

    def refresh_css(self, animate: bool = True) -> None:
        """Restyle all widgets for another theme. Before there are widgets, only set the theme's colors.

        Textual would parse all styles for the first theme, and again when the screen is mounted. Parsing takes a tenth
        of the time until the first paint.
        """
        if self.chat.is_attached:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    async def on_mount(self) -> None:
        # Paint first, because importing torch in the engine process takes a whole core.
        self.call_after_refresh(self.load_model)
        if self._resumed is not None:
            self.chat.chat_pane.call_later(self.chat.chat_pane.open_conversation, self._resumed)
        self.chat.chat_pane.call_later(offer_draft, self.chat.chat_pane)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))  # the terminal has lost the screen
        if self._question:
            self._ask(self._question)

    @work
    async def _ask(self, question: str) -> None:
        """Ask a question as soon as the model is ready."""
        while not self.chat.is_mounted or self.chat.chat_pane.engine.phase == "off":
            await asyncio.sleep(_SOON)
        self.chat.chat_pane.prompt.post_message(PromptInput.Submitted(question))

    def pass_on(self, event: Event) -> None:
        self.chat.post_message(EngineEvent(event))

    async def until_ready(self) -> None:
        """Wait until the model is ready.

        Raises:
            MinillmError: the model cannot be loaded, or the engine has ended.
        """
        while self.chat.chat_pane.engine.phase != "ready":
            if self.engine_state.phase in ("failed", "crashed"):
                raise MinillmError(self.engine_state.error)
            await asyncio.sleep(0.05)

    async def on_event(self, event: events.Event) -> None:
        """Handle an event. Pasted text is filtered here, before any widget sees it.

        Keys wait if the screen has no widgets yet, or if the command of an earlier key has not run.
        """
        if isinstance(event, events.Key) and event.character in _JOINERS and not event.is_forwarded:
            event = events.Paste(event.character or "")  # as a key, no widget would accept an invisible character
        if isinstance(event, events.Paste) and not event.is_forwarded:
            event = events.Paste(clean(pasted_text(event.text)))
        if isinstance(event, events.InputEvent | events.Paste) and not event.is_forwarded:
            self._typed_early.append(event)
            await self._take_typed()
        else:
            await super().on_event(event)

    async def _take_typed(self) -> None:
        """Pass on the keys that were typed too early, once the screen has widgets and all earlier commands have run.

        Textual itself sends keys to a screen even before the screen's widgets exist. The actions of these keys would
        fail.
        """
        while self._typed_early and self.screen.is_mounted and not self.chat.chat_pane.num_waiting:
            event = self._typed_early.popleft()
            if isinstance(event, events.Key | events.Paste) and self.screen is self.chat:
                self.chat.lead(event)
            await super().on_event(event)
        if self._typed_early:
            self.set_timer(_SOON, self._take_typed)

    async def action_command(self, name: str, argument: str = "") -> None:
        """Run a slash command at once. Only for commands that do not change the conversation."""
        await self.chat.chat_pane.run_command(name, argument)

    def action_help_quit(self) -> None:
        """Handle ctrl+c if no widget has handled it: close the dialog above the chat."""
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def action_leave(self) -> None:
        """Quit. If work would be lost, quit only when the user presses the key again."""
        unfinished = unfinished_work(self.chat.chat_pane)
        if not unfinished or self.chat.quit_key.is_repeated(self.chat.chat_pane, key_of(self, "quit"), unfinished):
            self.exit()

    def action_command_palette(self) -> None:
        from minillm.ui.dialogs import Palette

        if self.screen is self.chat:  # dialogs have no commands
            self.push_screen(Palette(id="--command-palette"))

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        """Yield the entries of the command palette: all slash commands.

        An entry runs its command. If the command needs an argument, the entry writes the command's name into the prompt
        instead.
        """
        for command in COMMANDS.values():
            title = command.name.capitalize() + (f"  {command.shown_key}" if command.shown_key else "")
            if command.needs_argument:
                title = f"{command.name.capitalize()} {command.argument} …"
                yield SystemCommand(
                    title, command.summary, partial(self.chat.chat_pane.prompt.begin, f"/{command.name} ")
                )
            else:
                yield SystemCommand(title, command.summary, partial(self.chat.action_command, command.name))

    async def on_unmount(self) -> None:
        try:
            self.chat.chat_pane.store.save(self.chat.chat_pane.conversation)
        except MinillmError as error:
            self.unsaved = error
        with contextlib.suppress(MinillmError):
            self.chat.chat_pane.store.keep_draft(self.chat.chat_pane.waiting.unsent)

    def leave(self, code: int) -> None:
        """Exit with the exit code ``code``, as soon as the first screen is mounted."""
        if self.chat.is_mounted:
            self.exit(return_code=code)
        else:
            asyncio.get_running_loop().call_later(_SOON, self.leave, code)


def run(app: ChatApp, typed: bytes = b"") -> int:
    """Run the app in this process's terminal. Return the exit code: 143 after SIGTERM, 129 after SIGHUP.

    Args:
        typed: bytes that were read from the terminal before the app started.

    Raises:
        UsageError: there is no terminal, or it cannot be drawn on.
        MinillmError: the conversation cannot be saved at the end.
        Exception: the bug that ended the app. The terminal is restored by then.
    """
    check_terminal()
    if isinstance(sys.__stderr__, io.TextIOWrapper):
        sys.__stderr__.reconfigure(encoding="utf-8", errors="replace")  # Textual draws on it
    app.typed_before = typed

    def collect_garbage() -> None:
        gc.freeze()  # the objects of the first screen live until the app ends
        gc.enable()

    async def until_the_end() -> None:
        asyncio.get_running_loop().call_later(_SETTLED, collect_garbage)
        with ending_on_signals(app.leave):
            await app.run_async()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(until_the_end())
    if app.failure is not None:
        raise app.failure
    if app.unsaved is not None:
        raise app.unsaved
    return app.return_code or 0
