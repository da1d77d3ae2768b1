"""``/compact``: a summary in place of the older half, on the scripted engine."""

from __future__ import annotations

import json
import re

import pytest

from lib.ui import ask, chat, notes, say, screen, until
from minillm.errors import UsageError
from minillm.service.messages import Command
from minillm.ui.bars import StatusBar
from minillm.ui.chat.compact import Compaction, second_half, undo
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.export import to_json
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.saved import from_data

pytestmark = pytest.mark.anyio


async def test_the_older_half_is_told_as_a_summary_and_undone() -> None:
    async with chat(system="be brief") as pilot:
        for word in ("one", "two", "six", "ten"):
            await ask(pilot, f"echo {word}")
        pane = screen(pilot).chat_pane
        await say(pilot, "/compact")
        await until(pilot, lambda: "the model now sees" in notes(pilot)[-1])
        # The scripted engine answers with the request itself; the fourth turn is a part of the newer half.
        said = notes(pilot)[-1]
        assert "the first 2 turns" in said
        assert "Summary: Sum up our conversation so far" in said
        told = (await ask(pilot, "messages")).answer.text
        assert told.startswith("system=be brief;user=What have we said so far?;assistant=Sum up our conversation")
        assert told.endswith("user=echo six;assistant=six;user=echo ten;assistant=ten;user=messages;")
        assert "echo two" not in told
        again = from_data(json.loads(to_json(pane.conversation)))
        assert again.messages("be brief") == pane.conversation.messages("be brief")
        await say(pilot, "/compact undo")
        assert "user=echo one;assistant=one;user=echo two" in (await ask(pilot, "messages")).answer.text
        await say(pilot, "/compact undo")
        with pytest.raises(UsageError, match="no summary here"):
            undo(pane.conversation)


async def test_a_question_waits_for_the_summary() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        await ask(pilot, "echo two")
        pane = screen(pilot).chat_pane
        for text in ("/compact", "messages"):  # in one read
            pane.prompt.post_message(PromptInput.Submitted(text))
        await until(pilot, lambda: pane.conversation.num_answers == 3)
        answer = pane.conversation.turns[-1].answer.text
        assert answer.startswith("user=What have we said so far?;assistant=Sum up")


async def test_tokens_that_come_back_are_said_and_a_second_summary_holds_the_first() -> None:
    async with chat() as pilot:
        for word in ("one", "two", "three"):
            await ask(pilot, f"echo {word}")
        pane = screen(pilot).chat_pane
        for turn in pane.conversation.turns:
            turn.answer.num_prompt_tokens = 700
        await say(pilot, "/compact")
        await until(pilot, lambda: "which frees about" in notes(pilot)[-1])
        came_back = int(re.search(r"about ([\d,]+) tokens", notes(pilot)[-1])[1].replace(",", ""))  # type: ignore[index]
        bar, last = screen(pilot).query_one(StatusBar), pane.conversation.turns[-1].answer
        assert 0 < came_back == last.num_context_tokens - bar.status.context_used
        await say(pilot, "/compact undo")
        await until(pilot, lambda: bar.status.context_used == last.num_context_tokens)
        await say(pilot, "/compact")
        await until(pilot, lambda: bar.status.context_used == last.num_context_tokens - came_back)
        await ask(pilot, "echo four")
        await say(pilot, "/compact")
        await until(pilot, lambda: sum(bool(turn.summary) for turn in pane.conversation.turns) == 2)
        assert len(pane.conversation.messages()) < 8


async def test_nothing_to_sum_up_is_said_and_a_lost_engine_leaves_all_as_it_was() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        with pytest.raises(UsageError, match="too little"):
            second_half(screen(pilot).chat_pane.conversation)
        await ask(pilot, "echo two")
        before = screen(pilot).chat_pane.conversation.messages()
        pane, sent = screen(pilot).chat_pane, list[Command]()
        pane.compaction = Compaction.begin(pane.conversation, "", sent.append)  # that the engine never answers
        assert not pane.can_ask()
        screen(pilot).app.load_model()
        await until(pilot, lambda: screen(pilot).chat_pane.compaction is None)
        await until(pilot, lambda: screen(pilot).chat_pane.engine.phase == "ready")
        assert screen(pilot).chat_pane.conversation.messages() == before


def test_a_summary_belongs_to_its_branch() -> None:
    conversation = Conversation()
    for word in ("a", "b", "c"):
        answer = conversation.ask(word)
        answer.text, answer.finish_reason = word.upper(), "stop"
    last = conversation.turns[-1]
    last.summary = "letters"
    assert [each["content"] for each in conversation.messages()] == ["What have we said so far?", "letters", "c", "C"]
    conversation.ask("d", instead_of=last)
    assert [each["content"] for each in conversation.messages()] == ["a", "A", "b", "B", "d"]
