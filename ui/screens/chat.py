"""The chat: asks, shows answers as they come, and the memory they live in."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from textual import on
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from minillm.service.messages import (
    Abort,
    CacheChanged,
    ContextFull,
    Event,
    Finished,
    Forget,
    Generate,
    Notice,
    RequestFailed,
    Started,
    TextDelta,
)
from ui.conversation import Answer, Conversation
from ui.messages import EngineCommand, EngineEvent, EngineState
from ui.numbers import count, duration, plural
from ui.pool import Pool
from ui.settings import Settings
from ui.widgets.loading_bar import LoadingBar
from ui.widgets.memory_panel import MemoryPanel
from ui.widgets.message import AnswerView
from ui.widgets.prompt import PromptInput
from ui.widgets.status_bar import Status, StatusBar
from ui.widgets.title_bar import TitleBar
from ui.widgets.transcript import Transcript

_REFRESH = 0.1  # seconds between two looks at what came in: each lays the last paragraph out anew
_GRACE = 1.0  # seconds after an answer in which ctrl+c is taken as meant for it


class ChatScreen(Screen[None]):
    """The conversation and what it needs."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "stop", "Stop", priority=True, show=False),
        Binding("ctrl+c", "interrupt", "Stop or quit", priority=True, show=False),
        Binding("ctrl+n", "new_conversation", "New"),
        Binding("ctrl+r", "reload", "Reload", show=False),
        Binding("f2", "models", "Model"),
        Binding("f3", "sampling", "Sampling"),
        Binding("f4", "system", "System"),
        Binding("f5", "toggle_memory", "Memory"),
        Binding("pageup", "scroll('page_up')", "Page up", priority=True, show=False),
        Binding("pagedown", "scroll('page_down')", "Page down", priority=True, show=False),
        Binding("ctrl+up", "scroll('up')", "Line up", priority=True, show=False),
        Binding("ctrl+down", "scroll('down')", "Line down", priority=True, show=False),
        Binding("ctrl+home", "scroll('home')", "Beginning", priority=True, show=False),
        Binding("ctrl+end", "scroll('end')", "End", priority=True, show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.conversation = Conversation()
        self.pool: Pool | None = None
        self._engine_state = EngineState()
        self._view: AnswerView | None = None  # of the answer that goes on
        self._first_token_at = 0.0
        self._finished_at = 0.0
        self._stopping = False

    def compose(self) -> ComposeResult:
        yield TitleBar()
        with Container(id="body"):
            with Vertical(id="talk"):
                yield Transcript()
                yield LoadingBar()
                yield PromptInput()
                yield StatusBar()
            yield MemoryPanel()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(PromptInput).focus()
        self.watch(self.app, "engine_state", self._engine_changed)
        self.watch(self.app, "settings", self._settings_changed)
        self._timer = self.set_interval(_REFRESH, self._refresh_answer, pause=True)

    @property
    def num_answers(self) -> int:
        """Answers of this conversation that have ended."""
        return len(self.conversation.turns) - (self.conversation.open_answer is not None)

    # --- what the app says --------------------------------------------------------------------------------------------

    async def _engine_changed(self, state: EngineState) -> None:
        before, self._engine_state = self._engine_state, state
        self.query_one(TitleBar).engine_state = state
        bar = self.query_one(LoadingBar)
        bar.display = state.phase == "loading"
        bar.progress = state.loading
        if state.phase == before.phase:
            return
        if state.phase != "ready" and self.pool is not None:
            self._set_pool(None)
        if state.phase != "ready":
            await self._lose_answer()
        transcript = self.query_one(Transcript)
        if state.loaded is not None:
            loaded = state.loaded
            self._set_pool(Pool(loaded.num_blocks, loaded.block_size, loaded.block_bytes))
            source = f" from {loaded.source}" if loaded.source else ""
            await transcript.add_note(f"{loaded.model}{source}, ready in {duration(loaded.seconds)}")
            if not loaded.has_chat_template:
                await transcript.add_note("this model has no chat template, so it cannot chat (F2: another)", "warning")
        elif state.phase == "failed":
            await transcript.add_note(f"{state.error} (F2 chooses a model, ctrl+r tries again)", "error")
        elif state.phase == "crashed":
            await transcript.add_note(f"{state.error} (ctrl+r restarts it; the conversation is kept)", "error")
        elif state.phase == "off":
            await transcript.add_note("loading was cancelled (ctrl+r loads again, F2 chooses a model)", "warning")
        self._refresh_status()

    def _settings_changed(self, settings: Settings) -> None:
        self.query_one(TitleBar).settings = settings

    def _set_pool(self, pool: Pool | None) -> None:
        self.pool = pool
        self.query_one(MemoryPanel).show_pool(pool)

    async def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        if isinstance(event, CacheChanged):
            self._cache_changed(event)
        elif isinstance(event, Notice):
            await self.query_one(Transcript).add_note(event.text)
        elif self._view is not None and getattr(event, "request_id", None) == self._view.answer.request_id:
            await self._answer_event(self._view, event)

    async def _answer_event(self, view: AnswerView, event: Event) -> None:
        answer = view.answer
        if isinstance(event, Started):
            self._first_token_at = time.monotonic()
            answer.num_prompt_tokens = event.num_prompt_tokens
            answer.num_cached_tokens = event.num_cached_tokens
            answer.time_to_first_token = event.time_to_first_token
        elif isinstance(event, TextDelta):
            answer.text += event.text
            answer.num_output_tokens += event.num_tokens
            view.add(event.text)
        elif isinstance(event, Finished):
            answer.num_output_tokens = event.num_output_tokens
            answer.tokens_per_second = event.tokens_per_second
            await self._end_answer(event.finish_reason)
        elif isinstance(event, RequestFailed):
            await self._fail_answer(event.error)
        elif isinstance(event, ContextFull):
            await self._fail_answer(
                f"the conversation has {plural(event.num_tokens, 'token')} and the context holds "
                f"{count(event.max_model_len)}: shorten the question, or begin anew with ctrl+n"
            )

    def _cache_changed(self, event: CacheChanged) -> None:
        if self.pool is None:
            return
        blocks = self.pool.apply(event)
        panel = self.query_one(MemoryPanel)
        if panel.display:
            panel.pool_changed(self.pool, blocks, self._table())
        self._refresh_status()

    def _table(self):  # type: ignore[no-untyped-def]
        assert self.pool is not None
        turns = self.conversation.turns
        running = [turns[-1].answer.request_id] if turns else []
        return self.pool.table_of(*running, self.conversation.conversation_id)

    # --- an answer's life ---------------------------------------------------------------------------------------------

    @on(PromptInput.Submitted)
    async def _ask(self, message: PromptInput.Submitted) -> None:
        if self._view is not None:
            self._say("an answer is being given; Escape stops it")
            return
        if self._engine_state.phase != "ready":
            waiting = self._engine_state.phase == "loading"
            self._say("the model is still loading" if waiting else "no model is loaded: F2 chooses one, ctrl+r reloads")
            return
        self.query_one(PromptInput).take()
        settings: Settings = self.app.settings  # type: ignore[attr-defined]
        answer = self.conversation.ask(message.text)
        self._view = await self.query_one(Transcript).add_turn(message.text, answer)
        self._view.update_summary()
        self._stopping = False
        self._timer.resume()
        self.post_message(
            EngineCommand(
                Generate(
                    request_id=answer.request_id,
                    conversation=self.conversation.conversation_id,
                    messages=self.conversation.messages(settings.system),
                    params=dict(settings.sampling),
                )
            )
        )
        self._refresh_status()

    async def _refresh_answer(self) -> None:
        """Show what came in since the last time."""
        view = self._view
        if view is None:
            return
        if await view.flush():
            elapsed = time.monotonic() - self._first_token_at
            if view.answer.num_output_tokens > 1 and elapsed > 0 and view.answer.finish_reason is None:
                view.answer.tokens_per_second = (view.answer.num_output_tokens - 1) / elapsed
            view.update_summary()
            self._refresh_status()

    async def _end_answer(self, reason: str) -> None:
        """The answer is complete, as far as it got. One that was stopped before its first word is taken back."""
        view = self._view
        assert view is not None
        self._timer.pause()
        self._view = None
        self._finished_at = time.monotonic()
        await view.flush()
        view.answer.finish_reason = reason
        if reason != "stop" and not view.answer.text.strip():
            await self._withdraw(view)
        else:
            view.update_summary()
        self._refresh_status()

    async def _withdraw(self, view: AnswerView) -> None:
        """The last question goes back to where it was typed."""
        self.query_one(PromptInput).put_back(self.conversation.withdraw())
        await self.query_one(Transcript).remove_turn(view)

    async def _fail_answer(self, error: str) -> None:
        await self._end_answer("lost")
        await self.query_one(Transcript).add_note(error, "error")

    async def _lose_answer(self) -> None:
        """The engine is gone: what was said so far stays."""
        if self._view is not None:
            await self._end_answer("lost")

    def _refresh_status(self) -> None:
        turns = self.conversation.turns
        answer = turns[-1].answer if turns else Answer("")
        loaded, pool = self._engine_state.loaded, self.pool
        self.query_one(StatusBar).status = Status(
            activity=self._activity(answer),
            tokens_per_second=answer.tokens_per_second,
            time_to_first_token=answer.time_to_first_token,
            context_used=answer.num_context_tokens,
            context_size=loaded.max_model_len if loaded is not None else 0,
            blocks_used=pool.used_blocks if pool is not None else 0,
            blocks_total=pool.num_blocks if pool is not None else 0,
        )

    def _activity(self, answer: Answer) -> str:
        if self._engine_state.phase in ("failed", "crashed"):
            return "failed"
        if self._engine_state.phase != "ready":
            return "loading" if self._engine_state.phase == "loading" else "no model"
        if self._view is None:
            return "ready"
        if self._stopping:
            return "stopping"
        return "reading" if answer.time_to_first_token is None else "generating"

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        """End the answer, or the loading; else back to the prompt."""
        if self._view is not None:
            self._stopping = True
            self.post_message(EngineCommand(Abort(self._view.answer.request_id)))
            self._refresh_status()
        elif self._engine_state.phase == "loading":
            self.app.stop_engine()  # type: ignore[attr-defined]
        else:
            self.clear_selection()
            self.query_one(PromptInput).focus()

    def action_interrupt(self) -> None:
        """ctrl+c: copy what is selected, else stop what goes on, else quit."""
        selected = self.query_one(PromptInput).selected_text or self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
        elif self._view is not None or self._engine_state.phase == "loading":
            self.action_stop()
        elif time.monotonic() - self._finished_at < _GRACE:
            self._say("the answer has ended; ctrl+c again quits")
            self._finished_at = 0.0
        else:
            self.app.exit()

    async def action_new_conversation(self) -> None:
        """Begin anew; the blocks of the old conversation are freed."""
        self.post_message(EngineCommand(Forget(self.conversation.conversation_id)))
        self._timer.pause()
        self._view = None
        self.conversation = Conversation()
        await self.query_one(Transcript).clear()
        self.query_one(PromptInput).focus()
        self._refresh_status()

    def action_reload(self) -> None:
        """Load the model (again)."""
        if self._engine_state.phase == "loading":
            self._say("the model is being loaded; Escape cancels")
        else:
            self.app.load_model()  # type: ignore[attr-defined]

    def action_toggle_memory(self) -> None:
        panel = self.query_one(MemoryPanel)
        shown = not panel.display
        self.set_class(shown, "-memory")
        self.set_class(not shown, "-no-memory")
        if shown and self.pool is not None:
            panel.pool_changed(self.pool, (), self._table())

    def action_scroll(self, where: str) -> None:
        transcript = self.query_one(Transcript)
        getattr(transcript, f"scroll_{where}")(animate=False)

    @on(PromptInput.HelpAsked)
    def _help(self) -> None:
        self.app.action_help()  # type: ignore[attr-defined]

    def action_models(self) -> None:
        from ui.screens.models import ModelScreen

        self.app.push_screen(ModelScreen(self.app.settings.model), self._model_chosen)  # type: ignore[attr-defined]

    def _model_chosen(self, model: str | None) -> None:
        if model is not None:
            self.app.choose_model(model)  # type: ignore[attr-defined]

    def action_sampling(self) -> None:
        from ui.screens.sampling import SamplingScreen

        def chosen(sampling: dict | None) -> None:
            if sampling is not None:
                self.app.settings = replace(self.app.settings, sampling=sampling)  # type: ignore[attr-defined]

        self.app.push_screen(SamplingScreen(self.app.settings.sampling), chosen)  # type: ignore[attr-defined]

    def action_system(self) -> None:
        from ui.screens.system import SystemScreen

        def chosen(system: str | None) -> None:
            if system is not None:
                self.app.settings = replace(self.app.settings, system=system)  # type: ignore[attr-defined]

        self.app.push_screen(SystemScreen(self.app.settings.system), chosen)  # type: ignore[attr-defined]

    def commands(self) -> Iterable[SystemCommand]:
        """What the command palette offers."""
        yield SystemCommand("New conversation", "Forget this one and free its blocks", self.action_new_conversation)
        yield SystemCommand("Model", "Choose another model", self.action_models)
        yield SystemCommand("Reload", "Load the model again", self.action_reload)
        yield SystemCommand("Sampling", "Temperature, top-p and their like", self.action_sampling)
        yield SystemCommand("System prompt", "What the model is told first", self.action_system)
        yield SystemCommand("Memory", "Show or hide the pool of blocks", self.action_toggle_memory)

    def _say(self, text: str) -> None:
        self.app.say(text)  # type: ignore[attr-defined]
