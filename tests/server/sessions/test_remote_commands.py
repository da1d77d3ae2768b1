"""Test the commands of `chat --server` without a process: retries, and the number of connections."""

from __future__ import annotations

import http.client
import http.server
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.errors import MinillmError
from minillm.server.sessions import remote
from minillm.server.sessions.remote import Address, App, Commands
from minillm.service.messages import (
    Abort,
    Command,
    Drop,
    Event,
    Forget,
    Generate,
    Inspect,
    RequestFailed,
    decode_command,
    decode_event,
    encode,
)


class Script:
    """A server that notes the commands that it gets; ``is_busy`` says which it takes at another time only."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.ports: set[int] = set()  # of clients
        self.is_busy: Callable[[Command], bool] = lambda command: False


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            command = decode_command(self.rfile.read(int(self.headers["content-length"])))
            script.commands.append(command)
            script.ports.add(self.client_address[1])
            self.send_response(429 if script.is_busy(command) else 200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(remote, "_pause", lambda retry_after: 0.02)
    monkeypatch.setattr(remote, "os", SimpleNamespace(_exit=leave, environ=os.environ))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        script.address = Address.parse(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
        yield script
        server.shutdown()


def carried_out(script: Any, *sent: Command) -> list[Event]:
    """Carry out commands until their end; return the events for the app."""
    stream = io.BytesIO()
    commands = Commands(script.address, "s1", App(stream))
    commands.read(io.BytesIO(b"".join(map(encode, sent))))
    with pytest.raises(SystemExit):
        commands.run()
    return [decode_event(line) for line in stream.getvalue().splitlines()]


def question(name: str) -> Generate:
    return Generate(name, f"conversation of {name}", [{"role": "user", "content": "a"}])


def test_commands_share_a_connection(script: Script) -> None:
    assert carried_out(script, *map(Inspect, range(5))) == []
    assert script.commands == [Inspect(number) for number in range(5)]
    assert len(script.ports) == 1


@pytest.mark.parametrize(
    "last", [Abort("a"), Drop("a"), Forget("conversation of a"), Drop("c"), Forget("another")], ids=str
)
def test_a_question_that_waits_is_asked_again_unless_it_is_not_wanted(script: Any, last: Command) -> None:
    """The next question waits as well. Once it is asked again, the first would have been."""
    num_asked = 0
    stream = io.BytesIO()
    commands = Commands(script.address, "s1", App(stream))

    def is_busy(command: Command) -> bool:
        nonlocal num_asked
        if not isinstance(command, Generate):
            return False
        num_asked += command.request_id == "b"
        if num_asked == 2:
            commands.read(io.BytesIO())  # the end
        return num_asked < 2

    script.is_busy = is_busy
    for command in (question("a"), last, question("b")):
        commands._lines.put(encode(command))
    with pytest.raises(SystemExit):
        commands.run()
    names = [command.request_id for command in script.commands if isinstance(command, Generate)]
    is_wanted = last in (Drop("c"), Forget("another"))
    assert names == (["a", "b", "a", "b"] if is_wanted else ["a", "b", "b"])
    failed = [decode_event(line) for line in stream.getvalue().splitlines()]
    if isinstance(last, Abort):
        assert [event.request_id for event in failed if isinstance(event, RequestFailed)] == ["a"]
        assert last not in script.commands, "the server knows no such question"
    else:
        assert failed == []


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("0", 1),
        ("1", 1),
        ("7", 7),
        ("60", 60),
        ("61", 60),
        ("9" * 5_000, 60),
        ("", 1),
        ("soon", 1),
        ("-5", 1),
        ("²", 1),
    ],
)
def test_a_busy_server_says_when_to_come_again(given: str, seconds: int) -> None:
    assert remote._pause(given) == seconds


def test_the_reason_of_a_refusal_is_one_short_line() -> None:
    for said, shown in ((b"no\x1b[2J\nseat", "no␛[2J seat"), (b"x" * 1_000, "x" * 300)):
        body = json.dumps({"error": {"message": said.decode()}}).encode()
        response: Any = SimpleNamespace(read=lambda most, body=body: body, status=429, reason="Busy")
        reason = remote._reason(response)
        assert reason.startswith(shown[:290])
        assert len(reason) <= 300
    for body in (b"", b"[]", b'{"error": 5}', b"[" * 100_000):
        response = SimpleNamespace(read=lambda most, body=body: body, status=429, reason="Bu\nsy")
        assert remote._reason(response) == "429 Bu sy"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(111, "Connection refused"), "Connection refused"),
        (OSError("no route"), "no route"),
        (http.client.BadStatusLine("HELLO"), "HELLO"),
        (http.client.IncompleteRead(b""), "IncompleteRead"),
        (http.client.CannotSendRequest(), "CannotSendRequest"),
        (TimeoutError("timed\nout"), "timed"),
    ],
    ids=repr,
)
def test_an_error_says_why_no_server_answers(error: Exception, why: str) -> None:
    def request(*_: object) -> None:
        raise error

    connection: Any = SimpleNamespace(request=request)
    with pytest.raises(MinillmError, match=f"no server answers at http://x:1: .*{why}") as caught:
        Address.parse("http://x:1").ask(connection, "GET", "/")
    assert "\n" not in str(caught.value)


def test_a_server_with_keys_names_the_variable_to_set() -> None:
    response = SimpleNamespace(status=401, headers={}, read=lambda most: b'{"error": {"message": "send a header"}}')
    connection: Any = SimpleNamespace(request=lambda *_: None, getresponse=lambda: response)
    with pytest.raises(MinillmError, match="the server at http://x:1 requires an API key: set MINILLM_API_KEY"):
        Address.parse("http://x:1").ask(connection, "GET", "/")
