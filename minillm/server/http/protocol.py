"""uvicorn's HTTP protocol with limits for each connection: on heads, trailers, rejected bodies and slow readers.

A head is a request's first line and headers. Errors that occur before the application runs are JSON, like all other
errors.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minillm.server.anthropic.answers import error_at
from minillm.server.http.sending import HTTPError, send_json

HEADER_SECONDS = 20.0
HEADER_BYTES = 64 << 10  # limit of a head, and of the bytes between or after the pieces of a body
LINGER_SECONDS = 5.0  # time to read and drop the rest of a rejected body, so that the client can read the error
LINGER_BYTES = 16 << 20
SEND_SECONDS = 60.0  # time for a client to take SEND_BYTES, or all bytes if they are fewer
SEND_BYTES = 60 << 10
_READ_BYTES = 64 << 10  # bytes to read at a time
_PROBE_SECONDS = 0.25
_BEGIN = b"HTTP/1.1 "  # start of every response
_UPGRADE = re.compile(rb"(?i)\nupgrade:")


class JoiningTransport:
    """A transport that sends a response's status and headers together with the data that immediately follows them.

    Args:
        end: closes the connection once everything is written; default: ``transport.close``.
    """

    def __init__(
        self, transport: Any, loop: asyncio.AbstractEventLoop, end: Callable[[], object] | None = None
    ) -> None:
        self._transport, self._loop, self._head = transport, loop, b""
        self._end = end or transport.close
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(_BEGIN):
            self._head, self._has_begun = data.removeprefix(_BEGIN) if self._has_begun else data, False
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def begin(self) -> None:
        """Send the first bytes of the next response, to test whether the client has closed the whole connection.

        If so, the client's operating system replies with a reset.
        """
        self._has_begun = True
        self._transport.write(_BEGIN)

    def close(self) -> None:
        self._flush()
        self._end()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class BoundedProtocol(HttpToolsProtocol):
    """The HTTP protocol of one connection, with limits."""

    _late: asyncio.TimerHandle | None = None  # closes the connection if a head does not arrive
    _sending: asyncio.TimerHandle | None = None  # checks whether a slow client reads
    _closing: asyncio.TimerHandle | None = None  # closes the connection if the rest of a rejected body takes too long
    _num_framing = 0  # bytes of the head so far, or bytes since the last piece of a body
    _num_dropped = 0  # dropped bytes of the rest of a body
    _in_head = True
    _in_body = False
    _keeps_alive = True

    def connection_made(self, transport: Any) -> None:
        self._raw = transport
        transport.max_size = _READ_BYTES  # asyncio's transports have this limit, others have none
        joining: Any = JoiningTransport(transport, self.loop, self._close)
        super().connection_made(joining)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        for timer in (self._sending, self._closing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing is not None:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self._close_now()
            return
        self._num_framing += len(data)
        if self._in_head:  # the parser would drop the body of a request for another protocol, such as Java's for HTTP/2
            data = _UPGRADE.sub(b"\nignored:", data)
        super().data_received(data)
        if self._num_framing > HEADER_BYTES:
            self._end()
        elif self._in_head and self._num_framing and self._late is None:  # a head has begun and is incomplete
            self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the response if the client has closed its sending half after a whole request.

        Return whether the connection stays open.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self._in_body or self._raw.is_closing():
            return False
        cycle.keep_alive = False
        if cycle.response_started:
            cycle.message_event.set()  # `receive` returns, and a stream sends a ping
        elif not self.pipeline:
            self.transport.begin()  # type: ignore[attr-defined]
        self._probe()
        return True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # drop trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_came()
        if sum(len(name) + len(value) for name, value in self.headers) > HEADER_BYTES:
            raise ValueError  # turned into a 400
        super().on_headers_complete()
        self._in_body, self._num_framing = True, 0
        # If a response is sent before the end of the request's body, the connection ends: nobody reads the rest.
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._num_framing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        self._in_body, self._in_head, self._num_framing = False, True, 0

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None and not self._raw.is_closing():
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not a valid request, and close the connection."""
        large = self._num_framing > HEADER_BYTES
        why = f"headers larger than {HEADER_BYTES} bytes" if large else f"the bytes are not HTTP: {msg}"
        body = msgspec.json.encode(HTTPError(400, why).json())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode("ascii") + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        chosen: Any = _too_many if app is service_unavailable else app
        super()._start_asgi_task(cycle, chosen)

    def _await_head(self) -> None:
        self._in_head, self._num_framing = True, 0
        self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _head_came(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _close(self) -> None:
        """Close the connection once everything is sent.

        If the client is still sending a body, first read and drop the rest, within limits. Closing with unread bytes
        would reset the connection, and the client would lose the response.
        """
        if self._closing is not None or self._raw.is_closing():
            return
        if self._in_body and self._raw.can_write_eof():
            self._closing = self.loop.call_later(LINGER_SECONDS, self._close_now)
            if not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.flow.resume_reading()
            self._raw.write_eof()
        else:
            self._close_now()

    def _close_now(self) -> None:
        self._raw.close()
        if self._raw.get_write_buffer_size():
            self._watch_sending()

    def _watch_sending(self) -> None:
        if self._sending is None:
            self._sending = self.loop.call_later(SEND_SECONDS, self._check_sending, self._raw.get_write_buffer_size())

    def _check_sending(self, before: int) -> None:
        """Abort the connection if its client takes bytes too slowly. Otherwise check again later.

        ``before`` is the number of unsent bytes at the last check.
        """
        now = self._raw.get_write_buffer_size()
        if before - now < min(before, SEND_BYTES):
            self._raw.abort()
        else:
            self._sending = self.loop.call_later(SEND_SECONDS, self._check_sending, now) if now else None

    def _probe(self) -> None:
        """Check at intervals whether the client has closed a half-closed connection entirely. If so, abort it."""
        if self._raw.is_closing() or self.cycle.response_complete:
            return
        if self._raw.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._raw.abort()
        else:
            self.loop.call_later(_PROBE_SECONDS, self._probe)


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with status 503, because there are too many connections."""
    again = [(b"retry-after", b"1"), (b"connection", b"close")]
    failed = HTTPError(503, "too many connections; try again later", again)
    await send_json(send, failed.status, error_at(scope["path"], failed), failed.headers)
