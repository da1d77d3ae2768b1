"""Clients that read or send slowly, streams that have nothing to send yet, and heads sent together with bodies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from lib.server import Engine
from minillm.server import generating
from minillm.server.answers import Frame
from minillm.server.client import Answer
from minillm.server.completions.formatters import TextFormatter
from minillm.server.generating import GeneratedResponse, ParsedRequest
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.server.http.protocol import (
    HEADER_BYTES,
    HEADER_SECONDS,
    LINGER_BYTES,
    LINGER_SECONDS,
    SEND_SECONDS,
    BoundedProtocol,
    JoiningTransport,
)
from minillm.service.call_messages import Began, Complete, Ended, Text
from minillm.service.messages import RequestFailed

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


async def respond(
    engine: Engine, queue: FairQueue, send: Any, send_seconds: float = 0.2, accept: bytes = b"*/*"
) -> tuple[float, float]:
    """Stream an answer; returns the seconds that it took and the clients that went away."""
    call = Complete("x", "t", [1, 2, 3], {}, streamed=True)
    metrics = Metrics(queue, list)
    asked = ParsedRequest("t", [call], Frame("x", "m", "text_completion"), TextFormatter(1, False, False), True)
    answering = GeneratedResponse(asked, engine, queue, metrics, send_seconds)  # type: ignore[arg-type]

    async def receive() -> Any:
        await asyncio.Event().wait()

    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(100):
        await answering({"headers": [(b"accept", accept)]}, receive, send)
    gone = metrics.registry.get_sample_value("minillm_disconnects_total")
    assert gone is not None
    return asyncio.get_running_loop().time() - began, gone


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_a_client_that_takes_nothing_more_is_left(taken: int) -> None:
    engine, queue, messages = Engine(), FairQueue(1, 1), []
    tasks = asyncio.all_tasks()

    async def send(message: Any) -> None:
        messages.append(message)
        if len(messages) > taken:
            await asyncio.Event().wait()

    seconds, gone = await respond(engine, queue, send)
    assert seconds > 0.15
    assert gone == 1
    assert [answer.request_id for answer in engine.left] == ["x"]
    assert not queue.num_taken
    assert len(messages) == taken + 1
    await asyncio.gather(*engine.tasks)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks, "a task is left"


async def test_a_slow_client_gets_all_of_it() -> None:
    """Each message is read late but in time. Together they take longer than one message may."""
    engine, queue, text = Engine(), FairQueue(1, 1), b""

    async def send(message: Any) -> None:
        nonlocal text
        await asyncio.sleep(0.08)
        text += message.get("body", b"")

    seconds, gone = await respond(engine, queue, send, send_seconds=0.1)
    assert seconds > 0.1
    assert gone == 0
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"word") == 10


class SlowEngine(Engine):
    """Accepts a request, says a word and ends at these seconds after the request came; or rejects it at the last."""

    def __init__(self, accepted: float, said: float, ended: float, error: str = "", kind: str = "usage") -> None:
        super().__init__()
        self.times, self.error, self.kind = (accepted, said, ended), error, kind

    async def _say(self, answer: Answer) -> None:
        name, now = answer.request_id, 0.0
        end = RequestFailed(name, self.error, self.kind) if self.error else Ended(name, 3, 0)
        for event, moment in zip(
            (Began(name, ""), Text(name, 0, "word", 1, first_seconds=1.5), end), self.times, strict=True
        ):
            if moment > 3600:
                continue
            await asyncio.sleep(moment - now)
            now = moment
            if isinstance(event, Text):
                answer.texts.append(event)
            elif isinstance(event, Began):
                answer.began = event
            else:
                answer.ended = event
            answer.news.set()


NEVER = 1e9


def noting(messages: list[tuple[float, Any]]) -> Any:
    """Make a ``send`` that notes messages and the seconds since now when each came."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def send(message: Any) -> None:
        messages.append((round(loop.time() - began, 2), message))

    return send


@pytest.mark.parametrize("accept", [b"*/*", b"text/event-stream"])
async def test_a_stream_sends_its_head_soon_and_comments_while_nothing_else_comes(accept: bytes) -> None:
    messages: list[tuple[float, Any]] = []
    await respond(SlowEngine(0.05, 35, 48), FairQueue(1, 1), noting(messages), accept=accept)
    assert messages[0][0] == 0.2
    assert messages[0][1]["status"] == 200
    assert b"server-timing" not in dict(messages[0][1]["headers"])
    assert [moment for moment, message in messages if message.get("body") == b": alive\n\n"] == [10.2, 20.2, 30.2, 45]
    [(moment, first)] = [(moment, m) for moment, m in messages if b"word" in m.get("body", b"")]
    assert moment == 35
    comment = b"" if accept == b"*/*" else b": server-timing: engine;dur=1500.000\n\n"
    assert first["body"].startswith(comment + b"data: {")
    assert messages[-1][1]["body"] == b"data: [DONE]\n\n"


@pytest.mark.parametrize(("accepted", "head"), [(0.01, 0.2), (0.19, 0.2), (0.5, 0.5), (3.0, 0.9)])
async def test_the_head_waits_a_little_for_the_prompt_to_be_checked(accepted: float, head: float) -> None:
    messages: list[tuple[float, Any]] = []
    await respond(SlowEngine(accepted, 5, 6), FairQueue(1, 1), noting(messages))
    assert [moment for moment, message in messages if message["type"] == "http.response.start"] == [head]


async def test_a_text_before_the_head_takes_it_along() -> None:
    messages: list[tuple[float, Any]] = []
    await respond(SlowEngine(0.01, 0.15, 0.3), FairQueue(1, 1), noting(messages))
    assert [moment for moment, _ in messages] == [0.15, 0.15, 0.3]
    assert dict(messages[0][1]["headers"])[b"server-timing"] == b"engine;dur=1500.000"


async def test_a_stream_that_waits_for_a_seat_has_a_head() -> None:
    messages: list[tuple[float, Any]] = []
    queue = FairQueue(1, 1)
    async with queue.take("other", 1):
        task = asyncio.create_task(respond(SlowEngine(0.01, 1, 2), queue, noting(messages), send_seconds=60))
        await asyncio.sleep(25)
        assert [(moment, message["type"]) for moment, message in messages] == [
            (0.9, "http.response.start"),
            (10.9, "http.response.body"),
            (20.9, "http.response.body"),
        ]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("refused", [0.1, 0.8, 5.0])
async def test_an_error_has_a_status_before_the_head_and_is_an_event_after_it(refused: float) -> None:
    """Read it as OpenAI's client does, which raises in both cases, with the code."""
    queue = FairQueue(1, 1)
    engine = SlowEngine(NEVER, NEVER, refused, "the prompt has 9 tokens and the context holds 8", "context")
    call = Complete("x", "t", [1, 2, 3], {}, streamed=True)
    asked = ParsedRequest("t", [call], Frame("x", "m", "text_completion"), TextFormatter(1, False, False), True)
    app: Any = GeneratedResponse(asked, engine, queue, Metrics(queue, list), 60)  # type: ignore[arg-type]
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", max_retries=0, http_client=http)

    async def read() -> None:
        async for _ in await client.completions.create(model="m", prompt="a", stream=True):
            pytest.fail("there is no answer")

    with pytest.raises(openai.APIError, match="the context holds 8") as caught:
        await read()
    assert caught.value.code == "context_length_exceeded"
    assert isinstance(caught.value, openai.BadRequestError) == (refused < 0.9)
    assert not queue.num_taken


async def test_a_server_that_ends_is_no_client_that_goes() -> None:
    engine, queue = Engine(), FairQueue(1, 1)

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(respond(engine, queue, send, send_seconds=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [answer.request_id for answer in engine.left] == ["x"]
    assert not queue.num_taken


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

    def __init__(self) -> None:
        super().__init__()
        self.num_unsent = 0  # bytes that the client has not taken
        self.reset = 0  # the socket's error
        self.is_aborted = self.has_ended = False

    def get_extra_info(self, name: str) -> Any:
        found = SimpleNamespace(getsockopt=lambda *_: self.reset, getsockname=str, getpeername=str)
        return found if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    @property
    def sent(self) -> bytes:
        return b"".join(self.pieces)


def connected(app: Any) -> tuple[BoundedProtocol, Connection]:
    """Connect a client to ``app``."""
    config = uvicorn.Config(app, interface="asgi3", timeout_keep_alive=1000, log_config=None)
    config.load()
    protocol, connection = BoundedProtocol(config, ServerState(), {}), Connection()
    protocol.connection_made(connection)
    return protocol, connection


async def test_a_head_has_so_long_to_come_and_the_time_between_requests_does_not_count() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await generating.send_json(send, 200, {})

    protocol, connection = connected(app)
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


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    _protocol, connection = connected(never)
    await asyncio.sleep(HEADER_SECONDS - 1)
    assert not connection.is_closed
    await asyncio.sleep(2)
    assert connection.is_closed


async def never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request has come")


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await generating.send_json(send, 200, {"headers": len(scope["headers"])})


async def reject(scope: Any, receive: Any, send: Any) -> None:
    await generating.send_json(send, 401, {})


POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
LONG_BODY = POST + b"content-length: 1000000\r\n\r\n"


async def test_a_head_without_end_is_bounded() -> None:
    protocol, connection = connected(never)
    protocol.data_received(POST)
    for _ in range(HEADER_BYTES // 4096 - 1):
        protocol.data_received(b"x: " + b"y" * 4096 + b"\r\n")
        assert not connection.is_closed
    for _ in range(2):
        protocol.data_received(b"x: " + b"y" * 4096 + b"\r\n")
    assert connection.is_closed


async def test_a_large_head_that_comes_at_once_is_bounded() -> None:
    protocol, connection = connected(never)
    protocol.data_received(POST + b"x: " + b"y" * (HEADER_BYTES + 1) + b"\r\n\r\n")
    await asyncio.sleep(0.1)
    assert connection.is_closed
    assert b"400 Bad Request" in connection.sent
    assert b"headers larger than" in connection.sent


@pytest.mark.parametrize(
    "piece",
    [b"x: " + b"y" * 4096 + b"\r\n", b"y" * 4096, b"a: b\r\n" * 700],
    ids=["trailers", "one trailer", "short trailers"],
)
async def test_trailers_are_dropped_and_bounded(piece: bytes) -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ")
    for _ in range(HEADER_BYTES // len(piece) + 1):
        assert not connection.is_closed
        protocol.data_received(piece)
    assert connection.has_ended or connection.is_closed
    assert len(protocol.headers) == 2, "no trailer is kept"


async def test_the_extension_of_a_chunk_is_bounded() -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n2;")
    for _ in range(HEADER_BYTES // 4096 + 1):
        protocol.data_received(b"y" * 4096)
    assert connection.has_ended or connection.is_closed


async def test_trailers_and_many_small_chunks_are_no_error() -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(HEADER_BYTES // 2):
        protocol.data_received(b"1\r\n{\r\n")
    protocol.data_received(b"0\r\nx: y\r\n\r\n")
    await asyncio.sleep(0.1)
    assert b"200 OK" in connection.sent
    assert b'{"headers":2}' in connection.sent
    assert b"connection: close" not in connection.sent
    assert not connection.is_closed


@pytest.mark.parametrize("piece", [b"x", b"x" * 65536], ids=["by the byte", "fast"])
async def test_a_rejected_body_is_dropped_for_so_long(piece: bytes) -> None:
    protocol, connection = connected(reject)
    protocol.data_received(LONG_BODY)
    await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert b"401 Unauthorized" in connection.sent
    assert b"connection: close" in connection.sent
    assert connection.has_ended
    assert not connection.is_closed, "the client may still send, and then read why"
    for _ in range(LINGER_BYTES // 65536 + 1):
        protocol.data_received(piece)
    if len(piece) == 1:
        assert not connection.is_closed
        await asyncio.sleep(LINGER_SECONDS)
    assert connection.is_closed


async def test_a_rejected_request_whose_body_came_keeps_its_connection() -> None:
    protocol, connection = connected(reject)
    for _ in range(2):
        protocol.data_received(POST + b"content-length: 2\r\n\r\n{}")
        await asyncio.sleep(0.1)
    assert connection.sent.count(b"401 Unauthorized") == 2
    assert not connection.is_closed


async def test_bytes_that_are_no_chunk_end_the_request() -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
    await asyncio.sleep(0)
    protocol.data_received(b"zz\r\n")
    await asyncio.sleep(LINGER_SECONDS + 1)
    assert connection.sent.count(b"HTTP/1.1") == 1
    assert b"400 Bad Request" in connection.sent
    assert connection.is_closed


@pytest.mark.parametrize(("taken", "ends"), [(0, True), (100, True), (100_000, False)])
async def test_a_client_must_take_what_was_sent(taken: int, ends: bool) -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"content-length: 2\r\n\r\n{}")
    await asyncio.sleep(1)
    connection.num_unsent = 1_000_000
    protocol.pause_writing()
    await asyncio.sleep(SEND_SECONDS / 2)
    for _ in range(5):
        connection.num_unsent -= taken
        await asyncio.sleep(SEND_SECONDS)
    assert connection.is_aborted == ends


async def test_a_closed_connection_whose_client_takes_nothing_is_aborted() -> None:
    protocol, connection = connected(read_all)
    connection.num_unsent = 1000
    protocol.data_received(POST + b"connection: close\r\ncontent-length: 2\r\n\r\n{}")
    await asyncio.sleep(1)
    assert connection.is_closed
    assert not connection.is_aborted
    await asyncio.sleep(SEND_SECONDS)
    assert connection.is_aborted


async def test_a_client_that_takes_all_in_time_is_not_aborted() -> None:
    protocol, connection = connected(read_all)
    protocol.data_received(POST + b"content-length: 2\r\n\r\n{}")
    await asyncio.sleep(1)
    connection.num_unsent = 1_000_000
    protocol.pause_writing()
    await asyncio.sleep(SEND_SECONDS - 1)
    connection.num_unsent = 1000
    protocol.resume_writing()
    await asyncio.sleep(5 * SEND_SECONDS)
    assert not connection.is_closed


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """Answer after a second unless the client goes."""
    while (await receive()).get("more_body"):
        pass
    gone = asyncio.create_task(receive())
    await asyncio.wait([gone], timeout=1)
    await generating.send_json(send, 200, {"gone": gone.done()})


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_has_closed_its_sending_half_gets_its_answer(version: bytes) -> None:
    protocol, connection = connected(slow)
    protocol.data_received(b"POST / HTTP/" + version + b"\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    await asyncio.sleep(0.1)
    assert protocol.eof_received(), "the connection stays open"
    assert connection.sent == b"HTTP/1.1 ", "a client that is gone would answer with a reset"
    await asyncio.sleep(2)
    assert b'{"gone":false}' in connection.sent
    assert connection.is_closed
    assert connection.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert connection.sent.count(b"HTTP/1.1") == 1


async def test_a_client_that_is_gone_is_noticed_by_its_reset() -> None:
    protocol, connection = connected(slow)
    protocol.data_received(POST + b"content-length: 2\r\n\r\n{}")
    await asyncio.sleep(0.1)
    assert protocol.eof_received()
    connection.reset = 104
    await asyncio.sleep(0.5)
    assert connection.is_aborted


async def test_a_silent_stream_is_noticed_by_a_ping_and_the_reset() -> None:
    engine, queue = SlowEngine(0.01, NEVER, NEVER), FairQueue(1, 1)
    call, metrics = Complete("x", "t", [1, 2, 3], {}, streamed=True), Metrics(queue, list)
    asked = ParsedRequest("t", [call], Frame("x", "m", "text_completion"), TextFormatter(1, False, False), True)
    protocol, connection = connected(GeneratedResponse(asked, engine, queue, metrics, 60))  # type: ignore[arg-type]
    protocol.data_received(POST + b"content-length: 2\r\n\r\n{}")
    await asyncio.sleep(1)
    assert connection.sent.endswith(b"\r\n\r\n"), "only the head is sent"
    assert protocol.eof_received(), "the client may still read"
    await asyncio.sleep(0.1)
    assert connection.sent.endswith(b": alive\n\n\r\n")
    connection.reset = 104
    await asyncio.sleep(0.5)
    assert connection.is_aborted
    protocol.connection_lost(None)
    await asyncio.sleep(0.1)
    assert metrics.registry.get_sample_value("minillm_disconnects_total") == 1


@pytest.mark.parametrize("begun", [b"", POST, LONG_BODY])
async def test_a_connection_that_ends_before_a_whole_request_is_over(begun: bytes) -> None:
    protocol, _ = connected(slow)
    protocol.data_received(begun)
    assert not protocol.eof_received()
