"""The chat's screen: the chat pane, the memory panel next to it, and the keys of both."""

from functools import partial

from textual import events, getters, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.events import ScreenResume
from textual.screen import Screen

from minillm.service.messages import BlockFacts, CacheChanged, MemoryUse, Stepped
from minillm.ui.bars import KeyBar, TitleBar, named_keys
from minillm.ui.chat.candidates import CandidateCard
from minillm.ui.chat.chat_pane import ChatPane
from minillm.ui.chat.commands import COMMANDS
from minillm.ui.chat.quitting import QuitKey
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.engine_app import EngineApp, EngineEvent, EngineState
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import Pool
from minillm.ui.memory_drawing import MemoryDrawing
from minillm.ui.textual_internals import FillsTerminal, IgnoresRemovedWidgets

_SCROLLS = {"pageup": "page_up", "pagedown": "page_down", "ctrl+up": "up", "ctrl+down": "down", "ctrl+home": "home",
            "ctrl+end": "end"}  # fmt: skip
_KEYS = {
    "stop": ("escape", "stop"), "interrupt": ("ctrl+c", "interrupt"), "expand": ("alt+v", "expand"),
    "wider": ("alt+shift+left", "widen(1)"), "narrower": ("alt+shift+right", "widen(-1)"),
    "select-previous": ("alt+up", "select(-1)"), "select-next": ("alt+down", "select(1)"),
}  # name of an action -> (key, action)  # fmt: skip
_WIDTHS, _WIDTH_STEP, _USUAL_WIDTH = (25, 70), 5, 40  # widths of the memory panel, in percent: see `memory.tcss`


class ChatScreen(FillsTerminal, IgnoresRemovedWidgets, Screen[None]):
    """Handles keys, and passes the engine's events to the chat pane or the memory panel."""

    app = getters.app(EngineApp)
    panel = getters.query_one(MemoryPanel)

    BINDINGS = [  # noqa: RUF012
        *named_keys(_KEYS, priority=True),
        *named_keys({"next": ("tab", "next")}),
        Binding("ctrl+g", "menu", "Keys", priority=True, id="menu"),
        *named_keys(
            {f"scroll-{at.replace('_', '-')}": (key, f"scroll({at!r})") for key, at in _SCROLLS.items()}, priority=True
        ),
        *COMMANDS.bindings("chat"),
    ]

    def __init__(self, store: SessionStore) -> None:
        super().__init__()
        self.chat_pane = ChatPane(store, COMMANDS)
        self.pool: Pool | None = None
        self.memory = MemoryDrawing(self, self.chat_pane)
        self.quit_key = QuitKey()
        self._phase = EngineState().phase
        self._width = _USUAL_WIDTH

    def compose(self) -> ComposeResult:
        yield TitleBar()
        with Container(id="body"):
            yield self.chat_pane
            yield MemoryPanel()
        yield KeyBar()

    def on_screen_resume(self, event: ScreenResume) -> None:
        if not self.stack_updates:  # at the first time, all widgets have just been styled
            event.refresh_styles = False

    def on_mount(self) -> None:
        self.watch(self.app, "engine_state", self._engine_state_changed)
        self.watch(self.app, "settings", partial(setattr, self.query_one(TitleBar), "settings"))
        self.watch(self.chat_pane, "beside_model", self.memory.drawing.pace)
        self.watch(self.chat_pane, "leaf", lambda _: self.memory.drawing.soon(), init=False)

    def _engine_state_changed(self, state: EngineState) -> None:
        self.post_message(EngineEvent(state))  # as a message, so that it is handled after earlier events

    def _take_state(self, state: EngineState) -> None:
        before, self._phase = self._phase, state.phase
        self.query_one(TitleBar).engine_state = state
        if state.phase != before and (state.loaded is not None or self.pool is not None):
            loaded = state.loaded
            self.show_pool(
                None if loaded is None else Pool(loaded.num_blocks, loaded.block_size, loaded.block_bytes,
                                                 loaded.num_host_blocks, loaded.max_model_len)
            )  # fmt: skip

    def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        if isinstance(event, CacheChanged | Stepped | MemoryUse):
            self.panel.take(event)
            self.memory.take(event)
        elif isinstance(event, BlockFacts):
            self.panel.show_facts(event)
        else:
            if isinstance(event, EngineState):
                self._take_state(event)
            self.chat_pane.post_message(EngineEvent(event))

    def show_pool(self, pool: Pool | None) -> None:
        """Show the pool of a newly loaded model. None: no model is loaded."""
        self.pool = self.chat_pane.pool = pool
        self.panel.show_pool(pool)
        self.chat_pane.transcript.show_blocks(pool)

    def action_command(self, name: str, argument: str = "") -> None:
        """Queue a slash command, to run after all messages that the chat pane has already received.

        Commands must run in the chat pane's own task. Actions of keys and of the palette run in other tasks, where a
        command could change the conversation while a question is being asked.
        """
        self.chat_pane.call_command(name, argument)

    def action_stop(self) -> None:
        """Handle Escape. Do the first of these that applies:

        - leave full screen;
        - close a popup of the prompt, or the search;
        - take back a question that waits;
        - stop the answer, or the summary of a conversation;
        - cancel loading;
        - cancel editing, and focus the prompt.
        """
        pane = self.chat_pane
        if self.maximized is not None:
            self.minimize()
        elif self.has_class("-expanded"):
            self.action_expand()
        elif pane.prompt.close_popup():
            pass
        elif pane.search.close():
            pane.prompt.focus()
        elif pane.waiting.restore_to_prompt():
            pass
        elif pane.run is not None:
            pane.run.stop()
            pane.refresh_status()
        elif pane.compaction is not None:
            pane.compaction.stop()
        elif self._phase == "loading":
            self.app.stop_engine()
        else:
            if pane.editing is not None:
                pane.prompt.text = ""
                pane.editing = None
                self.notify("your question is unchanged")
            self.clear_selection()
            pane.transcript.select(None)
            pane.prompt.focus()

    def action_interrupt(self) -> None:
        """Copy the selection. Without a selection, stop the answer or loading.

        If nothing runs, quit when the user presses the key again.
        """
        selected = self.chat_pane.prompt.selected_text or self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
        elif self.chat_pane.run is not None or self._phase == "loading":
            self.action_stop()
        elif self.quit_key.is_repeated(self.chat_pane, key_of(self.app, "interrupt")):
            self.app.exit()

    def lead(self, event: events.Key | events.Paste) -> None:
        """Focus the prompt if the user types a letter or pastes text that the focused widget does not use.

        The app calls this method before it passes the key on. If the focus moved later, the next keys would already be
        queued for the old widget, and Enter would act on that widget.
        """
        focused, (key, character) = self.focused, ("a", "a")
        if focused is self.chat_pane.prompt:
            return
        if isinstance(event, events.Key):
            key, character = event.key, event.character or ""
            if not event.is_printable or character == "?" or key in self.active_bindings:
                return
        if focused is None or not focused.check_consume_key(key, character):
            self.minimize()
            if self.has_class("-expanded"):
                self.action_expand()
            self.set_focus(self.chat_pane.prompt)

    def on_key(self, event: events.Key) -> None:
        """Open the help if ``?`` is typed outside the prompt."""
        if event.character == "?" and self.focused is not self.chat_pane.prompt:
            event.stop()
            self.action_command("help")

    @property
    def memory_view(self) -> str:
        """Return the name of the visible memory view; empty if the panel is hidden."""
        return self.panel.view if self.panel.display else ""

    def action_view(self, name: str) -> None:
        """Show a memory view. The same key hides it again."""
        shown = self.memory_view != name
        self.set_class(shown, "-memory")
        self.set_class(not shown, "-no-memory")
        if shown:
            self.panel.view = name
            if self.has_class("-short"):  # the screen has no space for the panel next to the chat pane
                self.add_class("-expanded")
            self.memory.show()
        else:
            self.remove_class("-expanded")

    def action_expand(self) -> None:
        """Show the memory view in full screen, or return to the chat."""
        if not self.panel.display:
            self.action_view(self.panel.view)
        self.toggle_class("-expanded")
        if not self.has_class("-expanded"):
            self.chat_pane.prompt.focus()

    def action_widen(self, steps: int) -> None:
        """Make the memory panel wider by ``steps`` steps of 5 % of the screen, or narrower if ``steps`` is negative."""
        self.set_width(self._width + steps * _WIDTH_STEP)

    def set_width(self, percent: float) -> None:
        """Set the memory panel's width to about ``percent`` percent of the screen."""
        before, nearest = self._width, round(percent / _WIDTH_STEP) * _WIDTH_STEP
        self._width = max(_WIDTHS[0], min(_WIDTHS[1], nearest))
        self.remove_class(f"-panel-{before}")
        self.add_class(f"-panel-{self._width}")

    @on(MemoryPanel.Dragged)
    def _dragged(self, message: MemoryPanel.Dragged) -> None:
        self.set_width(100 * (1 - message.x / self.size.width))

    def action_menu(self) -> None:
        """Open a menu of all actions. Typing an action's letter runs the action."""
        from minillm.ui.keymap import KeyMenu, bound_keys

        bindings = bindings_by_name()
        actions = {binding.id: binding.action for binding in bindings}

        async def act(name: str | None) -> None:
            if name is not None:
                await self.run_action(actions[name])

        self.app.push_screen(KeyMenu(bound_keys(self.app.settings.keymap, bindings)), act)

    def action_next(self) -> None:
        """Move from the prompt to the first candidate if there is one, else to the next widget."""
        if self.focused is self.chat_pane.prompt and (card := self._first_card) is not None:
            card.focus()
        else:
            self.focus_next()

    @property
    def _first_card(self) -> CandidateCard | None:
        """Return the card of the first candidate that can be chosen now."""
        cards, count = self.query(CandidateCard), self.chat_pane.prompt.num_picks
        return cards[len(cards) - count] if 0 < count <= len(cards) else None

    def on_prompt_input_candidate_requested(self) -> None:
        if (card := self._first_card) is not None:
            card.focus()
            card.action_whole_screen()

    async def action_select(self, step: int) -> None:
        await self.chat_pane.transcript.select_next(step)

    def action_scroll(self, where: str) -> None:
        getattr(self.chat_pane.transcript, f"scroll_{where}")(animate=False)


def key_of(app: EngineApp, action: str) -> str:
    """Return the key bound to a named action, for display."""
    from minillm.ui.keymap import bound_keys, shown_keys

    return shown_keys(bound_keys(app.settings.keymap, bindings_by_name())[action])


def bindings_by_name() -> list[Binding]:
    """Return the bindings of all actions that have a name, in the screen and in dialogs."""
    bindings = (*ChatScreen.BINDINGS, *COMMANDS.bindings("app", "everywhere"))
    return [each for each in bindings if isinstance(each, Binding) and each.id]
