"""The chat: asks, shows answers as they come, and the memory they live in. What commands do is in `commands.py`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from textual import on
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.content import Content
from textual.events import ScreenResume
from textual.widgets import Static, TextArea

from minillm.errors import MinillmError
from minillm.service.messages import (
    Abort,
    BeamsChanged,
    BlockFacts,
    CacheChanged,
    Command,
    ContextFull,
    Drop,
    Event,
    Finished,
    Generate,
    Inspect,
    Keep,
    Notice,
    Pin,
    Report,
    RequestFailed,
    Started,
    Stepped,
    TextDelta,
)
from minillm.ui.bars.keys import KeyBar
from minillm.ui.bars.loading import LoadingBar
from minillm.ui.bars.status import FULL, Status, StatusBar
from minillm.ui.bars.title import TitleBar
from minillm.ui.chat.candidates import CandidateCard, CandidatesView
from minillm.ui.chat.commands import ChatCommands
from minillm.ui.chat.conversation import Answer, Candidate, Conversation, Turn
from minillm.ui.chat.message import AnswerView
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.slash import COMMANDS, completions, is_command, parse, unescaped
from minillm.ui.chat.transcript import Transcript
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import Pool
from minillm.ui.messages import EngineChanged, EngineCommand, EngineEvent, EngineState, Phase
from minillm.ui.numbers import count, duration, plural
from minillm.ui.pacing import Drawing
from minillm.ui.settings import Settings

_SAVE_INTERVAL = 2.0  # seconds between two saves while an answer grows
_GRACE = 1.0  # seconds after an answer in which ctrl+c is taken as meant for it
_ROOM = 256  # tokens that should be left for an answer, or the oldest turns are dropped
_LINES_AHEAD = 6  # of a growing paragraph, where the model computes on the same cores


class ChatScreen(ChatCommands):
    """The conversation and what it needs."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "stop", "Stop", priority=True, show=False),
        Binding("ctrl+c", "interrupt", "Stop or quit", priority=True, show=False),
        Binding("ctrl+n", "command('new')", "New"),
        Binding("ctrl+o", "command('sessions')", "Open"),
        Binding("ctrl+r", "command('reload')", "Reload", show=False),
        Binding("f2", "command('model')", "Model"),
        Binding("f3", "command('sampling')", "Sampling"),
        Binding("f4", "command('system')", "System"),
        Binding("f5", "view('pool')", "Pool", priority=True),
        Binding("f6", "view('tables')", "Tables", priority=True, show=False),
        Binding("f7", "view('tree')", "Tree", priority=True, show=False),
        Binding("f8", "view('events')", "Events", priority=True, show=False),
        Binding("f9", "view('memory')", "Memory", priority=True, show=False),
        Binding("f10", "view('steps')", "Steps", priority=True, show=False),
        Binding("alt+v", "expand", "Whole screen", priority=True, show=False),
        Binding("alt+e", "command('edit')", "Edit", priority=True, show=False),
        Binding("alt+r", "command('regenerate')", "Regenerate", priority=True, show=False),
        Binding("alt+c", "command('continue')", "Continue", priority=True, show=False),
        Binding("alt+y", "command('copy')", "Copy", priority=True, show=False),
        Binding("alt+p", "command('probabilities')", "Probabilities", priority=True, show=False),
        Binding("alt+left", "command('branch', 'previous')", "Previous branch", priority=True, show=False),
        Binding("alt+right", "command('branch', 'next')", "Next branch", priority=True, show=False),
        Binding("alt+up", "select(-1)", "Turn above", priority=True, show=False),
        Binding("alt+down", "select(1)", "Turn below", priority=True, show=False),
        Binding("pageup", "scroll('page_up')", "Page up", priority=True, show=False),
        Binding("pagedown", "scroll('page_down')", "Page down", priority=True, show=False),
        Binding("ctrl+up", "scroll('up')", "Line up", priority=True, show=False),
        Binding("ctrl+down", "scroll('down')", "Line down", priority=True, show=False),
        Binding("ctrl+home", "scroll('home')", "Beginning", priority=True, show=False),
        Binding("ctrl+end", "scroll('end')", "End", priority=True, show=False),
    ]

    def __init__(self, store: SessionStore) -> None:
        super().__init__()
        self.store = store
        self.conversation = Conversation()
        self.pool: Pool | None = None
        self.editing: Turn | None = None  # whose question is being changed in the prompt
        self._engine_state = EngineState()
        self._open: Turn | None = None  # whose answer goes on
        self._superseded = ""  # the request whose text the open one continues
        self._to_accept: tuple[int, str] | None = None  # a candidate and its text, once the others have stopped
        self._num_dropped_before = 0
        self._warned_full = False
        self._first_token_at = 0.0
        self._finished_at = 0.0
        self._saved_at = 0.0
        self._stopping = False
        self._pinned_system = ""
        self._changed: set[int] = set()  # blocks that look other than they are drawn
        self._text = Drawing(self, self._draw_answer, share=0.014, longest=1.0)
        self._memory = Drawing(self, self._draw_memory, share=0.008, longest=3.0)
        self._report_every = 0.0  # what the engine was told last
        self._earlier_names: dict[str, str] = {}  # of requests, those of conversations before this one included

    def compose(self) -> ComposeResult:
        yield TitleBar()
        with Container(id="body"):
            with Vertical(id="talk"):
                yield Transcript()
                yield LoadingBar()
                yield Static(id="hints")
                yield PromptInput()
                yield StatusBar()
            yield MemoryPanel()
        yield KeyBar()

    def on_screen_resume(self, event: ScreenResume) -> None:
        if not self.stack_updates:  # the first time: every widget has only just been styled
            event.refresh_styles = False

    def on_mount(self) -> None:
        self.query_one("#hints").display = False
        self.query_one(PromptInput).focus()
        self.watch(self.app, "engine_state", self._engine_state_changed)
        self.watch(self.app, "settings", self._settings_changed)

    @property
    def settings(self) -> Settings:
        return self.app.settings  # type: ignore[attr-defined]

    @property
    def engine_phase(self) -> Phase:
        """How the engine is, as far as this screen has heard."""
        return self._engine_state.phase

    @property
    def num_answers(self) -> int:
        """Answers of this conversation that have ended."""
        return len(self.conversation.turns) - (self.conversation.open_answer is not None)

    @property
    def is_answering(self) -> bool:
        return self._open is not None

    # --- what the app says --------------------------------------------------------------------------------------------

    def _engine_state_changed(self, state: EngineState) -> None:
        self.post_message(EngineChanged(state))  # so that it stands in line behind the events that came before

    async def on_engine_changed(self, message: EngineChanged) -> None:
        state = message.state
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
            self._pinned_system = ""
            await self._lose_answer()
        transcript = self.query_one(Transcript)
        if state.loaded is not None:
            loaded = state.loaded
            self._report_every = 0.0
            self._set_pool(
                Pool(loaded.num_blocks, loaded.block_size, loaded.block_bytes, loaded.num_host_blocks,
                     loaded.max_model_len)
            )  # fmt: skip
            source = f" from {loaded.source}" if loaded.source else ""
            await transcript.add_note(f"{loaded.model}{source}, ready in {duration(loaded.seconds)}")
            if not loaded.has_chat_template:
                await transcript.add_note("this model has no chat template, so it cannot chat (F2: another)", "warning")
            self._pin_system()
        elif state.phase == "failed":
            await transcript.add_note(f"{state.error} (F2 chooses a model, /reload tries again)", "error")
        elif state.phase == "crashed":
            await transcript.add_note(f"{state.error} (/reload restarts it; the conversation is kept)", "error")
        elif state.phase == "off":
            await transcript.add_note("loading was cancelled (/reload loads again, F2 chooses a model)", "warning")
        self._refresh_status()

    def _settings_changed(self, settings: Settings) -> None:
        self.query_one(TitleBar).settings = settings
        self._pin_system()

    def _pin_system(self) -> None:
        """Keep the system prompt's blocks, whatever comes."""
        if self._engine_state.phase == "ready" and self.settings.system != self._pinned_system:
            self._pinned_system = self.settings.system
            self.send(Pin(self.settings.system))

    def _set_pool(self, pool: Pool | None) -> None:
        self.pool = pool
        self._changed.clear()  # blocks of the pool before, which may be more
        self.query_one(MemoryPanel).show_pool(pool)

    async def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        if isinstance(event, CacheChanged):
            if self.pool is not None:
                self._changed.update(self.pool.apply(event))
                self._memory.soon()
        elif isinstance(event, Stepped):
            if self.pool is not None:
                self.pool.steps.extend(event.steps)
                self._memory.soon()
        elif isinstance(event, BlockFacts):
            self.query_one(MemoryPanel).show_facts(event, self.name_of)
        elif isinstance(event, Notice):
            await self.query_one(Transcript).add_note(event.text)
        elif self._open is not None and getattr(event, "request_id", None) == self._open.answer.request_id:
            await self._answer_event(self._open, event)

    async def _answer_event(self, turn: Turn, event: Event) -> None:
        answer = turn.answer
        if isinstance(event, Started):
            await self._start_answer(turn, event)
        elif isinstance(event, TextDelta):
            if answer.candidates:
                candidate = answer.candidates[event.index]
                candidate.text += event.text
                candidate.num_tokens += event.num_tokens
                candidate.tokens += event.tokens
            else:
                answer.text += event.text
                answer.tokens += event.tokens
                view = self._view_of(turn)
                if isinstance(view, AnswerView):
                    view.add(event.text)
            answer.num_output_tokens += event.num_tokens
            self._text.soon()
        elif isinstance(event, BeamsChanged):
            for candidate, beam in zip(answer.candidates, event.beams, strict=False):
                candidate.text, candidate.num_tokens = beam.text, beam.num_tokens
                candidate.score, candidate.logprob = beam.score, beam.logprob
                candidate.finish_reason = "stop" if beam.finished else None
            answer.num_output_tokens = max((beam.num_tokens for beam in event.beams), default=0)
            self._text.soon()
        elif isinstance(event, Finished):
            await self._finish(turn, event)
        elif isinstance(event, RequestFailed):
            await self._fail_answer(event.error)
        elif isinstance(event, ContextFull):
            await self._context_full(event)

    async def _start_answer(self, turn: Turn, event: Started) -> None:
        answer = turn.answer
        self._first_token_at = time.monotonic()
        answer.num_prompt_tokens = event.num_prompt_tokens
        answer.num_cached_tokens = event.num_cached_tokens
        answer.time_to_first_token = event.time_to_first_token
        view = self._view_of(turn)
        if isinstance(view, AnswerView) and not answer.text:
            answer.in_reasoning = event.in_reasoning
            view.begin(event.in_reasoning)
        dropped = self.conversation.num_dropped
        if dropped > self._num_dropped_before:
            self._num_dropped_before = dropped
            await self.query_one(Transcript).add_note(
                f"the context is full: the model is no longer told the oldest {plural(dropped, 'turn')}", "warning"
            )

    async def _finish(self, turn: Turn, event: Finished) -> None:
        answer = turn.answer
        if not answer.candidates:
            answer.tokens_per_second = event.tokens_per_second
            answer.num_output_tokens = event.num_output_tokens
            await self._end_answer(event.finish_reason)
            return
        answer.candidates[event.index].finish_reason = event.finish_reason
        reasons = [candidate.finish_reason for candidate in answer.candidates]
        if all(reasons):
            await self._end_answer("abort" if "abort" in reasons else "stop")

    async def _context_full(self, event: ContextFull) -> None:
        """Go on without the oldest turns; only where the last question alone does not fit is it an error."""
        turn = self._open
        assert turn is not None
        if self._superseded:
            await self._fail_answer("the context is full: this answer cannot go on")
        elif self.conversation.drop_oldest():
            self._generate(turn, room=_ROOM)
        elif event.num_tokens + 1 < event.max_model_len:
            self._generate(turn, room=1)
        else:
            await self._fail_answer(
                f"the question has {plural(event.num_tokens, 'token')} with what belongs to it, and the context holds "
                f"{count(event.max_model_len)}: shorten it, or start with a larger --max-model-len"
            )

    async def _draw_memory(self) -> None:
        """Show what changed in the pool, and what the steps did, since the last time."""
        if self.query_one(MemoryPanel).display:
            self._show_memory()
        if self._open is None:  # else the text brings it along
            self._refresh_status()

    def _show_memory(self) -> None:
        blocks, self._changed = self._changed, set()
        panel = self.query_one(MemoryPanel)
        if self.pool is not None:
            panel.pool_changed(self.pool, blocks, self.name_of, self._current_request())
            panel.steps_changed(self.pool)

    def _current_request(self) -> str | None:
        return self.conversation.leaf.answer.request_id if self.conversation.leaf is not None else None

    def name_of(self, owner: str, index: int) -> str:
        """A sequence's name for people: ``turn 2 · 3`` is the third candidate of the second turn."""
        name = self.conversation.name_of(owner)
        if name is None:
            return owner if owner == "system prompt" else self._earlier_names.get(owner, "another")
        self._earlier_names[owner] = name
        pool = self.pool
        several = pool is not None and any(table.owner == owner and table.index for table in pool.tables.values())
        return f"{name} · {index + 1}" if several else name

    @on(MemoryPanel.InspectAsked)
    def _inspect(self, message: MemoryPanel.InspectAsked) -> None:
        self.send(Inspect(message.block))

    # --- an answer's life ---------------------------------------------------------------------------------------------

    @on(PromptInput.Submitted)
    async def _submitted(self, message: PromptInput.Submitted) -> None:
        if is_command(message.text):
            prompt = self.query_one(PromptInput)
            try:
                command, argument = parse(message.text)
            except MinillmError as error:
                self.say(str(error))
                return
            prompt.take()
            await self._run_command(command.name, argument)
        elif self.can_ask():
            self.query_one(PromptInput).take()
            editing, self.editing = self.editing, None
            await self.accept_best()
            if editing is None:
                self.conversation.ask(unescaped(message.text))
            else:
                self.conversation.ask_instead(editing, unescaped(message.text))
            await self.request_answer()

    def can_ask(self) -> bool:
        """Whether the engine is free for a question; says why if not."""
        if self._open is not None:
            self.say("an answer is being given; Escape stops it")
        elif self._engine_state.phase != "ready":
            waiting = self._engine_state.phase == "loading"
            self.say("the model is still loading" if waiting else "no model is loaded: F2 chooses one, /reload loads")
        else:
            return True
        return False

    async def request_answer(self) -> None:
        """Have the conversation's last turn answered."""
        turn = self.conversation.leaf
        assert turn is not None
        self.conversation.model, self.conversation.system = self.settings.model, self.settings.system
        if self.settings.num_candidates > 1:
            turn.answer.candidates = [Candidate() for _ in range(self.settings.num_candidates)]
        transcript = self.query_one(Transcript)
        transcript.select(None)
        await transcript.show_path(self.conversation)
        self._begin(turn)
        self._generate(turn, room=_ROOM)
        self.save()

    async def continue_answer(self, turn: Turn) -> None:
        """Let the model go on where its answer ended."""
        messages = self.conversation.messages(self.settings.system)
        answer = turn.answer
        self._superseded, answer.request_id = answer.request_id, self.conversation.new_request_id()
        answer.finish_reason = answer.time_to_first_token = None
        self._begin(turn)
        # Several answers to choose from would begin with the same text: one goes on.
        params = self.settings.params_to_continue()
        self.send(Generate(answer.request_id, self.conversation.conversation_id, messages, params, continues=True))
        self._refresh_status()

    def _begin(self, turn: Turn) -> None:
        self._open = turn
        self._stopping = False
        self._to_accept = None
        view = self._view_of(turn)
        if isinstance(view, AnswerView):
            view.update_summary()

    def _generate(self, turn: Turn, room: int) -> None:
        settings = self.settings
        loaded = self._engine_state.loaded
        if loaded is not None:
            room = max(1, min(room, loaded.max_model_len // 8, int(settings.sampling.get("max_tokens", room))))
        self.send(
            Generate(
                request_id=turn.answer.request_id,
                conversation=self.conversation.conversation_id,
                messages=self.conversation.messages(settings.system),
                params=settings.request_params(),
                room=room,
            )
        )
        self._refresh_status()

    def _view_of(self, turn: Turn) -> AnswerView | CandidatesView | None:
        view = self.query_one(Transcript).view_of(turn)
        return None if view is None else view.answer_view

    @property
    def _lines_ahead(self) -> int:
        """Lines that a growing paragraph takes with the one that it needs: see `ModelMarkdown.append_text`."""
        return min(_LINES_AHEAD, self.query_one(Transcript).size.height // 4) if self._text.beside_model else 0

    async def _draw_answer(self) -> None:
        """Show what was said since the last time."""
        turn = self._open
        if turn is None:
            return
        view, answer = self._view_of(turn), turn.answer
        elapsed = time.monotonic() - self._first_token_at
        if answer.num_output_tokens > 1 and elapsed > 0 and answer.is_open:
            answer.tokens_per_second = (answer.num_output_tokens - 1) / elapsed
        if isinstance(view, CandidatesView):
            view.refresh_cards()
        elif view is not None and await view.flush(self._lines_ahead):
            view.update_summary()
        self._refresh_status()
        if time.monotonic() - self._saved_at > _SAVE_INTERVAL:
            self.save()

    def _pace(self) -> None:
        """Drawing leaves the processor to a model that computes on it; and the engine need not speak more often."""
        loaded = self._engine_state.loaded
        beside_model = self._open is not None and loaded is not None and loaded.device == "cpu"
        self._text.pace(beside_model)
        self._memory.pace(beside_model)
        every = self._text.interval
        if abs(every - self._report_every) > 0.2 * self._report_every:
            self._report_every = every
            self.send(Report(every))

    async def _end_answer(self, reason: str) -> None:
        """The answer is complete, as far as it got. One that was stopped before its first word is taken back."""
        turn = self._open
        assert turn is not None
        self._open = None
        self._finished_at = time.monotonic()
        view, answer = self._view_of(turn), turn.answer
        answer.finish_reason = reason
        if self._superseded:
            self.send(Drop(self._superseded))
            self._superseded = ""
        said = answer.text + "".join(candidate.text for candidate in answer.candidates)
        if reason != "stop" and not said.strip():
            await self._withdraw()
        elif isinstance(view, CandidatesView):
            view.refresh_cards()
            if self._to_accept is not None:
                await self.accept(turn, _index_of(answer, *self._to_accept))
        elif view is not None:
            await view.flush()
            await view.end()
            view.update_summary()
        self._refresh_status()
        self.save()
        await self._warn_if_full(answer)

    async def _warn_if_full(self, answer: Answer) -> None:
        loaded = self._engine_state.loaded
        if loaded is None or self._warned_full or answer.num_context_tokens < FULL * loaded.max_model_len:
            return
        self._warned_full = True
        await self.query_one(Transcript).add_note(
            f"the context is nearly full ({count(answer.num_context_tokens)} of {count(loaded.max_model_len)} tokens): "
            "the oldest turns will be left out when it is; Ctrl+N begins anew", "warning"
        )  # fmt: skip

    async def _withdraw(self) -> None:
        """The last question goes back to where it was typed."""
        self.query_one(PromptInput).put_back(self.conversation.withdraw())
        await self.query_one(Transcript).show_path(self.conversation)

    async def _fail_answer(self, error: str) -> None:
        await self._end_answer("lost")
        await self.query_one(Transcript).add_note(error, "error")

    async def _lose_answer(self) -> None:
        """The engine is gone: what was said so far stays."""
        if self._open is not None:
            await self._end_answer("lost")

    # --- candidates ---------------------------------------------------------------------------------------------------

    @on(PromptInput.Picked)
    @on(CandidateCard.Accepted)
    async def _picked(self, message: PromptInput.Picked | CandidateCard.Accepted) -> None:
        await self._run_command("accept", str(message.index + 1))

    async def choose(self, turn: Turn, index: int) -> None:
        """Take a candidate; while they are still being made, the others are stopped first."""
        if turn is self._open:
            self._to_accept = index, turn.answer.candidates[index].text
            self.action_stop()
        else:
            await self.accept(turn, index)

    async def accept(self, turn: Turn, index: int) -> None:
        """The candidate is the answer; the blocks of the others are freed."""
        turn.answer.accept(index)
        self.send(Keep(turn.answer.request_id, index))
        view = self.query_one(Transcript).view_of(turn)
        if view is not None:
            await view.show_answer()
        self.save()
        self._refresh_status()

    async def accept_best(self) -> None:
        """Who goes on without choosing takes the first candidate, which is a search's best."""
        leaf = self.conversation.leaf
        if leaf is not None and leaf.answer.candidates and not leaf.answer.is_open:
            self.say("the first candidate was taken")
            await self.accept(leaf, 0)

    # --- what is seen of it -------------------------------------------------------------------------------------------

    def _refresh_status(self) -> None:
        self._pace()
        leaf = self.conversation.leaf
        answer = leaf.answer if leaf is not None else Answer("")
        prompt = self.query_one(PromptInput)
        prompt.num_picks = len(answer.candidates)
        prompt.cursor_blink = self._open is None  # or the screen would be drawn twice a second more, beside the model
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
        if self._open is None:
            return "ready"
        if self._stopping:
            return "stopping"
        return "reading" if answer.time_to_first_token is None else "generating"

    @on(TextArea.Changed)
    def _hint(self, message: TextArea.Changed) -> None:
        """While a command is being typed: those that it may become."""
        hints = self.query_one("#hints", Static)
        found = completions(message.text_area.text)
        hints.display = bool(found)
        if found:
            words = [f"{command.usage}  {command.summary}" for command in found[:6]]
            more = len(found) - len(words)
            hints.update(Content("\n".join([*words, f"and {more} more: /help lists all"] if more else words)))

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_command(self, name: str, argument: str = "") -> None:
        """Do what a slash command of this name does, after all that this screen was told before.

        Keys act in the app's task, or in the prompt's, and the palette in the app's: a command that began there would
        change the conversation in the midst of a question that is being asked here.
        """
        self.call_later(self._run_command, name, argument)

    async def _run_command(self, name: str, argument: str) -> None:
        """An error that its user made is said."""
        action = next(command.action for command in COMMANDS if command.name == name)
        try:
            await getattr(self, action)(argument)
        except MinillmError as error:
            self.say(str(error))

    def action_stop(self) -> None:
        """End the answer, the loading, or the editing; else back to the prompt."""
        if self._open is not None:
            self._stopping = True
            self.send(Abort(self._open.answer.request_id))
            self._refresh_status()
        elif self._engine_state.phase == "loading":
            self.app.stop_engine()  # type: ignore[attr-defined]
        else:
            if self.editing is not None:
                self.editing = None
                self.query_one(PromptInput).text = ""
                self.say("the question stays as it was")
            self.clear_selection()
            self.query_one(Transcript).select(None)
            self.query_one(PromptInput).focus()

    def action_interrupt(self) -> None:
        """ctrl+c: copy what is selected, else stop what goes on, else quit."""
        selected = self.query_one(PromptInput).selected_text or self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
        elif self._open is not None or self._engine_state.phase == "loading":
            self.action_stop()
        elif time.monotonic() - self._finished_at < _GRACE:
            self.say("the answer has ended; ctrl+c again quits")
            self._finished_at = 0.0
        else:
            self.app.exit()

    @property
    def memory_view(self) -> str:
        """The memory view that is shown; empty where none is."""
        panel = self.query_one(MemoryPanel)
        return panel.view if panel.display else ""

    def action_view(self, name: str) -> None:
        """Show one of the memory views; the same key once more hides it."""
        panel = self.query_one(MemoryPanel)
        shown = self.memory_view != name
        self.set_class(shown, "-memory")
        self.set_class(not shown, "-no-memory")
        if not shown:
            self.remove_class("-expanded")
            return
        panel.view = name
        self._show_memory()

    def action_expand(self) -> None:
        """Give the memory view the whole screen, or the chat its place back."""
        panel = self.query_one(MemoryPanel)
        if not panel.display:
            self.action_view(panel.view)
        self.toggle_class("-expanded")

    def action_select(self, step: int) -> None:
        self.query_one(Transcript).select_next(step)

    def action_scroll(self, where: str) -> None:
        transcript = self.query_one(Transcript)
        getattr(transcript, f"scroll_{where}")(animate=False)

    @on(PromptInput.HelpAsked)
    def _help(self) -> None:
        self.app.action_help()  # type: ignore[attr-defined]

    def commands(self) -> Iterable[SystemCommand]:
        """What the command palette offers: every slash command that needs no argument."""
        for command in COMMANDS:
            if not command.argument or command.argument.startswith("["):
                title = command.name.capitalize() + (f"  {command.key}" if command.key else "")
                yield SystemCommand(title, command.summary, partial(self.action_command, command.name))

    # --- the conversation on disk -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the conversation; an error is said, and nothing else happens."""
        self._saved_at = time.monotonic()
        try:
            self.store.save(self.conversation)
        except MinillmError as error:
            self.say(str(error))

    async def open_conversation(self, conversation: Conversation) -> None:
        """Show another conversation; what the engine holds of the old one is freed."""
        self.forget()
        self._open = self.editing = None
        self._num_dropped_before, self._warned_full = 0, False
        self.conversation = conversation
        transcript = self.query_one(Transcript)
        await transcript.clear()
        if conversation.leaf is not None:
            await transcript.show_path(conversation)
            for turn in conversation.turns:
                self.query_one(PromptInput).remember(turn.question)
        self.query_one(PromptInput).focus()
        self._refresh_status()

    def send(self, command: Command) -> None:
        self.post_message(EngineCommand(command))

    def say(self, text: str) -> None:
        self.app.say(text)  # type: ignore[attr-defined]


def _index_of(answer: Answer, index: int, text: str) -> int:
    """Where the candidate stands now that was number ``index``: beams may have changed places until they stopped."""
    order = [index, *range(len(answer.candidates))]
    return next((i for i in order if answer.candidates[i].text.startswith(text)), index)
