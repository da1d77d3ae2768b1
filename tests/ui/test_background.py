"""The question for the terminal's background, on a pseudo-terminal that answers as some terminals do."""

from __future__ import annotations

import sys
import time

import pytest

from lib.terminal import Session, session
from minillm.ui.terminal import LateAnswers, background_of


def waiting(seconds: float, program: str) -> tuple[str, str, str]:
    """Return a program that gives the terminal ``seconds`` to answer."""
    return sys.executable, "-c", f"from minillm.ui import terminal\nterminal._LONGEST_WAIT = {seconds}\n{program}"


ASK = (
    "print('begun')\n"
    "with terminal.asking_background() as answer: pass\n"
    "print('said', repr(answer.background), answer.typed)"
)
QUESTION = "\x1b]11;?\x1b\\\x1b[c"
OPTIONS = ("chat", "--model", "/nowhere/at-all")
CHAT = (sys.executable, "-m", "minillm", *OPTIONS)
PATIENT_CHAT = (*waiting(60, "from minillm.cli.main import main\nraise SystemExit(main())"), *OPTIONS)
QUIET = {"COLORFGBG": "", "COLORTERM": "truecolor"}
LIGHT_GROUND, DARK_GROUND = b"48;2;252;251;248", b"48;2;17;21;26"


def asked(answer: str) -> Session:
    """The program after the terminal has said ``answer`` to its question."""
    is_whole = answer.endswith("c")  # otherwise the program waits for the rest
    with session(waiting(60 if is_whole else 3, ASK)) as running:
        running.wait_for("begun")
        running.wait_for(QUESTION)
        running.type(answer)
        running.wait_for("said")
        assert running.end() == 0
        assert running.modes_left_on() == []
        return running


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("\x1b]11;rgb:ffff/ffff/dddd\x1b\\\x1b[?62;c", b"said 'light' b''"),
        ("\x1b]11;rgb:1a/1b/26\x07\x1b[?1;2c", b"said 'dark' b''"),
        ("\x1b[?6c", b"said '' b''"),  # a terminal that knows no OSC 11
        ("ab\x1b]11;rgba:f/f/f/f\x1b\\c\x1b[?6c", b"said 'light' b'abc'"),  # with keys before and between
        ("\x1b]11;red\x1b\\\x1b[?6c", b"said '' b''"),
        ("typed\r", b"said '' b'typed\\r'"),  # and no answer at all
    ],
)
def test_what_the_terminal_says_and_what_is_typed_meanwhile(answer: str, said: bytes) -> None:
    output = asked(answer).output
    assert said in output, output
    assert b"rgb" not in output, "nothing is echoed"


def test_nothing_is_asked_where_keys_wait() -> None:
    with session(waiting(60, ASK), typed_before="early") as running:
        running.wait_for("said '' b''")
        assert running.end() == 0
        assert QUESTION.encode() not in running.output


@pytest.mark.parametrize("kind", ["dumb", "linux", ""])
def test_nothing_is_asked_of_terminals_that_would_print_it(kind: str) -> None:
    with session(waiting(60, ASK), environment={"TERM": kind}) as running:
        running.wait_for("said '' b''")
        assert b"\x1b" not in running.output


def test_nothing_is_asked_of_a_pipe() -> None:
    program = waiting(60, ASK)[2].replace("'", '"')
    with session(("sh", "-c", f"true | {sys.executable} -c '{program}' | cat")) as running:
        running.wait_for("said")
        assert b"\x1b" not in running.output


@pytest.mark.parametrize(("color", "ground"), [("ffff/ffff/ffff", LIGHT_GROUND), ("0000/0000/0000", DARK_GROUND)])
def test_the_chat_takes_the_terminals_ground_and_the_keys_typed_meanwhile(color: str, ground: bytes) -> None:
    with session(PATIENT_CHAT, environment=QUIET) as running:
        running.wait_for(QUESTION)
        running.type(f"early \x1b]11;rgb:{color}\x1b\\words\x1b[?62c")
        running.wait_for("early words")
        assert ground in running.output
        running.quit()
        assert running.end() == 0
        assert running.modes_left_on() == []


@pytest.mark.parametrize("how", ["config", "environment"])
def test_the_chat_asks_nothing_that_it_was_told(how: str) -> None:
    told = (CHAT, {**QUIET, "COLORFGBG": "0;15"}) if how == "environment" else ((*CHAT, "--theme", "light"), QUIET)
    with session(told[0], environment=told[1]) as running:
        running.wait_for("Ask something")
        assert LIGHT_GROUND in running.output
        assert QUESTION.encode() not in running.output
        running.quit()
        assert running.end() == 0


def type_in_parts(running: Session, *parts: str) -> float:
    """Type each soon after the one before it; returns the longest time between two, in seconds."""
    longest, before = 0.0, time.monotonic()
    for part in parts:
        began = time.monotonic()
        running.type(part)
        longest, before = max(longest, time.monotonic() - before), began
        time.sleep(0.02)
    return longest


def test_an_answer_that_comes_late_is_no_key() -> None:
    for _ in range(20):
        with session(CHAT, environment=QUIET) as running:
            running.wait_for("Ask something")
            longest = type_in_parts(running, "\x1b]11;rgb:ffff/", "ffff/ffff\x1b\\", "\x1b[?62;1", ";2c", "typed")
            if longest > 0.07:  # behind a tenth of a second, a part that is begun was typed
                continue
            running.wait_for("typed")
            running.read(0.5)
            assert b"rgb" not in running.output
            assert b"62;1" not in running.output
            running.quit()
            assert running.end() == 0
            return
    raise AssertionError("the parts of the answer came too far apart, each time")


def test_late_answers_in_every_cut() -> None:
    said = b"a\x1b]11;rgb:ffff/ffff/ffff\x1b\\b\x1b[?62;22cd\x1b[A"
    whole = b"abd\x1b[A"
    for cut in range(len(said)):
        if said[cut - 1 : cut] != b"\x1b":  # Escape itself must not wait
            answers = LateAnswers()
            assert answers.without(said[:cut]) + answers.without(said[cut:]) == whole, cut
    answers = LateAnswers()
    assert answers.without(b"\x1b]1") == b""
    assert answers.without(b"") == b"\x1b]1", "it was typed"


def test_background_by_its_color() -> None:
    assert background_of(b"\x1b]11;rgb:8080/8080/8080\x07") == "light"
    assert background_of(b"\x1b]11;rgb:0000/0000/ffff\x07") == "dark"
    assert background_of(b"\x1b[?6c") == ""
