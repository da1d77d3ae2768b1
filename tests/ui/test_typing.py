"""Test keys and pastes from the terminal to the prompt: nothing in a paste is a key, and nothing is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual import events
from textual.widgets import Input, TextArea

from lib.terminal import CHAT, session
from lib.ui import ask, chat, is_told, notes, say, screen, seen, settled, until
from minillm.errors import MinillmError
from minillm.ui import terminal
from minillm.ui.app import ChatApp
from minillm.ui.chat import prompt as prompt_module
from minillm.ui.chat import quitting
from minillm.ui.chat.candidates import CandidateCard
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.terminal import LateAnswers, Pastes, are_lines, pasted_text
from minillm.ui.textual_internals import KeyParser

LOG = "ok 1\r\n\x1b[31mERROR\x1b[0m two\r\n\x1b]8;;http://a\x07link\x1b]8;;\x07 \x1b\x11 three\r\nlast"


def test_a_paste_with_escape_sequences_is_one_text_and_presses_no_key() -> None:
    with session(size=(100, 40)) as running:
        running.wait_for("ready in")
        running.type(f"\x1b[200~messages {LOG}\x1b[201~")
        running.wait_for("last")
        running.read(0.3)
        assert running.process.poll() is None, "byte 0x11 in the paste pressed Ctrl+Q"
        running.type("\r")
        running.wait_for("50.0 tok/s")
        running.read(0.3)
        shown = running.output.decode("utf-8", "replace")
        assert "user=messages" in shown
        assert "assistant=" not in shown, "it was asked once"
        # Lines that are pasted where the terminal does not mark pastes, and a key report that nobody can read.
        running.type("messages red\rgreen\rblue\r")
        running.wait_for("blue")
        running.type("\x1b[1114112u\x1b[97;1:3u\x1b[?0u!")
        running.wait_for("!")
        running.type("\r")
        running.wait_for("50.0 tok/s")
        running.quit()  # a redraw may show the speed of the first answer while the second one runs
        assert running.end() == 0
        assert running.modes_left_on() == []


def test_pastes_are_separated_from_keys_in_every_cut() -> None:
    said = b"a\x1b[200~b\x1b[31mc\x11\x1b[20d\x1b[201~e\x1b[A"
    for cut in range(len(said)):
        if said[cut - 1 : cut] == b"\x1b":
            continue
        answers, pastes, parts = LateAnswers(), Pastes(), list[tuple[bool, bytes]]()
        for piece in (said[:cut], said[cut:]):
            parts += pastes.split(answers.without(piece))
        assert b"".join(text for is_pasted, text in parts if not is_pasted) == b"ae\x1b[A", cut
        assert [text for is_pasted, text in parts if is_pasted] == [b"b\x1b[31mc\x11\x1b[20d"], cut


def test_escape_sequences_of_a_paste_are_left_out() -> None:
    assert pasted_text(LOG) == "ok 1\nERROR two\nlink \x1b\x11 three\nlast"
    assert pasted_text("\x1b[38;2;1;2;3mred\x1b[K\x1b(B \x1bP1$r0m\x1b\\ok") == "red ok"
    assert pasted_text("a[0m ]0;b") == "a[0m ]0;b", "no escape, no sequence"


def test_several_lines_at_once_are_pasted_and_one_line_is_typed() -> None:
    assert are_lines(b"one\rtwo\r")
    assert are_lines(b"one\r\rtwo\tthree")
    for keys in (b"one\r", b"one\rtwo", b"one\r\r", b"\r\r\r", b"one\rtwo\r\x1b[A", b"\x03one\rtwo\r"):
        assert not are_lines(keys), keys


def test_an_answer_of_the_terminal_in_parts_over_a_slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now))
    for said in (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\", b"\x1b]4;1;rgb:0/0/0\x07", b"\x1bP>|xterm(377)\x1b\\"):
        answers = LateAnswers()
        assert answers.without(said[:7]) + answers.without(b"") + answers.without(said[7:] + b"x") == b"x"
    assert answers.without(b"\x1b]11;rgb") == answers.without(b"") == b""
    now = 5.0
    assert answers.without(b"") == b"\x1b]11;rgb", "no answer: it was typed"


@pytest.mark.parametrize(
    ("sequence", "keys"),
    [
        ("\x1b[1114112u", []),  # no such character
        ("\x1b[97;5:1u", ["ctrl+a"]),  # pressed
        ("\x1b[97;5:3u", []),  # released
        ("\x1b[97:65;2;65u", ["A"]),
        ("\x1b[1;5:2A", ["ctrl+up"]),  # repeated
        ("\x1b[A", ["up"]),
        ("\x1b\r", ["alt+enter"]),  # of terminals without the Kitty protocol
        ("\x1b[[A", ["f1"]),  # of the Linux console
        ("\x1b[?0u", []),
        ("\x1b[8;24;80t", []),
        ("\x1b[>41;377;0c", []),
    ],
)
def test_key_reports(sequence: str, keys: list[str]) -> None:
    parser = KeyParser()
    found = [event for event in parser.feed(sequence + "x") if isinstance(event, events.Key)]
    assert [event.key for event in found] == [*keys, "x"]


@pytest.mark.anyio
async def test_a_mark_of_a_long_paste_is_edited_as_a_whole() -> None:
    async with chat() as pilot:
        prompt = screen(pilot).query_one(PromptInput)

        async def paste(text: str) -> None:
            pilot.app.post_message(events.Paste(text))
            await until(pilot, lambda: "[pasted text" in prompt.text)

        await paste("x" * 5600)
        await pilot.press("backspace")
        assert prompt.text == ""
        await pilot.press("ctrl+underscore")
        assert prompt.full_text == "x" * 5600, "undone"
        await pilot.press("home", "delete", *"echo ")
        assert prompt.text == "echo "
        await paste("y" * 5000)
        await pilot.press("left", "left", "left", *" no key goes inside", "enter")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.leaf is not None)
        turn = screen(pilot).chat_pane.conversation.leaf
        assert turn is not None
        assert turn.question == "echo " + "y" * 5000 + " no key goes inside"
        for keys in (["ctrl+w"], ["ctrl+u"], ["shift+left", "shift+left", "z"], ["ctrl+left", "ctrl+k"]):
            prompt.text = ""
            await paste("z" * 6000)
            await pilot.press(*keys)
            assert "pasted" not in prompt.text, keys
            assert not prompt.full_text.strip("z"), keys


@pytest.mark.anyio
async def test_a_question_with_escape_sequences_is_clean_in_the_prompt() -> None:
    async with chat() as pilot:
        evil = "\x1b]0;OWNED\x07\x1b[31mRED\u202eevil\x9b"
        await ask(pilot, f"echo {evil}")
        prompt = screen(pilot).query_one(PromptInput)
        for keys in (("alt+e",), ("escape", "up")):
            await pilot.press(*keys)
            await until(pilot, lambda: "RED" in prompt.text)
            assert not set("\x1b\x07\u202e\x9b") & set(prompt.text), keys
        prompt.begin(evil)
        prompt.put_back(evil)
        assert "\x1b" not in prompt.text


@pytest.mark.anyio
async def test_a_command_after_a_choice_by_digit_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat(sampling={"n": 3}) as pilot:
        pane = screen(pilot).chat_pane
        await ask(pilot, "several")
        await pilot.press("2")
        await until(pilot, lambda: "sample2" in pane.conversation.turns[0].answer.text)
        await pilot.press(*"/n 1", "enter")
        await until(pilot, lambda: pilot.app.settings.num_candidates == 1)  # type: ignore[attr-defined]
        assert len(pane.conversation.turns) == 1
        assert pane.conversation.turns[0].answer.text.startswith("sample2"), "the choice stays"
        # Text that comes later than a second after the digit leaves the choice alone, too.
        await say(pilot, "/n 3")
        await ask(pilot, "several again")
        await pilot.press("3")
        await until(pilot, lambda: "sample3" in pane.conversation.turns[1].answer.text)
        await until(pilot, lambda: pane.prompt.num_picks == 0)
        later = time.monotonic() + 60
        monkeypatch.setattr(prompt_module, "time", SimpleNamespace(monotonic=lambda: later))
        await pilot.press("space", *"more")
        assert pane.prompt.text == " more"
        assert "sample3" in pane.conversation.turns[1].answer.text
        assert "undo" not in " ".join(notes(pilot)) + seen(pilot).replace("Alt+U undoes", "")


@pytest.mark.anyio
@pytest.mark.parametrize(("key", "shown"), [("f11", "F11, Alt+Q"), ("f12", "F12")])
async def test_the_notice_before_quitting_names_the_key_that_is_bound(key: str, shown: str) -> None:
    async with chat(keymap={"quit": "f12", "interrupt": ["f11", "alt+q"]}) as pilot:
        await pilot.press("x", key)
        words = f"press {shown} again to quit"
        await until(pilot, lambda: is_told(pilot, words))
        assert pilot.app.return_code is None
        await pilot.press(key)
        await until(pilot, lambda: pilot.app.return_code == 0)


@pytest.mark.anyio
async def test_control_q_asks_during_an_answer_and_with_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(quitting, "time", SimpleNamespace(monotonic=lambda: now))
    store = SessionStore(tmp_path)
    async with chat(store=store) as pilot:

        def told() -> str:
            return [each.message for each in pilot.app._notifications][-1]

        await pilot.press(*"draft", "ctrl+q")
        await until(pilot, lambda: told() == "your text is not sent: press Ctrl+Q again to quit")
        now += 3
        await pilot.press("ctrl+q")  # too late: it asks again
        await pilot.press("ctrl+u")
        await say(pilot, "never")
        await until(pilot, lambda: screen(pilot).chat_pane.run is not None)
        now += 3
        await pilot.press("ctrl+q")  # at once, before the first word
        await until(pilot, lambda: told() == "an answer is being generated: press Ctrl+Q again to quit")
        assert pilot.app.return_code is None
        assert screen(pilot).chat_pane.run is not None, "the answer goes on"
        await pilot.press(*"a draft", "ctrl+q")
        await until(pilot, lambda: pilot.app.return_code == 0)
    async with chat(store=store) as pilot:
        prompt = screen(pilot).chat_pane.prompt
        await until(pilot, lambda: any("your unsent text" in note for note in notes(pilot)))
        assert prompt.text == ""
        await pilot.press("up")
        assert prompt.text == "a draft"
        await pilot.press("ctrl+a", "x")
        assert prompt.text == "xa draft", "the start of the line, as in a shell"
        await pilot.press("enter")
        await until(pilot, lambda: screen(pilot).chat_pane.run is None)
        await pilot.press("up", "ctrl+q")
        await until(pilot, lambda: pilot.app.return_code == 0)
    assert store.take_draft() == "", "it was sent"


@pytest.mark.anyio
@pytest.mark.parametrize("keys", [["ctrl+c", "ctrl+q"], ["ctrl+q", "ctrl+c"], [*"/quit", "enter"]])
async def test_two_keys_that_quit_or_the_command_end_the_chat(keys: list[str]) -> None:
    async with chat() as pilot:
        if keys[0] == "/":
            await say(pilot, "endless")
            await until(pilot, lambda: "word word" in seen(pilot))
        else:
            await pilot.press(*"a draft")
        await pilot.press(*keys)
        await until(pilot, lambda: pilot.app.return_code == 0)


@pytest.mark.anyio
@pytest.mark.parametrize("keys", ["", "alt+e"])
async def test_control_q_quits_at_once_where_nothing_would_be_lost(keys: str) -> None:
    resumed = Conversation()
    resumed.ask("a question\x1b[31m of old").finish_reason = "stop"
    async with chat() as pilot:
        await screen(pilot).chat_pane.open_conversation(resumed)
        await until(pilot, lambda: "of old" in seen(pilot))
        if keys:
            await pilot.press(keys)
            await until(pilot, lambda: screen(pilot).chat_pane.prompt.text != "")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: pilot.app.return_code == 0)


def test_a_signal_keeps_the_draft(tmp_path: Path) -> None:
    with session(environment={"MINILLM_DATA": str(tmp_path)}) as running:
        running.wait_for("ready in")
        running.type("my draft")
        running.wait_for("my draft")
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 143
    assert SessionStore(tmp_path / "conversations").take_draft() == "my draft"


def test_suspension_the_editor_and_sigquit(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf ' of the editor' >> $1\n")
    editor.chmod(0o755)
    with session(environment={"EDITOR": str(editor), "VISUAL": "", "PYTHONIOENCODING": "ascii"}) as running:
        running.wait_for("ready in")
        assert "╭" in running.output.decode(), "frames, whatever Python's encoding is"
        running.type("text")
        running.wait_for("text")
        running.type("\x1bx")
        running.wait_for("of the editor")
        running.type("\x1a")
        running.wait_for("to return to")
        running.type("!")
        running.wait_for("!")
        running.process.send_signal(signal.SIGQUIT)
        assert running.end() == 131
        assert running.modes_left_on() == []


def test_control_z_goes_back_to_the_shell() -> None:
    shell = ("sh", "-mc", '"$@"; echo st""opped; fg; echo en""ded', "sh", *CHAT)
    with session(shell) as running:
        running.wait_for("ready in")
        running.type("\x1a")
        running.wait_for("stopped")
        running.wait_for("ready")
        running.type("again")
        running.wait_for("again")
        running.type("\x11")
        running.wait_for("again to quit")
        running.type("\x11")
        running.wait_for("ended")
        assert running.end() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("opens", [(), ("ctrl+f",), ("f3",), ("f4",)])
async def test_keys_that_arrive_together_are_handled_in_their_order(opens: tuple[str, ...]) -> None:
    async with chat() as pilot:
        for key in opens:
            await pilot.press(key)
        field = pilot.app.focused
        assert isinstance(field, TextArea | Input)
        keys = [*"abx", "backspace", *"cd", "left", *"y", "backspace", *"e", "home", *"z", "end", *"w"]
        for key in keys:
            pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await settled(pilot)
        assert (field.text if isinstance(field, TextArea) else field.value) == "zabcedw"


@pytest.mark.anyio
async def test_joiners_and_space_in_an_empty_prompt() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        prompt = screen(pilot).chat_pane.prompt
        family = "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
        for character in family:
            pilot.app.post_message(events.Key("x", character))
        await until(pilot, lambda: prompt.text == family)
        await pilot.press("enter")
        await until(pilot, lambda: prompt.num_picks == 3 and screen(pilot).chat_pane.run is None)
        assert screen(pilot).chat_pane.conversation.turns[0].question == family
        await pilot.press("space")
        await until(pilot, lambda: isinstance(pilot.app.screen.maximized, CandidateCard))
        assert "Enter accepts" in seen(pilot)
        assert prompt.text == ""


class _Full(SessionStore):
    def save(self, conversation: Conversation) -> bool:
        raise MinillmError("the conversation cannot be saved: No space left on device")


@pytest.mark.anyio
async def test_an_end_that_is_not_saved_is_told(tmp_path: Path) -> None:
    async with chat(store=_Full(tmp_path)) as pilot:
        await ask(pilot, "echo one")
        await pilot.press("ctrl+q")
    assert isinstance(pilot.app, ChatApp)
    assert "No space left" in str(pilot.app.unsaved)
