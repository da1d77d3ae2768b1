"""The chat: the talk, and beside it the memory that its answers live in."""

from __future__ import annotations

import time

from textual import getters
from textual.app import ComposeResult
from textual.containers import Container
from textual.events import ScreenResume
from textual.screen import Screen

from minillm.service.messages import BlockFacts, CacheChanged, Stepped
from minillm.ui.bars import KeyBar, TitleBar, hidden_keys
from minillm.ui.chat.commands import COMMANDS
from minillm.ui.chat.conversation import SessionStore
from minillm.ui.chat.talk import Talk
from minillm.ui.drawing import Drawing
from minillm.ui.engine_app import EngineApp, EngineChanged, EngineEvent, EngineState
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import Pool
from minillm.ui.settings import Settings

_SCROLLS = {"pageup": "page_up", "pagedown": "page_down", "ctrl+up": "up", "ctrl+down": "down", "ctrl+home": "home",
            "ctrl+end": "end"}  # fmt: skip
_GRACE = 1.0  # seconds after an answer in which ctrl+c is taken as meant for it


class ChatScreen(Screen[None]):
    """Takes keys, and hands the engine's events to the talk or to the memory."""

    app = getters.app(EngineApp)
    panel = getters.query_one(MemoryPanel)

    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"escape": "stop", "ctrl+c": "interrupt", "alt+v": "expand"}, priority=True),
        *hidden_keys({"alt+up": "select(-1)", "alt+down": "select(1)"}, priority=True),
        *hidden_keys({key: f"scroll({where!r})" for key, where in _SCROLLS.items()}, priority=True),
        *COMMANDS.bindings("chat"),
    ]

    def __init__(self, store: SessionStore) -> None:
        super().__init__()
        self.talk = Talk(store, COMMANDS)
        self.pool: Pool | None = None
        self._phase = EngineState().phase
        self._memory = Drawing(self, self._draw_memory, share=0.008, longest=3.0)
        self._earlier_names: dict[str, str] = {}  # of requests, those of conversations before this one included

    def compose(self) -> ComposeResult:
        yield TitleBar()
        with Container(id="body"):
            yield self.talk
            yield MemoryPanel()
        yield KeyBar()

    def on_screen_resume(self, event: ScreenResume) -> None:
        if not self.stack_updates:  # the first time: every widget has only just been styled
            event.refresh_styles = False

    def on_mount(self) -> None:
        self.watch(self.app, "engine_state", self._engine_state_changed)
        self.watch(self.app, "settings", self._settings_changed)
        self.watch(self.talk, "beside_model", self._memory.pace)

    def _engine_state_changed(self, state: EngineState) -> None:
        self.post_message(EngineChanged(state))  # so that it stands in line behind the events that came before

    def on_engine_changed(self, message: EngineChanged) -> None:
        state, before = message.state, self._phase
        self._phase = state.phase
        self.query_one(TitleBar).engine_state = state
        if state.phase != before and (state.loaded is not None or self.pool is not None):
            loaded = state.loaded
            self.show_pool(
                None if loaded is None else Pool(loaded.num_blocks, loaded.block_size, loaded.block_bytes,
                                                 loaded.num_host_blocks, loaded.max_model_len)
            )  # fmt: skip
        self.talk.post_message(EngineChanged(state))

    def _settings_changed(self, settings: Settings) -> None:
        self.query_one(TitleBar).settings = settings

    def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        if isinstance(event, CacheChanged | Stepped):
            self.panel.take(event)
            self._memory.soon()
        elif isinstance(event, BlockFacts):
            self.panel.show_facts(event)
        else:
            self.talk.post_message(EngineEvent(event))

    def show_pool(self, pool: Pool | None) -> None:
        self.pool = self.talk.pool = pool
        self.panel.show_pool(pool)

    async def _draw_memory(self) -> None:
        if self.panel.display:
            self._show_memory()
        if self.talk.run is None:  # else the text brings it along
            self.talk.refresh_status()

    def _show_memory(self) -> None:
        leaf = self.talk.conversation.leaf
        self.panel.show_news(self.name_of, None if leaf is None else leaf.answer.request_id)

    def name_of(self, owner: str, index: int) -> str:
        """A sequence's name for people: ``turn 2 · 3`` is the third candidate of the second turn."""
        name = self.talk.conversation.name_of(owner)
        if name is None:
            return owner if owner == "system prompt" else self._earlier_names.get(owner, "another")
        self._earlier_names[owner] = name
        pool = self.pool
        several = pool is not None and any(table.owner == owner and table.index for table in pool.tables.values())
        return f"{name} · {index + 1}" if several else name

    def action_command(self, name: str, argument: str = "") -> None:
        """Run a slash command, after all that the talk was told before.

        Keys act in the app's task, or in the prompt's, and the palette in the app's: a command that began there would
        change the conversation in the midst of a question that is being asked.
        """
        self.talk.call_command(name, argument)

    def action_stop(self) -> None:
        """End the answer, the loading, or the editing; else back to the prompt."""
        talk = self.talk
        if talk.run is not None:
            talk.run.stop()
            talk.refresh_status()
        elif self._phase == "loading":
            self.app.stop_engine()
        else:
            if talk.editing is not None:
                talk.editing = None
                talk.prompt.text = ""
                self.notify("the question stays as it was")
            self.clear_selection()
            talk.transcript.select(None)
            talk.prompt.focus()

    def action_interrupt(self) -> None:
        """ctrl+c: copy the selection, else stop the answer or the loading, else quit."""
        selected = self.talk.prompt.selected_text or self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
        elif self.talk.run is not None or self._phase == "loading":
            self.action_stop()
        elif time.monotonic() - self.talk.ended_at < _GRACE:
            self.notify("the answer has ended; ctrl+c again quits")
            self.talk.ended_at = 0.0
        else:
            self.app.exit()

    @property
    def memory_view(self) -> str:
        """The memory view that is shown; empty where none is."""
        return self.panel.view if self.panel.display else ""

    def action_view(self, name: str) -> None:
        """Show one of the memory views; the same key once more hides it."""
        shown = self.memory_view != name
        self.set_class(shown, "-memory")
        self.set_class(not shown, "-no-memory")
        if shown:
            self.panel.view = name
            self._show_memory()
        else:
            self.remove_class("-expanded")

    def action_expand(self) -> None:
        """Give the memory view the whole screen, or the chat its place back."""
        if not self.panel.display:
            self.action_view(self.panel.view)
        self.toggle_class("-expanded")

    def action_select(self, step: int) -> None:
        self.talk.transcript.select_next(step)

    def action_scroll(self, where: str) -> None:
        getattr(self.talk.transcript, f"scroll_{where}")(animate=False)
