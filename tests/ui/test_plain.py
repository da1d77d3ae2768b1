"""``minillm chat --plain``: questions from a pipe, answers on standard output."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lib.models import write_sentencepiece_model
from lib.terminal import session
from minillm.llm import LLM
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.plain import PlainChat
from minillm.ui.settings import Settings

Plain = Callable[..., subprocess.Popen[bytes]]


def started(command: Sequence[str], model: Path | str, directory: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MINILLM_DATA": str(directory), "MINILLM_CONFIG": str(directory)}
    return subprocess.Popen(
        [*command, "chat", "--model", str(model), "--device", "cpu", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip


@pytest.fixture
def plain(minillm_command: tuple[str, ...]) -> Plain:
    """Return a function that starts a chat: of a model, with its files in a directory."""
    return partial(started, minillm_command)


@pytest.mark.weights
def test_questions_from_a_pipe_are_answered(plain: Plain, tmp_path: Path) -> None:
    process = plain("smollm2-135m", tmp_path, "--temperature", "0", "--max-tokens", "24")
    out, errors = process.communicate(b"What is the capital of France?\n\n/set temperature x\n/new\n", 120)
    assert process.returncode == 0
    assert b"Paris" in out
    assert b"temperature" in errors
    assert b"Traceback" not in errors
    assert len(SessionStore(tmp_path / "conversations").list()) == 1


def test_ctrl_c_stops_an_answer_and_not_the_chat(plain: Plain, of_long_answers: Path, tmp_path: Path) -> None:
    process = plain(of_long_answers, tmp_path, "--plain", "--max-tokens", "16000", "--temperature", "0", "--ignore-eos")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(b"/quit\n", 60)
    assert first
    assert process.returncode == 0, errors
    assert b"stopped" in errors


def test_a_question_of_the_command_line_is_asked_first(plain: Plain, tiny_model: Path, tmp_path: Path) -> None:
    process = plain(tiny_model, tmp_path, "the first", "--plain", "--max-tokens", "3")
    _, errors = process.communicate(b"the second\n", 60)
    assert process.returncode == 0, errors
    store = SessionStore(tmp_path / "conversations")
    assert [turn.question for turn in store.load(store.latest()).turns] == ["the first", "the second"]


def test_piped_text_belongs_to_the_question_of_the_command_line(plain: Plain, tiny_model: Path, tmp_path: Path) -> None:
    store, earlier = SessionStore(tmp_path / "conversations"), Conversation()
    earlier.ask("earlier").finish_reason = "stop"
    store.save(earlier)
    for options in (["--resume"], []):
        process = plain(tiny_model, tmp_path, "sum this up:", "--max-tokens", "3", *options)
        _, errors = process.communicate(b"one line\n/quit\n\nanother\n", 60)
        assert process.returncode == 0, errors
    [saved] = store.list()  # the second is one question and its answer: no conversation to go on with
    _, turn = store.load(saved.path).turns
    assert turn.question == "sum this up:\n\none line\n/quit\n\nanother"


@pytest.mark.parametrize(("options", "system"), [((), "be brief"), (("--system", "be verbose"), "be verbose")])
def test_a_resumed_conversation_keeps_its_system_prompt(
    plain: Plain, tiny_model: Path, tmp_path: Path, options: tuple[str, ...], system: str
) -> None:
    store, earlier = SessionStore(tmp_path / "conversations"), Conversation(system="be brief")
    earlier.ask("earlier").finish_reason = "stop"
    store.save(earlier)
    process = plain(tiny_model, tmp_path, "--plain", "--resume", "--max-tokens", "3", *options)
    _, errors = process.communicate(b"hello\n", 60)
    assert process.returncode == 0, errors
    assert store.load(store.latest()).system == system


def test_a_chat_line_by_line_needs_no_textual(tiny_model: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['textual'] = None; from minillm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "MINILLM_DATA": str(tmp_path), "MINILLM_CONFIG": str(tmp_path)}

    options = ("--plain", "--model", str(tiny_model), "--device", "cpu", "--max-tokens", "3", "--ignore-eos")
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", *options],
        input="hello\n", capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 1
    store = SessionStore(tmp_path / "conversations")
    assert [turn.question for turn in store.load(store.latest()).turns] == ["hello"]


class Dialogue:
    """A chat in this process, and its output."""

    def __init__(self, model: Path, directory: Path, **sampling: object) -> None:
        self.output, self.notes = io.StringIO(), io.StringIO()
        llm = LLM(str(model), device="cpu", num_blocks=120)
        settings = Settings(str(model), sampling={"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
        self.chat = PlainChat(llm, settings, SessionStore(directory), self.output, self.notes)


def test_the_last_setting_of_think_holds(tiny_model: Path, tmp_path: Path) -> None:
    chat = Dialogue(tiny_model, tmp_path).chat
    template = "{{ messages[0].content }}{% if enable_thinking is false %} no thought{% endif %}"
    chat.llm = LLM(str(tiny_model), device="cpu", num_blocks=120, chat_template=template)
    for thinks in (None, True, False):
        chat.settings, chat.conversation = replace(chat.settings, thinks=thinks), Conversation()
        assert chat.handle("hi")
        assert ("no thought" in chat.llm.tokenizer.decode(chat._prompt())) == (thinks is False)


def test_a_limit_of_reasoning_for_another_model_has_no_effect(tiny_model: Path, tmp_path: Path) -> None:
    """`/think 512` in the app is saved for all models."""
    dialogue = Dialogue(tiny_model, tmp_path, max_reasoning_tokens=512)
    model = write_sentencepiece_model(tmp_path)
    dialogue.chat.llm = LLM(str(model), device="cpu", num_blocks=120, chat_template="{{ messages[0].content }}")
    assert dialogue.chat.handle("hello")
    assert dialogue.notes.getvalue() == ""
    assert dialogue.output.getvalue()


def test_candidates_are_numbered_and_accepted(tiny_model: Path, tmp_path: Path) -> None:
    dialogue = Dialogue(tiny_model, tmp_path, n=2, temperature=1.0, seed=1)
    assert dialogue.chat.handle("hello")
    assert "1) " in dialogue.output.getvalue()
    assert "2) " in dialogue.output.getvalue()
    leaf = dialogue.chat.conversation.leaf
    assert leaf is not None
    second = leaf.answer.candidates[1].text
    for number in ("3", "²", 5000 * "1"):
        assert dialogue.chat.handle(f"/accept {number}")
    assert dialogue.notes.getvalue().count("/accept takes a number from 1 to 2") == 3
    assert dialogue.chat.handle("/accept 2")
    assert leaf.answer.text == second
    assert dialogue.chat.handle("/tour")
    assert "there is no /tour here" in dialogue.notes.getvalue()
    for command, count in (("/n 3", 3), ("/beams 2", 2), ("/n 1", 1)):
        assert dialogue.chat.handle(command)
        assert dialogue.chat.settings.num_candidates == count, command
    assert dialogue.chat.handle("/regenerate")
    again = dialogue.chat.conversation.leaf
    assert again is not None
    assert (again.question, again.parent) == (leaf.question, leaf.parent)
    assert again is not leaf
    assert not dialogue.chat.handle("/quit")


def test_commands_and_the_end_of_the_context(tiny_model: Path, tmp_path: Path) -> None:
    dialogue = Dialogue(tiny_model, tmp_path)
    chat = dialogue.chat
    chat.handle("/system be brief")
    assert chat.settings.system == "be brief"
    for number in range(12):
        assert chat.handle(f"{number} " + "word " * 12)
    assert "the context is full" in dialogue.notes.getvalue()
    assert len(chat.conversation.turns) == 12
    chat.handle(f"/export {tmp_path}/conversation.md")
    assert (tmp_path / "conversation.md").exists()
    chat.handle("/new")
    assert not chat.conversation.turns
    chat.handle("//slash")
    assert chat.conversation.turns[0].question == "//slash"
    chat.handle("long " * 3000)
    assert "context holds" in dialogue.notes.getvalue()
    assert len(chat.conversation.turns) == 1, "the question that does not fit is taken back"
    assert "\x1b" not in dialogue.output.getvalue()


def test_control_c_just_after_an_answer_ends_nothing(
    minillm_command: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    command = [*minillm_command, "chat", "--plain", "--model", str(tiny_model), "--device", "cpu"]
    with session([*command, "--max-tokens", "3"], environment={"MINILLM_DATA": str(tmp_path)}) as running:
        running.wait_for("> ", 60)
        running.type("\x03")
        running.wait_for("press ctrl-c again to quit")
        running.wait_for("> ")
        running.type("hello\n")
        running.wait_for("\n\r\n> ")
        running.type("\x03")
        running.wait_for("press ctrl-c again to quit")
        running.type("\x03")
        assert running.end() == 130
    store = SessionStore(tmp_path / "conversations")
    assert [turn.question for turn in store.load(store.latest()).turns] == ["hello"]


@pytest.mark.parametrize("typed", ["\x04", "second\n\x04", "second\n\n\x04\x11"])
def test_an_end_of_input_during_an_answer_ends_the_chat(
    minillm_command: tuple[str, ...], of_long_answers: Path, tmp_path: Path, typed: str
) -> None:
    command = [*minillm_command, "chat", "--model", str(of_long_answers), "--device", "cpu"]
    options = ["--plain", "--max-tokens", "200", "--temperature", "0", "--ignore-eos"]
    with session([*command, *options], environment={"MINILLM_DATA": str(tmp_path), "TERM": "dumb"}) as running:
        running.wait_for("> ", 60)
        running.type("first\n")
        running.wait_for("first\r\n")
        running.read(0.1)  # the answer begins
        running.type(typed)
        assert running.end() == 0
        assert running.modes_left_on() == []
    store = SessionStore(tmp_path / "conversations")
    questions = [turn.question for turn in store.load(store.latest()).turns]
    assert questions == ["first", "second"] if "second" in typed else ["first"]


def test_an_end_that_is_not_saved_is_an_exit_code(plain: Plain, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "conversations").write_text("a file in the directory's place")
    process = plain(tiny_model, tmp_path, "--plain", "--max-tokens", "3")
    _, errors = process.communicate(b"hello\n", 60)
    assert process.returncode == 1
    assert f"the conversation cannot be saved in {tmp_path / 'conversations'}: File exists\n".encode() in errors


def test_a_last_line_that_fails_is_an_exit_code(plain: Plain, tiny_model: Path, tmp_path: Path) -> None:
    process = plain(tiny_model, tmp_path, "1 a " * 500, "--max-tokens", "3")
    out, errors = process.communicate(b"", 60)
    assert (process.returncode, out) == (1, b""), errors
    assert b"the prompt has" in errors
