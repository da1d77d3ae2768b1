"""Search in the conversation."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from textual.content import Content
from textual.pilot import Pilot
from textual.widgets import Input, Static

from lib.ui import ask, chat, say, screen, seen, until
from minillm.ui.chat.answer_view import ReasoningView
from minillm.ui.chat.conversation import Candidate, Conversation
from minillm.ui.chat.find import Finder
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.turn_view import shown_question

pytestmark = pytest.mark.anyio


def found(pilot: Pilot[None]) -> str:
    return str(screen(pilot).query_one("#found", Static).render())


def marked(pilot: Pilot[None], look: str) -> list[str]:
    """The words on the screen that have this look."""
    lines = pilot.app.screen._compositor.render_strips(pilot.app.size)
    return [each.text for strip in lines for each in strip if each.style and getattr(each.style, look) and each.text]


async def test_places_are_counted_marked_and_walked_through() -> None:
    async with chat(size=(100, 40)) as pilot:
        await ask(pilot, "echo a heron and a *Heron*")
        await ask(pilot, "echo no bird")
        await pilot.press("ctrl+f", *"heron")
        await until(pilot, lambda: found(pilot).startswith("1 of 4"))  # in the question and in the answer
        await until(pilot, lambda: marked(pilot, "reverse") == ["heron"])
        assert marked(pilot, "underline") == ["heron", "Heron", "heron", "Heron"], "the current one, too"
        await pilot.press("enter", "enter")
        await until(pilot, lambda: found(pilot).startswith("3 of 4"))
        await pilot.press("shift+enter", "up", "up")
        await until(pilot, lambda: found(pilot).startswith("4 of 4"))
        screen(pilot).chat_pane.conversation.turns[-1].answer.text += ", but a heron"
        await pilot.press("enter")
        await until(pilot, lambda: found(pilot).startswith("5 of 5"))
        await pilot.press("x")
        await until(pilot, lambda: found(pilot) == "nothing found")
        assert marked(pilot, "underline") == []


async def test_escape_closes_and_leaves_nothing_behind() -> None:
    async with chat(size=(100, 40)) as pilot:
        await ask(pilot, "echo one")
        before = [(type(each), str(each.render())) for each in screen(pilot).chat_pane.transcript.query(Static)]
        await pilot.press("ctrl+f", *"one", "escape")
        await pilot.pause()
        after = [(type(each), str(each.render())) for each in screen(pilot).chat_pane.transcript.query(Static)]
        assert after == before
        assert marked(pilot, "underline") == []
        assert screen(pilot).focused is screen(pilot).query_one(PromptInput)
        assert not screen(pilot).chat_pane.search.display
        assert (await ask(pilot, "echo two")).answer.text == "two"


async def test_a_command_searches_and_special_characters_are_characters() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo what.is [this]? *.*")
        await say(pilot, "/find [this]?")
        await until(pilot, lambda: found(pilot).startswith("1 of 2"))
        screen(pilot).query_one(Input).value = ".is"
        await until(pilot, lambda: found(pilot).startswith("1 of 2"))


async def test_words_and_places_are_in_sight_in_a_narrow_terminal() -> None:
    async with chat(size=(40, 24)) as pilot:
        await ask(pilot, "echo a heron")
        await pilot.press("ctrl+f", *"heron")
        await until(pilot, lambda: re.search(r"find heron +1 of 2", seen(pilot)))


async def test_a_place_in_folded_reasoning_is_opened() -> None:
    async with chat() as pilot:
        await ask(pilot, "think")
        assert screen(pilot).query_one(ReasoningView).collapsed
        await say(pilot, "/find let me")
        await until(pilot, lambda: not screen(pilot).query_one(ReasoningView).collapsed)
        await until(pilot, lambda: "let me" in marked(pilot, "reverse"))


async def test_over_five_hundred_turns() -> None:
    async with chat(size=(100, 30)) as pilot:
        conversation = Conversation()
        for number in range(500):
            answer = conversation.ask(f"question {number}")
            answer.text, answer.finish_reason = f"An answer with number {number} of many", "stop"
        pane = screen(pilot).chat_pane
        await pane.open_conversation(conversation)
        assert len(Finder().find(pane.transcript.turns, "an answer")) == 500
        pane.search.open("number 77 of")
        await until(pilot, lambda: found(pilot).startswith("1 of 1 "))
        await until(pilot, lambda: "number 77 of" in marked(pilot, "reverse"))
        pane.search.open("question")
        await until(pilot, lambda: "of 500" in found(pilot))
        for step in (1, -1, -1):
            pane.search.action_go(step)
        await until(pilot, lambda: "question" in marked(pilot, "reverse"))
        pane.search.close()
        await until(pilot, lambda: not marked(pilot, "underline"))


async def test_a_place_in_long_text_of_wide_characters_is_brought_into_sight() -> None:
    async with chat(size=(100, 24)) as pilot:
        conversation = Conversation()
        answer = conversation.ask("question")
        answer.text, answer.finish_reason = "世界你好" * 500 + "鹭" + "天地玄黄" * 500, "stop"
        pane = screen(pilot).chat_pane
        await pane.open_conversation(conversation)
        pane.search.open("鹭")
        await until(pilot, lambda: "鹭" in marked(pilot, "reverse"))


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["A heron is here", "A heron is here", "Another bird"], 1),  # equal ones are shown once
        (["A heron is here"] * 2, 1),
        (["A heron is here, and so", "A heron is here, a *heron*"], 2),  # the common beginning is shown once
    ],
)
async def test_answers_to_choose_from_are_searched_as_they_are_shown(texts: list[str], count: int) -> None:
    async with chat(size=(100, 40)) as pilot:
        conversation = Conversation()
        answer = conversation.ask("question")
        answer.candidates = [Candidate(text, 4, finish_reason="stop") for text in texts]
        answer.finish_reason = "stop"
        pane = screen(pilot).chat_pane
        await pane.open_conversation(conversation)
        await until(pilot, lambda: pane.transcript.is_settled and "heron" in seen(pilot))
        pane.search.open("heron")
        await until(pilot, lambda: found(pilot).startswith(f"1 of {count} "))
        await until(pilot, lambda: len(marked(pilot, "underline")) == count)
        for number in (*range(2, count + 1), 1):
            await pilot.press("enter")
            place = f"{number} of {count} "
            await until(pilot, partial(lambda words: found(pilot).startswith(words), place))
            await until(pilot, lambda: "heron" in marked(pilot, "reverse"))


async def test_a_place_stays_in_sight_while_the_end_grows() -> None:
    async with chat(size=(100, 24)) as pilot:
        conversation = Conversation()
        for number in range(30):
            answer = conversation.ask(f"question {number}")
            answer.text, answer.finish_reason = f"An answer with number {number} of many", "stop"
        pane = screen(pilot).chat_pane
        await pane.open_conversation(conversation)
        await until(pilot, lambda: pane.transcript.is_settled and "number 29" in seen(pilot))
        view = pane.transcript.view_of(conversation.turns[24])
        assert view is not None, "it is mounted"
        assert "number 24 of" not in seen(pilot), "above what is in sight"
        pane.search.open("number 24 of")
        await until(pilot, lambda: "number 24 of" in seen(pilot))
        for word in ("one", "two", "three"):
            await pane.transcript.add_note(f"{word}\n" * 9)
            await until(pilot, lambda: pane.transcript.is_settled)
        await pilot.pause()
        assert "number 24 of" in seen(pilot)
        before = pane.transcript.scroll_y
        pane.search._bring_into_sight(Static(Content("a line\n" * 99 + "number 24 of")), 0)
        await pilot.pause()
        assert pane.transcript.scroll_y == before, "not to a text that was removed in the meantime"


async def test_an_attached_file_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "birds.txt").write_text("a heron\nand a stork\n")
    monkeypatch.chdir(tmp_path)
    async with chat(size=(100, 30)) as pilot:
        await ask(pilot, "messages of @birds.txt")
        pane = screen(pilot).chat_pane
        assert "stork" not in shown_question(pane.conversation.turns[0].question)
        await say(pilot, "/find heron")
        await until(pilot, lambda: "1 of 2" in found(pilot))
        places = Finder().find(pane.conversation.turns, "heron")
        assert len(places) == 2, "in the answer, which repeats it, and in the file"
        await pilot.press("enter")
        await until(pilot, lambda: "2 of 2" in found(pilot))
        await until(pilot, lambda: pane.transcript.selected is pane.conversation.turns[0])
