"""Test the engine's process: exit codes, and messages to the app."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minillm.progress import Progress
from minillm.service import __main__ as process
from minillm.service.__main__ import Inbox
from minillm.service.messages import (
    Abort,
    Command,
    Drop,
    Load,
    LoadFailed,
    Loading,
    Message,
    Notice,
    decode_event,
    encode,
)


def served(*sent: Command | None) -> tuple[int, list[Message]]:
    """Return the exit code and the events."""
    inbox = Inbox()
    for command in sent:
        inbox.put(command)
    events: list[Message] = []
    return process.serve(inbox, events.append), events


def test_an_app_that_loads_nothing_is_no_failure() -> None:
    assert served(None) == served(Abort("a")) == (0, [])


def test_an_error_of_the_load_is_one_line_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_load", lambda *_, is_app: 1 / 0)
    code, [failed] = served(Load("m"))
    assert failed == LoadFailed("ZeroDivisionError: division by zero", 1)
    assert code == 1


def test_the_exit_code_reaches_the_app_while_it_could_still_send() -> None:
    command = [sys.executable, "-m", "minillm.service"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(encode(Load("/nowhere", {"device": "cpu"})))
        running.stdin.flush()
        [first, *_, failed] = map(decode_event, running.stdout.readlines())
        assert first == Loading(Progress("starting", 0, None, ""))
        assert isinstance(failed, LoadFailed)
        assert running.wait() == failed.exit_code == 2


def test_a_stray_print_does_not_reach_the_app() -> None:
    code = """
from minillm.service import __main__ as process
from minillm.service.messages import Notice

def serve(inbox, send, is_app):
    print("a stray line", flush=True)
    send(Notice("an event"))
    return 3

process.serve = serve
raise SystemExit(process.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert [decode_event(line) for line in done.stdout.splitlines()] == [Notice("an event")]
    assert b"a stray line" in done.stderr
    assert done.returncode == 3


def test_calls_that_come_while_the_model_is_loaded_are_carried_out_first() -> None:
    inbox = Inbox()
    calls = [Load("m"), Drop("a"), Drop("b"), Drop("c"), None]
    for call in calls[:3]:
        inbox.put(call)
    assert inbox.first() == Load("m")
    taken: list[Message | None] = []
    inbox.pass_on(taken.append)
    for call in calls[3:]:
        inbox.put(call)
    assert taken == calls[1:]
