"""Test the engine's process: exit codes, and messages to the app."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import NoReturn

import pytest

from minillm.engine.engine import Engine
from minillm.parallel.channel import RankDied
from minillm.progress import Progress
from minillm.service import __main__ as process
from minillm.service import call_messages
from minillm.service.__main__ import Inbox
from minillm.service.client import CommandClient
from minillm.service.messages import (
    Abort,
    Command,
    Drop,
    Generate,
    Load,
    LoadFailed,
    Loading,
    Message,
    Notice,
    decode_event,
    encode,
)
from minillm.service.process import EngineProcess
from minillm.system import start_connected

STARTING = [Loading(Progress("starting", 0, None, ""))]


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


def test_an_engine_that_cannot_compute_ends_its_process(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as after the end of another rank: each step would fail at once, for ever."""
    steps = []

    def fail(engine: Engine) -> NoReturn:
        steps.append(engine)
        if len(steps) > 3:
            pytest.fail("it goes on")
        raise RankDied("rank 1 of 2 is gone")

    monkeypatch.setattr(Engine, "step", fail)
    load = Load(str(tiny_model), {"device": "cpu", "num_blocks": 16})
    code, _ = served(load, Generate("r", "c", [{"role": "user", "content": "hello"}]))
    assert code == 1
    assert capfd.readouterr().err == "step failed: RankDied: rank 1 of 2 is gone\n"


def test_the_exit_code_reaches_the_app_while_it_could_still_send() -> None:
    # A real process: the exit code of a fork would be lost.
    connection, running = start_connected((sys.executable, "-P", "-m", "minillm.service"))
    with connection, connection.makefile("rb") as events:
        connection.sendall(encode(Load("/nowhere", {"device": "cpu"})))
        [first, *_, failed] = map(decode_event, events.readlines())
        assert first == Loading(Progress("starting", 0, None, ""))
        assert isinstance(failed, LoadFailed)
        assert running.wait() == failed.exit_code == 2


SCRIPTED = """
import sys, time
from minillm.service import __main__ as process
from minillm.service import call_messages
from minillm.service.messages import Notice

def serve(inbox, send, is_app):
    {}

process.serve = serve
sys.exit(process.main())
"""


def scripted(body: str) -> list[str]:
    """Return the command of an engine process that only runs ``body``, which may call ``send``."""
    return [sys.executable, "-c", SCRIPTED.format(body)]


def test_a_stray_print_does_not_reach_the_app() -> None:
    command = scripted("print('a stray line', flush=True); send(Notice('an event')); return 3")
    connection, running = start_connected(command, log=subprocess.PIPE)
    with connection, connection.makefile("rb") as events, running:
        assert [decode_event(line) for line in events] == [*STARTING, Notice("an event")]
        assert running.stdout is not None
        assert running.stdout.read() == b"a stray line\n"
    assert running.returncode == 3


def test_an_app_that_is_busy_does_not_stop_the_engine() -> None:
    connection, running = start_connected(scripted("[send(Notice('an event')) for _ in range(400)]; return 0"))
    with connection:
        assert running.wait(60) == 0, "although no event was read"


def test_the_engine_ends_with_a_front_end_that_was_killed() -> None:
    """Here it leaves events unread, and the engine is loading a model."""
    code = "import sys, time; from minillm.system import start_connected\n"
    code += "started = start_connected(sys.argv[1:]); time.sleep(600)"
    engine = scripted("print('loading', flush=True); time.sleep(20); print('still running')")
    with subprocess.Popen([sys.executable, "-c", code, *engine], stderr=subprocess.PIPE) as front_end:
        assert front_end.stderr is not None
        assert front_end.stderr.readline() == b"loading\n"
        front_end.kill()
        assert front_end.stderr.read() == b"", "the end of both processes"


def test_a_message_that_was_cut_off_ends_the_calls() -> None:
    """A server that is killed may leave the beginning of a message."""
    data = call_messages.encode(call_messages.Ping("a"))
    for size in range(len(data)):
        assert [*process._frames(BytesIO(data + data[:size]))] == [call_messages.Ping("a")]


@pytest.mark.anyio
async def test_an_event_that_cannot_be_handled_does_not_end_the_engine() -> None:
    taken, over, errors = bytearray(), asyncio.Event(), []

    class Failing(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            taken.extend(data)
            raise ValueError("a defect")

        def connection_lost(self, exc: Exception | None) -> None:
            over.set()

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    process = EngineProcess(scripted("assert inbox.first(); send(Notice('an event')); return 3"))
    await process.connect(Failing())
    while not taken:
        await asyncio.sleep(0.01)
    process.write(encode(Drop("a")))
    await over.wait()
    assert bytes(taken) == b"".join(map(encode, [*STARTING, Notice("an event")]))
    assert await process.wait() == 3
    assert {*map(str, errors)} == {"a defect"}


@pytest.mark.anyio
async def test_the_last_events_are_read_after_a_write_has_failed() -> None:
    client = CommandClient(scripted("send(Notice('an event')); return 3"))
    await client.connect()
    while client.process._process.poll() is None:
        time.sleep(0.01)  # not asyncio's: the app is busy
    client.send(Drop("a"))
    assert [event async for event in client.events()] == [*STARTING, Notice("an event")]


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
