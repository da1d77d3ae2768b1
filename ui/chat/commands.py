"""What the slash commands and their keys do, a method each; `minillm.ui.chat.slash` lists them."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.screen import Screen

from minillm.errors import UsageError
from minillm.service.messages import Command, Forget
from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore, export
from minillm.ui.chat.transcript import Transcript
from minillm.ui.settings import Settings, with_param

_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)


class ChatCommands(Screen[None]):
    """The commands, in terms of what `ChatScreen` can do."""

    conversation: Conversation
    store: SessionStore
    editing: Turn | None

    # --- what the chat can do -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def settings(self) -> Settings: ...

    @property
    @abstractmethod
    def is_answering(self) -> bool: ...

    @abstractmethod
    def can_ask(self) -> bool: ...

    @abstractmethod
    async def request_answer(self) -> None: ...

    @abstractmethod
    async def continue_answer(self, turn: Turn) -> None: ...

    @abstractmethod
    async def choose(self, turn: Turn, index: int) -> None: ...

    @abstractmethod
    async def accept_best(self) -> None: ...

    @abstractmethod
    async def open_conversation(self, conversation: Conversation) -> None: ...

    @abstractmethod
    def action_view(self, name: str) -> None: ...

    @abstractmethod
    def send(self, command: Command) -> None: ...

    @abstractmethod
    def say(self, text: str) -> None: ...

    @abstractmethod
    def save(self) -> None: ...

    def forget(self) -> None:
        """Have the engine free what it holds of the conversation."""
        self.send(Forget(self.conversation.conversation_id))

    # --- conversations ------------------------------------------------------------------------------------------------

    async def do_new(self, _: str) -> None:
        self.save()
        await self.open_conversation(Conversation())

    async def do_sessions(self, words: str) -> None:
        from minillm.ui.dialogs.sessions import SessionsScreen

        if self.is_answering:
            raise UsageError("an answer is being given; Escape stops it")
        self.save()

        async def chosen(path: Path | None) -> None:
            if path is None:
                return
            try:
                conversation = self.store.load(path)
            except Exception as error:
                self.say(str(error))
                return
            self._change(system=conversation.system)
            await self.open_conversation(conversation)

        self.app.push_screen(SessionsScreen(self.store, words), chosen)

    async def do_export(self, name: str) -> None:
        if self.conversation.leaf is None:
            raise UsageError("there is nothing to export yet")
        target = export(self.conversation, Path(name))
        self.say(f"written to {target}")

    # --- turns and branches -------------------------------------------------------------------------------------------

    def _turn(self) -> Turn:
        """The selected turn, or the last one."""
        turn = self.query_one(Transcript).selected or self.conversation.leaf
        if turn is None:
            raise UsageError("nothing has been said yet")
        return turn

    async def do_edit(self, _: str) -> None:
        turn = self._turn()
        if self.is_answering:
            raise UsageError("an answer is being given; Escape stops it")
        self.editing = turn
        prompt = self.query_one(PromptInput)
        prompt.text = ""
        prompt.put_back(turn.question)
        prompt.focus()
        self.say("Enter asks the changed question as a branch; Escape leaves it as it was")

    async def do_regenerate(self, _: str) -> None:
        turn = self._turn()
        if self.can_ask():
            await self.accept_best()
            self.conversation.ask_instead(turn, turn.question)
            await self.request_answer()

    async def do_continue(self, _: str) -> None:
        if self.conversation.leaf is None:
            raise UsageError("nothing has been said yet")
        if self.can_ask():
            await self.accept_best()
            await self.continue_answer(self.conversation.leaf)

    async def do_branch(self, direction: str) -> None:
        if self.is_answering:
            raise UsageError("an answer is being given; Escape stops it")
        turn = self._turn()
        branching = next(
            (t for t in [turn, *self.conversation.turns[::-1]] if len(self.conversation.siblings(t)) > 1), None
        )
        if branching is None:
            raise UsageError("there is only one branch; Alt+E or Alt+R begins another")
        await self.accept_best()
        chosen = self.conversation.switch(branching, -1 if direction.startswith("p") else 1)
        transcript = self.query_one(Transcript)
        await transcript.show_path(self.conversation)
        transcript.select(transcript.view_of(chosen))
        self.save()

    async def do_accept(self, number: str) -> None:
        turns = [turn for turn in self.conversation.turns if turn.answer.candidates]
        if not turns:
            return
        last = len(turns[-1].answer.candidates)
        if not number.isdigit() or not 1 <= int(number) <= last:
            raise UsageError(f"the candidates are numbered 1 to {last}")
        await self.choose(turns[-1], int(number) - 1)

    async def do_copy(self, what: str) -> None:
        text = self._turn().answer.text
        if what:
            blocks = [match.group(2) for match in _FENCE.finditer(text)]
            if not blocks:
                raise UsageError("the answer has no code block")
            text = blocks[-1]
        self.app.copy_to_clipboard(text)
        self.say("the code block is copied" if what else "the answer is copied")

    async def do_probabilities(self, _: str) -> None:
        from minillm.ui.dialogs.probabilities import ProbabilityScreen

        tokens = self._turn().answer.tokens
        if not tokens:
            raise UsageError("the probabilities of this answer are not known: beams and saved answers have none")
        self.app.push_screen(ProbabilityScreen(tokens))

    # --- settings -----------------------------------------------------------------------------------------------------

    def _change(self, **changes: Any) -> None:
        self.app.settings = replace(self.settings, **changes)  # type: ignore[attr-defined]

    async def do_model(self, name: str) -> None:
        from minillm.ui.dialogs.models import ModelScreen

        def chosen(model: str | None) -> None:
            if model is not None:
                self.app.choose_model(model)  # type: ignore[attr-defined]

        if name:
            chosen(name)
        else:
            self.app.push_screen(ModelScreen(self.settings.model), chosen)

    async def do_reload(self, _: str) -> None:
        self.app.load_model()  # type: ignore[attr-defined]

    async def do_sampling(self, _: str) -> None:
        from minillm.ui.dialogs.sampling import SamplingScreen

        def chosen(settings: Settings | None) -> None:
            if settings is not None:
                self.app.settings = settings  # type: ignore[attr-defined]

        self.app.push_screen(SamplingScreen(self.settings), chosen)

    async def do_set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        self.app.settings = with_param(self.settings, name, value.strip())  # type: ignore[attr-defined]
        self.say(f"{name} is {value.strip() or 'off'}, from the next answer on")

    async def do_n(self, number: str) -> None:
        self.app.settings = with_param(with_param(self.settings, "beam_width", "1"), "n", number)  # type: ignore[attr-defined]
        self.say(f"{number} answers to choose from, from the next question on")

    async def do_beams(self, number: str) -> None:
        await self.do_set(f"beam_width {number}")

    async def do_system(self, text: str) -> None:
        from minillm.ui.dialogs.system import SystemScreen

        def chosen(system: str | None) -> None:
            if system is not None:
                self._change(system=system)

        if text:
            chosen(text)
            self.say("the system prompt is changed, from the next answer on")
        else:
            self.app.push_screen(SystemScreen(self.settings.system), chosen)

    # --- the app ------------------------------------------------------------------------------------------------------

    async def do_help(self, _: str) -> None:
        self.app.action_help()  # type: ignore[attr-defined]

    async def do_theme(self, name: str) -> None:
        self.app.set_theme(name)  # type: ignore[attr-defined]

    async def do_quit(self, _: str) -> None:
        self.app.exit()

    async def do_pool(self, _: str) -> None:
        self.action_view("pool")

    async def do_tables(self, _: str) -> None:
        self.action_view("tables")

    async def do_tree(self, _: str) -> None:
        self.action_view("tree")

    async def do_events(self, _: str) -> None:
        self.action_view("events")

    async def do_memory(self, _: str) -> None:
        self.action_view("memory")

    async def do_steps(self, _: str) -> None:
        self.action_view("steps")
