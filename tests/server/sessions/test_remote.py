"""The chat's messages over HTTP: several apps and clients on one engine and one pool."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from lib.server import Server, served
from minillm.errors import UsageError
from minillm.server.sessions.remote import Address
from minillm.service import messages as chat
from minillm.system import start_connected


@dataclass
class App:
    """The app's end of the bridge."""

    connection: socket.socket
    process: subprocess.Popen[bytes]
    events: list[chat.Event] = field(default_factory=list)

    def send(self, command: chat.Command) -> None:
        self.connection.sendall(chat.encode(command))

    def wait_for(self, kind: type, count: int = 1) -> list[chat.Event]:
        deadline = time.monotonic() + 60
        while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
            assert time.monotonic() < deadline, [type(event).__name__ for event in self.events]
            time.sleep(0.01)
        return found

    def owners(self) -> set[str]:
        """The owners of all tables that this app has seen."""
        pictures = [event for event in self.events if isinstance(event, chat.CacheChanged)]
        return {table.owner for picture in pictures for table in picture.tables}


@contextmanager
def bridge(url: str) -> Iterator[App]:
    command = [sys.executable, "-m", "minillm.server.sessions.remote", url]
    connection, process = start_connected(command, log=subprocess.PIPE)
    app = App(connection, process)

    def read() -> None:
        with suppress(ConnectionResetError):
            for line in connection.makefile("rb"):
                app.events.append(chat.decode_event(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    app.send(chat.Load("", {}))
    try:
        yield app
    finally:
        connection.shutdown(socket.SHUT_RDWR)
        process.wait(60)
        reader.join(5)


@pytest.fixture(scope="module")
def narrow(of_long_answers: Path) -> Iterator[Server]:
    """A server with two slots, and two places before them."""
    with served(of_long_answers, "--num-blocks", "1024", "--max-num-seqs", "2", "--max-waiting", "2") as running:
        yield running


def ask(app: App, request: str, **params: object) -> None:
    messages = [{"role": "user", "content": "Say it"}]
    app.send(chat.Generate(request, "a conversation", messages, {"max_tokens": 60, "ignore_eos": True, **params}))


def test_two_apps_and_a_script_share_one_pool(server: Server) -> None:
    server.wait_until_idle()
    with bridge(server.url) as one, bridge(server.url) as other:
        assert one.wait_for(chat.Loaded) == other.wait_for(chat.Loaded)
        ask(one, "r1", n=2)
        ask(other, "r1", max_tokens=400)
        body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        ends = [event for event in one.wait_for(chat.Finished, 2) if isinstance(event, chat.Finished)]
        assert {(event.request_id, event.index) for event in ends} == {("r1", 0), ("r1", 1)}
        texts = [event for event in one.events if isinstance(event, chat.TextDelta)]
        assert {event.request_id for event in texts} == {"r1"}
        other.wait_for(chat.Finished)
        deadline = time.monotonic() + 60
        while not all(any(owner.startswith("cmpl-") for owner in app.owners()) for app in (one, other)):
            assert time.monotonic() < deadline
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)  # the last one was in no picture
        for app in (one, other):
            owners = app.owners()
            assert "r1" in owners, "its own, by the name that it gave"
            assert any(owner.endswith("/r1") for owner in owners), "the other app's"
        one.send(chat.Keep("r1", 1))
        tables = httpx.get(f"{server.url}/v1/cache").json()["tables"]
        assert any(each["request"].endswith("/r1") for each in tables)
    deadline = time.monotonic() + 60
    while any(each["request"].endswith("/r1") for each in httpx.get(f"{server.url}/v1/cache").json()["tables"]):
        assert time.monotonic() < deadline, "an app that goes leaves nothing"
        time.sleep(0.1)
    server.wait_until_idle()


def test_an_answer_can_be_stopped(narrow: Server) -> None:
    with bridge(narrow.url) as app:
        ask(app, "r9", max_tokens=10_000)
        app.wait_for(chat.TextDelta)
        app.send(chat.Abort("r9"))
        ends = [event for event in app.wait_for(chat.Finished) if isinstance(event, chat.Finished)]
        assert ends[0].finish_reason == "abort"


def test_another_may_not_speak_for_a_session(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/session/s0123", json={})
    assert answer.status_code == 404


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1", "http://host.invalid:8000"])
def test_no_server_is_one_line(url: str) -> None:
    with bridge(url) as app:
        failed = app.wait_for(chat.LoadFailed)[0]
        assert isinstance(failed, chat.LoadFailed)
        assert "no server answers at" in failed.error
        assert "\n" not in failed.error


# --- servers that end, or are none of minillm's -----------------------------------------------------------------------

FACTS = chat.encode(chat.Loaded("m", "s", "cpu", "float32", 512, 16, 64, 0, 1_000, True, 1.0))


@contextmanager
def stranger(*lines: bytes, replies: bytes = b"") -> Iterator[str]:
    """A server that begins a session with these lines, and ends; ``replies`` are for commands."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for line in lines:
                self.wfile.write(line)
                self.wfile.flush()
            if replies:
                time.sleep(1.0)

        def do_POST(self) -> None:
            self.wfile.write(replies)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("rest", [b"", b'{"message": "Noti'])
def test_a_server_that_ends_is_one_line(rest: bytes) -> None:
    """This includes an end inside an event, while the app can still write."""
    with stranger(b'{"session":"s1"}\n', FACTS, rest) as url, bridge(url) as app:
        failed = app.wait_for(chat.LoadFailed)[0]
        assert isinstance(failed, chat.LoadFailed)
        assert failed.error == f"the server at {url} has ended"
        assert chat.decode_event(FACTS) in app.events, "what it said before is passed on"
        assert app.process.wait(30) == 1
        assert app.process.stderr is not None
        assert app.process.stderr.read() == b""


@pytest.mark.parametrize(
    "first",
    [
        b"[1]\n",
        b"5\n",
        b"{}\n",
        b'{"session":{}}\n',
        b'{"session":"../../x\\r\\nX: y"}\n',
        b'{"session":""}\n',
        b"[" * 100_000 + b"\n",
        b"",
    ],
)
def test_a_server_without_sessions_is_not_minillms(first: bytes) -> None:
    with stranger(first) as url, bridge(url) as app:
        failed = app.wait_for(chat.LoadFailed)[0]
        assert isinstance(failed, chat.LoadFailed)
        assert failed.error == f"the server at {url} runs no minillm"
        assert app.process.wait(30) == 1


def test_a_line_without_end_is_not_kept() -> None:
    with stranger(b'{"session":"s1"}\n', FACTS, b"x" * (97 << 20)) as url, bridge(url) as app:
        failed = app.wait_for(chat.LoadFailed)[0]
        assert isinstance(failed, chat.LoadFailed)
        assert failed.error == f"the server at {url} sent a line of more than 96 MiB"


@pytest.mark.parametrize(
    "replies",
    [
        b"HTTP/1.1 429 Busy\r\nretry-after: " + b"9" * 5_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 429 Busy\r\nretry-after: 0\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 5_000_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk",
    ],
)
def test_strange_replies_do_not_stop_the_bridge(replies: bytes) -> None:
    with stranger(b'{"session":"s1"}\n', FACTS, replies=replies) as url, bridge(url) as app:
        app.wait_for(chat.Loaded)
        for number in range(2):
            app.send(question(number))
        failed = app.wait_for(chat.LoadFailed)[0]
        assert isinstance(failed, chat.LoadFailed)
        assert failed.error.startswith(f"the server at {url} ")
        assert app.process.wait(30) == 1
        assert app.process.stderr is not None
        assert app.process.stderr.read() == b""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("localhost:1", "http://localhost:1"),
        ("somewhere", "http://somewhere:8000"),
        ("https://somewhere/llm/v1", "https://somewhere:443/llm"),
        ("[::1]:8801", "http://[::1]:8801"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown
    assert Address.parse(shown) == Address.parse(url), "the app passes this text on"


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://x:y", "http://x:99999", "http://x/?a=b", "http://[::1", "a..b"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="give an address like"):
        Address.parse(url)


@contextmanager
def session_of(server: Server) -> Iterator[Callable[[bytes], httpx.Response]]:
    """An open session; gives what posts a line to it."""
    with httpx.stream("GET", f"{server.url}/v1/session", timeout=30) as events:
        lines = events.iter_lines()  # without it the stream would end
        session = json.loads(next(lines))["session"]
        kind = {"content-type": "application/json"}
        yield lambda line: httpx.post(f"{server.url}/v1/session/{session}", content=line, headers=kind)


def test_commands_that_make_no_sense_do_not_end_the_engine(server: Server) -> None:
    with session_of(server) as post:
        for line in (
            b"nonsense",
            b'{"message": "Fly"}',
            b'{"message": "Generate", "request_id": "r", "conversation": "c", "messages": [{}], "params": {}}',
            b'{"message": "Generate", "request_id": "r", "conversation": "c", "messages": [{"role": "user", '
            b'"content": "x"}], "params": {"max_tokens": [1], "beam_width": {}}}',
            b'{"message": "Generate", "request_id": "r", "conversation": "c", "messages": [], "params": {"x": 1}}',
            b'{"message": "Inspect", "block": -5}',
            b'{"message": "Keep", "request_id": "none", "index": 9}',
            b'{"message": "Load", "model": "other", "options": {}}',
            b'{"message": "Pin", "system": "\\u0000"}',
            b'{"message": "Report", "every": 1e300}',
        ):
            post(line)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200


# --- questions wait their turn ----------------------------------------------------------------------------------------


def ends_of(app: App, count: int) -> list[str]:
    """The requests that have ended, in that order, once there are ``count``."""
    return [event.request_id for event in app.wait_for(chat.Finished, count) if isinstance(event, chat.Finished)]


def question(number: int, **params: object) -> chat.Generate:
    messages = [{"role": "user", "content": "Say it"}]
    return chat.Generate(f"r{number}", f"c{number}", messages, {"max_tokens": 80, "ignore_eos": True, **params})


def test_no_question_is_lost_where_there_are_more_than_the_queue_holds(narrow: Server) -> None:
    """Twelve at once for two slots and two places: all are answered, at most two at a time."""
    with bridge(narrow.url) as app:
        app.wait_for(chat.Loaded)
        for number in range(12):
            app.send(question(number, max_tokens=400))
        most = 0
        while len([event for event in app.events if isinstance(event, chat.Finished)]) < 12:
            most = max(most, int(narrow.figure("seats_taken")))
            assert narrow.figure("requests_queued") <= 2
            time.sleep(0.05)
        assert most == 2
        assert set(ends_of(app, 12)) == {f"r{number}" for number in range(12)}
        assert not [event for event in app.events if isinstance(event, chat.RequestFailed)]
    narrow.wait_until_idle()


def test_a_script_and_an_app_take_turns(narrow: Server) -> None:
    """A script has its answer while an app still has questions in the queue."""
    with bridge(narrow.url) as app:
        app.wait_for(chat.Loaded)
        for number in range(3):
            app.send(question(number, max_tokens=400))
        app.wait_for(chat.TextDelta)
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        answer = httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (200, 429)
        ends_of(app, 3)
    narrow.wait_until_idle()


def test_a_question_can_be_stopped_while_it_waits(narrow: Server) -> None:
    with bridge(narrow.url) as app:
        app.wait_for(chat.Loaded)
        app.send(question(0, max_tokens=7_000, n=2))
        app.wait_for(chat.TextDelta)
        for number in range(1, 6):  # two wait at the server, the others on this side
            app.send(question(number))
        for number in range(1, 5):
            app.send(chat.Abort(f"r{number}"))
        failed = [event for event in app.wait_for(chat.RequestFailed, 4) if isinstance(event, chat.RequestFailed)]
        assert {event.request_id for event in failed} == {f"r{number}" for number in range(1, 5)}
        assert all("stopped while it waited" in event.error for event in failed)
        app.send(chat.Abort("r0"))
        assert ends_of(app, 3)[-1] == "r5"
    narrow.wait_until_idle()


def test_an_app_that_goes_leaves_the_queue(narrow: Server) -> None:
    with bridge(narrow.url) as app:
        app.wait_for(chat.Loaded)
        for number in range(8):
            app.send(question(number, max_tokens=10_000))
        app.wait_for(chat.TextDelta)
    narrow.wait_until_idle()


def test_a_question_that_makes_no_sense_gives_its_seat_back(narrow: Server) -> None:
    with bridge(narrow.url) as app:
        app.wait_for(chat.Loaded)
        app.send(question(0, temperature=-3))
        app.send(question(1, n=1000))
        app.send(question(2, n="x"))
        app.send(chat.Generate("r3", "c3", [{"role": "user", "content": "x " * 20_000}]))
        app.wait_for(chat.RequestFailed, 3)
        app.wait_for(chat.ContextFull)
        app.send(question(4))
        assert ends_of(app, 1) == ["r4"]
    narrow.wait_until_idle()


def test_commands_that_are_none_are_refused(server: Server) -> None:
    with session_of(server) as post:
        for line in (b"nonsense", b'{"message": "Fly"}', b"\xff"):
            answer = post(line)
            assert answer.status_code == 400
            assert "not a command" in answer.json()["error"]["message"]
