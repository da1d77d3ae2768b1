"""The chat pane: conversation, transcript, prompt, and the answer in progress."""

import time
from pathlib import Path

from textual import getters, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import var

from minillm.errors import MinillmError, UsageError
from minillm.service.messages import Command, Forget, Keep, Notice, ReadAhead
from minillm.ui.bars import LoadingBar, StatusBar
from minillm.ui.chat.answer_run import AnswerRun, Ending
from minillm.ui.chat.compact import Compaction
from minillm.ui.chat.conversation import Candidate, Conversation, Turn
from minillm.ui.chat.engine_options import EngineOptions
from minillm.ui.chat.engine_status import full_context, notes_of, reason_to_wait, status_of
from minillm.ui.chat.files import with_files
from minillm.ui.chat.popup import Popup
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.search import SearchBar
from minillm.ui.chat.sessions import COPY_NOTE, SessionStore
from minillm.ui.chat.slash import CommandTable, is_command
from minillm.ui.chat.transcript import Transcript
from minillm.ui.chat.waiting import WaitingQuestions
from minillm.ui.drawing import Drawing
from minillm.ui.engine_app import CommandRequested, EngineApp, EngineCommand, EngineEvent, EngineState
from minillm.ui.memory.pool import Pool

_SAVE_INTERVAL = 2.0  # seconds between saves while an answer grows
_LINES_AHEAD = 6  # lines that a growing paragraph reserves if the model computes on the app's CPU cores
LONG_ANSWER = 10.0  # the end of an answer rings the bell if it took more than this many seconds


class ChatPane(Vertical):
    """The conversation and its widgets.

    Questions, commands and the engine's events change the conversation. All of them are handled one at a time, in this
    widget's own task.
    """

    app = getters.app(EngineApp)
    transcript = getters.query_one(Transcript)
    prompt = getters.query_one(PromptInput)
    search = getters.query_one(SearchBar)

    beside_model: var[bool] = var(False)
    """True while the model computes an answer on the app's CPU cores."""

    editing: var[Turn | None] = var(None)
    """The turn with the question that is being edited in the prompt."""

    leaf: var[Turn | None] = var(None)
    """The last visible turn."""

    def __init__(self, store: SessionStore, commands: CommandTable) -> None:
        super().__init__(id="chat-pane")
        self.store = store
        self.commands = commands
        self.conversation = Conversation()
        self.run: AnswerRun | None = None
        self.compaction: Compaction | None = None
        self.engine = EngineState()  # the last state that this widget has received
        self.pool: Pool | None = None
        self.waiting = WaitingQuestions(PromptInput(commands, Popup()), Transcript())
        self.is_paced = False  # whether the engine is slowed down for people to watch, so that drawing may take longer
        self.num_waiting = 0  # number of commands that are queued by `call_command`
        self._text = Drawing(self, self._draw, share=0.014, longest=1.0)
        self._saved_at = 0.0
        self._warned_full = False
        self._options = EngineOptions(self.send)

    def compose(self) -> ComposeResult:
        yield self.waiting.transcript
        yield SearchBar(self.waiting.transcript)
        yield LoadingBar()
        yield self.waiting.prompt
        yield self.waiting.prompt.popup
        yield StatusBar()

    def on_mount(self) -> None:
        self.prompt.focus()
        self.watch(self.app, "settings", lambda settings: self._options.pin(settings.system))
        for each in ("scroll_y", "virtual_size", "container_size"):
            self.watch(self.transcript, each, self.waiting.show)

    def watch_editing(self, turn: Turn | None) -> None:
        self.prompt.border_title = "" if turn is None else "editing · Enter asks as a branch · Esc cancels"
        if turn is None:
            self.waiting.bring_back()

    async def _take_state(self, state: EngineState) -> None:
        before, self.engine = self.engine, state
        bar = self.query_one(LoadingBar)
        bar.display = state.phase == "loading"
        bar.progress = state.loading
        if state.phase == before.phase:
            return
        if state.phase != "ready":
            self.compaction = None
            if self.run is not None:
                await self._end(Ending("lost"))
        for text, kind in notes_of(state):
            await self.transcript.add_note(text, kind)
        self._options.reset(ready=state.phase == "ready")
        if state.loaded is not None:
            self._options.pin(self.app.settings.system)
            await self._ask_waiting()
            self._read_ahead()
        elif state.phase != "loading":
            self.waiting.restore_to_prompt()
        self.refresh_status()

    async def on_engine_event(self, message: EngineEvent) -> None:
        event, run = message.event, self.run
        if isinstance(event, EngineState):
            await self._take_state(event)
        elif isinstance(event, Notice):
            await self.transcript.add_note(event.text)
        elif run is not None and getattr(event, "request_id", None) == run.answer.request_id:
            ending = await run.take(event)
            if ending is not None:
                await self._end(ending)
            else:
                self._text.soon()
        elif (summing := self.compaction) is not None and summing.take(event):
            self.compaction = None
            try:
                await self.transcript.add_note(summing.finish())
            except UsageError as error:
                await self.transcript.add_note(str(error), "warning")
            self.save()
            self.refresh_status()
            await self._ask_waiting()

    def send(self, command: Command) -> None:
        self.post_message(EngineCommand(command))

    @on(PromptInput.Submitted)
    async def _submitted(self, message: PromptInput.Submitted) -> None:
        if is_command(message.text):
            try:
                command, argument = self.commands.parse(message.text)
            except MinillmError as error:
                self.notify(str(error))
                self.prompt.put_back(message.text)
                return
            await self.run_command(command.name, argument)
            return
        try:
            text = with_files(message.text.strip(), Path.cwd())
        except UsageError as error:
            self.notify(str(error))
            self.prompt.put_back(message.text)
            return
        if self.run is not None or self.compaction is not None or self.engine.phase == "loading":
            self.waiting.put(text)
        elif not self.can_ask():
            self.prompt.put_back(message.text)
        else:
            await self.ask(text)

    async def _ask_waiting(self) -> None:
        """Ask the first queued question, if there is one."""
        if (question := self.waiting.next()) is not None:
            if is_command(question):
                await self.run_command(self.commands.parse(question)[0].name)
            else:
                await self.ask(question)

    async def on_command_requested(self, message: CommandRequested) -> None:
        await self.run_command(message.name, message.argument)

    async def run_command(self, name: str, argument: str = "") -> None:
        """Run a slash command. An error that the user can cause is shown as a notification."""
        try:
            await self.commands[name].action(self, argument)
        except MinillmError as error:
            self.notify(str(error))

    def call_command(self, name: str, argument: str) -> None:
        """Run a command after all messages that this widget has already received. This can be called from any task."""

        async def run() -> None:
            try:
                await self.run_command(name, argument)
            finally:
                self.num_waiting -= 1

        self.num_waiting += 1
        self.call_later(run)

    def can_ask(self) -> bool:
        """Return whether the engine is free for a question. If it is not, show a notification with the reason."""
        reason = reason_to_wait(self.run, self.compaction)
        if not reason and self.engine.phase != "ready":
            is_loading = self.engine.phase == "loading"
            advice = "no model is loaded: F2 chooses one, /reload loads it again"
            if self.engine.server:
                advice = f"the server at {self.engine.server} is not connected: /reload connects again"
            reason = "the model is still loading" if is_loading else advice
        if reason:
            self.notify(reason)
        return not reason

    async def ask(self, question: str, instead_of: Turn | None = None) -> None:
        """Ask a question after the last turn, and show its turn.

        ``instead_of``: ask it as a branch next to this turn. None: next to the turn that is being edited, if any.
        """
        if instead_of is None:
            instead_of, self.editing = self.editing, None
        await self.accept_best()
        self.conversation.ask(question, instead_of=instead_of)
        turn, settings = self.conversation.leaf, self.app.settings
        assert turn is not None
        self.conversation.model, self.conversation.system = self.engine.model, settings.system
        if settings.num_candidates > 1:
            depths = settings.depths or [None] * settings.num_candidates
            turn.answer.candidates = [Candidate(depth=depth) for depth in depths]
        self.transcript.select(None)
        await self.transcript.show_path(self.conversation)
        self.app.restore_window_title()
        self.begin(turn).ask()
        self.refresh_status()
        self.save()

    def begin(self, turn: Turn) -> AnswerRun:
        """Begin an answer of a turn. The caller then calls `AnswerRun.ask` or `AnswerRun.go_on`."""
        longest = self.engine.loaded.max_model_len if self.engine.loaded is not None else 1
        owner = self.store.owner_of(self.conversation)
        self.run = AnswerRun(turn, self.conversation, self.app.settings, self.transcript, self.send, longest, owner)
        return self.run

    async def _draw(self) -> None:
        if self.run is not None:
            ahead = min(_LINES_AHEAD, self.transcript.size.height // 4) if self.beside_model else 0
            await self.run.draw(ahead)
            self.refresh_status()
            if time.monotonic() - self._saved_at > _SAVE_INTERVAL:
                self.save()

    async def _end(self, ending: Ending) -> None:
        """End the answer.

        If the answer was stopped or lost before its first word, put its question back into the prompt.
        """
        run, self.run = self.run, None
        assert run is not None
        if not await run.end(ending.reason):
            self.prompt.put_back(self.conversation.withdraw())
            await self.transcript.show_path(self.conversation)
        elif (chosen := run.chosen) is not None:
            await self.accept(run.turn, chosen)
        self.refresh_status()
        self.save()
        if run.seconds > LONG_ANSWER and self.app.settings.bell:
            self.app.call_user(self.conversation.shown_title)
        if not self._warned_full and (warning := full_context(self.engine.loaded, run.answer)):
            self._warned_full = True
            await self.transcript.add_note(warning, "warning")
        if ending.error:
            await self.transcript.add_note(ending.error, "error")
        if ending.reason in ("stop", "length") and not run.answer.candidates:
            await self._ask_waiting()
        elif self.waiting.restore_to_prompt() and run.answer.candidates:
            self.notify("choose an answer first, or press Enter to take the first one and ask")

    async def accept(self, turn: Turn, index: int) -> None:
        """Use candidate ``index`` as the answer. The other candidates become branches."""
        self.conversation.accept(turn, index)
        self.send(Keep(turn.answer.request_id, index))
        await self.show_again(turn)
        self.notify(f"answer {index + 1} accepted · Alt+← → shows the others · Alt+U undoes")

    async def show_again(self, turn: Turn) -> None:
        """Show a turn with its new answer or candidates."""
        view = self.transcript.view_of(turn)
        if view is not None:
            await view.show_answer()
        await self.transcript.show_path(self.conversation)
        self.save()
        self.refresh_status()

    async def accept_best(self) -> None:
        """Accept the first candidate if there are candidates. The first candidate of a beam search is the best beam.

        This is called when the user continues without choosing.
        """
        leaf = self.conversation.leaf
        if leaf is not None and leaf.answer.candidates and not leaf.answer.is_open:
            await self.accept(leaf, 0)

    def refresh_status(self) -> None:
        """Update the status bar. If the model computes on the app's CPU cores, draw and report less often."""
        loaded = self.engine.loaded
        leaf = self.leaf = self.conversation.leaf
        on_cpu = loaded is not None and loaded.device == "cpu"
        self.beside_model = self.run is not None and on_cpu and not self.is_paced
        self._text.pace(self.beside_model)
        self._options.report(self._text.interval)
        self.prompt.num_picks = len(leaf.answer.candidates) if leaf is not None else 0
        # A blinking cursor would need two drawings a second while the model computes.
        self.prompt.cursor_blink = self.run is None
        self.query_one(StatusBar).status = status_of(
            self.engine, self.run, self.conversation, self.pool, sums_up=self.compaction is not None
        )

    def save(self) -> None:
        """Save the conversation. An error is shown as a notification."""
        self._saved_at = time.monotonic()
        try:
            if self.store.save(self.conversation):
                self.call_later(self.transcript.add_note, COPY_NOTE, "warning")
        except MinillmError as error:
            self.notify(str(error))

    async def open_conversation(self, conversation: Conversation) -> None:
        """Show another conversation. The engine frees the blocks of the previous conversation."""
        self.send(Forget(self.conversation.conversation_id))
        self.run = self.editing = self.compaction = None
        self.waiting.restore_to_prompt()
        self._warned_full = False
        self.search.close()
        self.conversation = conversation
        await self.transcript.clear()
        for note in conversation.notes:
            await self.transcript.add_note(note, "tour")
        if conversation.leaf is not None:
            await self.transcript.show_path(conversation)
            for turn in conversation.turns:
                self.prompt.remember(turn.question)
        self.prompt.focus()
        self.refresh_status()
        self._read_ahead()

    def close_deleted(self, path: Path) -> None:
        """Show a new conversation if ``path`` was the file of this one. The next save would restore the file."""
        if path == self.store.path_of(self.conversation):
            self.call_later(self.open_conversation, Conversation())

    def _read_ahead(self) -> None:
        """Let the engine read the conversation's blocks from disk while the user types."""
        owner, settings = self.store.owner_of(self.conversation), self.app.settings
        if owner and self.engine.phase == "ready" and self.run is None:
            history = self.conversation.messages(settings.system)
            self.send(ReadAhead(self.conversation.conversation_id, history, thinks=settings.thinks, owner=owner))
