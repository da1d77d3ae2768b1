"""Clients that leave lie what they are sent or send slowly, and responses whose head and body come together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from minillm.server import generating
from minillm.server.answers import Frame
from minillm.server.engine_process import Answer
from minillm.server.forms import TextForm
from minillm.server.generating import Asked, Generating
from minillm.server.http_protocol import HEADER_SECONDS, BoundedProtocol, JoiningTransport
from minillm.server.messages import Complete, Ended, Text
from minillm.server.metrics import Metrics
from minillm.server.seats import Seats

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def skipped_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps to the next moment for which something waits: a busy machine makes nothing late."""
    loop = asyncio.get_running_loop()
    # Some moments, this one too, are rounded so that a thousandth of a nanosecond would be left to wait for, for ever.
    now, select = 7000.7310585, loop._selector.select  # type: ignore[attr-defined]

    def skip(timeout: float | None) -> Any:
        nonlocal now
        now += timeout or 0.0
        return select(0 if timeout is not None else None)

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(generating, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(loop._selector, "select", skip)  # type: ignore[attr-defined]


class Engine:
    """Says a word every hundredth of a second, ten in all; notes the answers that are left."""

    def __init__(self) -> None:
        self.left: list[Answer] = []
        self.tasks: list[asyncio.Task[None]] = []

    def complete(self, call: Complete, news: asyncio.Event) -> Answer:
        answer = Answer(call.request_id, news=news)
        self.tasks.append(asyncio.create_task(self._say(answer)))
        return answer

    async def _say(self, answer: Answer) -> None:
        for _ in range(10):
            await asyncio.sleep(0.01)
            answer.texts.append(Text(answer.request_id, 0, "word ", 1))
            answer.news.set()
        answer.ended = Ended(answer.request_id, 3, 0)
        answer.news.set()

    def leave(self, answer: Answer) -> None:
        self.left.append(answer)


async def respond(engine: Engine, seats: Seats, send: Any, send_seconds: float = 0.2) -> tuple[float, float]:
    """Stream an answer; returns the seconds that it took and the clients that went away."""
    call = Complete("x", "t", [1, 2, 3], {}, streamed=True)
    metrics = Metrics(seats, list)
    asked = Asked("t", [call], Frame("x", "m", "text_completion"), TextForm(1, False, False), True)
    answering = Generating(asked, engine, seats, metrics, send_seconds)  # type: ignore[arg-type]

    async def receive() -> Any:
        await asyncio.Event().wait()

    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(10):
        await answering({}, receive, send)
    gone = metrics.registry.get_sample_value("minillm_disconnects_total")
    assert gone is not None
    return asyncio.get_running_loop().time() - began, gone


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_a_client_that_takes_nothing_more_is_left(taken: int) -> None:
    engine, seats, messages = Engine(), Seats(1, 1), []
    tasks = asyncio.all_tasks()

    async def send(message: Any) -> None:
        messages.append(message)
        if len(messages) > taken:
            await asyncio.Event().wait()

    seconds, gone = await respond(engine, seats, send)
    assert seconds > 0.15
    assert gone == 1
    assert [answer.request_id for answer in engine.left] == ["x"]
    assert not seats.num_taken
    assert len(messages) == taken + 1
    await asyncio.gather(*engine.tasks)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks, "a task is left"


async def test_a_slow_client_gets_all_of_it() -> None:
    """Each message is taken late, and none too late; together they take longer than one may."""
    engine, seats, text = Engine(), Seats(1, 1), b""

    async def send(message: Any) -> None:
        nonlocal text
        await asyncio.sleep(0.08)
        text += message.get("body", b"")

    seconds, gone = await respond(engine, seats, send, send_seconds=0.1)
    assert seconds > 0.1
    assert gone == 0
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"word") == 10


async def test_a_server_that_ends_is_no_client_that_goes() -> None:
    engine, seats = Engine(), Seats(1, 1)

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(respond(engine, seats, send, send_seconds=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [answer.request_id for answer in engine.left] == ["x"]
    assert not seats.num_taken


class Written:
    """A transport that notes what is written at a time."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.pieces.append(data)

    def close(self) -> None:
        self.is_closed = True


async def test_a_head_is_sent_with_what_follows_it_or_soon() -> None:
    written = Written()
    transport = JoiningTransport(written, asyncio.get_running_loop())
    transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
    transport.write(b"one")
    transport.write(b"two")
    assert written.pieces == [b"HTTP/1.1 200 OK\r\n\r\none", b"two"]
    await asyncio.sleep(0)
    transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert written.pieces[2:] == [b"HTTP/1.1 204 No Content\r\n\r\n"], "nothing follows: it does not wait"
    transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    transport.close()
    assert written.pieces[3:] == [b"HTTP/1.1 400 Bad Request\r\n\r\n"]
    await asyncio.sleep(0)
    assert written.is_closed
    assert len(written.pieces) == 4


class Connection(Written):
    """A transport of a connection, as uvicorn wants it."""

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def test_a_head_has_so_long_to_come_and_the_time_between_requests_does_not_count() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await generating.send_json(send, 200, {})

    config = uvicorn.Config(app, interface="asgi3", timeout_keep_alive=1000, log_config=None)
    config.load()
    protocol, connection = BoundedProtocol(config, ServerState(), {}), Connection()
    protocol.connection_made(connection)
    for number in (1, 2):
        protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\n")
        await asyncio.sleep(HEADER_SECONDS - 1)
        protocol.data_received(b"content-length: 2\r\n\r\n{")
        await asyncio.sleep(2 * HEADER_SECONDS)
        protocol.data_received(b"}")
        await asyncio.sleep(2 * HEADER_SECONDS)
        assert not connection.is_closed, "the head has come, and then the body"
        assert b"".join(connection.pieces).count(b"200 OK") == number
    protocol.data_received(b"POST")
    await asyncio.sleep(HEADER_SECONDS - 1)
    protocol.data_received(b" / HTTP/1.1\r\n")
    assert not connection.is_closed
    await asyncio.sleep(2)
    assert connection.is_closed, "each piece has come soon, and the whole has not"
