"""Test the chat pane's limits: reports of the engine, a full context, candidates of a running answer."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown_it.tree import SyntaxTreeNode
from msgspec.structs import replace as changed

from lib.ui import ask, chat, notes, say, screen, settled, until
from minillm.ui.bars import FULL
from minillm.ui.chat import prompt, quitting
from minillm.ui.chat.conversation import Answer, Candidate, Conversation
from minillm.ui.chat.markdown import harmless_parser
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.turn_view import shortened
from minillm.ui.dialogs import SessionsScreen

anyio = pytest.mark.anyio


@anyio
async def test_the_engine_is_told_how_often_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(log))
    async with chat() as pilot:
        await until(pilot, lambda: "Report {'every': 0.1}" in log.read_text())


@anyio
async def test_an_opened_conversation_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, conversation = tmp_path / "log", Conversation()
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(log))
    answer = conversation.ask("a question of old")
    answer.text, answer.finish_reason = "words", "stop"

    def count() -> int:
        lines = [line for line in log.read_text().splitlines() if " ReadAhead " in line]
        assert all("a question of old" in line and conversation.file_id in line for line in lines)
        return len(lines)

    async with chat() as pilot:
        await settled(pilot)  # the pane may still be taking in the loaded model, and would then ask a second time
        await screen(pilot).chat_pane.open_conversation(conversation)
        await until(pilot, lambda: count() == 1)
        await say(pilot, "/reload")
        await until(pilot, lambda: count() == 2)


@anyio
async def test_a_key_quits_where_it_comes_again_within_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    async with chat() as pilot:
        pane = screen(pilot).chat_pane
        monkeypatch.setattr(quitting, "time", SimpleNamespace(monotonic=lambda: now))
        for now, quits in ((1000.0, False), (1003.0, False), (1004.9, True), (1010.0, False)):  # noqa: B007
            assert screen(pilot).quit_key.is_repeated(pane, "ctrl+q") == quits


@anyio
async def test_a_slow_drawing_is_made_once_a_second() -> None:
    async with chat() as pilot:
        text = screen(pilot).chat_pane._text
        text.pace(True)
        for _ in range(30):
            text._spent(time.process_time() - 100)
        assert text.interval == pytest.approx(1.0)


@anyio
async def test_a_context_that_is_nearly_full_is_said_once() -> None:
    async with chat() as pilot:
        pane = screen(pilot).chat_pane
        assert pane.engine.loaded is not None
        pane.engine = replace(pane.engine, loaded=changed(pane.engine.loaded, max_model_len=50))
        assert FULL * 50 == 40
        for length in (19, 20, 25):  # the script's prompts have 20 tokens
            await ask(pilot, "echo " + "x" * length)
        await until(pilot, lambda: any("nearly full (40 of 50 tokens)" in note for note in notes(pilot)))
        assert sum("nearly full" in note for note in notes(pilot)) == 1


@anyio
async def test_no_candidate_is_accepted_unasked_while_they_are_written() -> None:
    async with chat(sampling={"n": 5}) as pilot:  # they go on until they are stopped
        pane = screen(pilot).chat_pane
        await say(pilot, "which?")
        await until(pilot, lambda: pane.run is not None and any(each.text for each in pane.run.answer.candidates))
        await pane.accept_best()
        assert pane.conversation.leaf is not None
        assert len(pane.conversation.leaf.answer.candidates) == 5
        await pilot.press("3")
        await until(pilot, lambda: pane.run is None)
        assert "sample3" in pane.conversation.leaf.answer.text


@anyio
async def test_a_digit_right_after_undo_takes_a_candidate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_AT_ONCE", 1e9)
    async with chat(sampling={"n": 3}) as pilot:
        answer = (await ask(pilot, "which?")).answer
        await pilot.press("2")
        await until(pilot, lambda: not screen(pilot).chat_pane.conversation.leaf.answer.candidates)  # type: ignore[union-attr]
        await pilot.press("alt+u")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.leaf.answer.candidates)  # type: ignore[union-attr]
        await until(pilot, lambda: screen(pilot).chat_pane.prompt.num_picks == 3)
        await pilot.press("3")
        await until(pilot, lambda: "sample3" in screen(pilot).chat_pane.conversation.leaf.answer.text)  # type: ignore[union-attr]
        assert screen(pilot).chat_pane.prompt.text == ""
        assert answer is not None


@anyio
async def test_a_saved_conversation_brings_its_system_prompt(tmp_path: Path) -> None:
    store, saved = SessionStore(tmp_path), Conversation(system="be brief", model="m")
    saved.ask("what?").finish_reason = "stop"
    store.save(saved)
    async with chat(store=store, system="be verbose") as pilot:
        await say(pilot, "/sessions")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        await pilot.press("enter")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.conversation_id == saved.conversation_id)
        assert screen(pilot).app.settings.system == "be brief"


def test_a_question_is_shortened_where_it_is_too_long() -> None:
    for text in ("x" * 4000, "x\n" * 39 + "x"):
        assert shortened(text) == text
    assert shortened("x" * 4001) == "x" * 4000 + "\n… 1 B more"
    assert shortened("x\n" * 40 + "y").startswith("x\n" * 39 + "x\n…")


def test_the_longest_candidate_takes_the_context() -> None:
    answer = Answer("a", num_prompt_tokens=10, num_output_tokens=4)
    assert answer.num_context_tokens == 14
    answer.candidates = [Candidate(num_tokens=count) for count in (3, 9, 5)]
    assert answer.num_context_tokens == 19


def test_half_a_character_is_saved(tmp_path: Path) -> None:
    store, conversation = SessionStore(tmp_path), Conversation()
    conversation.ask("half \ud83d").finish_reason = "stop"
    store.save(conversation)
    assert store.load(store.latest()).turns[0].question == "half \ud83d"


def test_the_tokens_of_markdown_make_a_tree() -> None:
    text = "A [link](http://a.example), <http://b.example>, ![picture](c.png), **bold** and `code`.\n\n- one\n- two\n"
    tree = SyntaxTreeNode(harmless_parser().parse(text))
    assert [child.type for child in tree.children] == ["paragraph", "bullet_list"]
    texts = "".join(node.content for node in tree.walk() if node.type in ("text", "code_inline"))
    assert "link http://a.example" in texts
    assert "[image: picture] c.png" in texts
