"""uvicorn's protocol, with bounds on headers: those that come slowly, or without end, end the connection.

What is refused before the application sees it is refused as JSON, too.
"""

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minillm.server.generating import error_json, send_json

HEADER_SECONDS = 20.0
HEADER_BYTES = 64 << 10


class JoiningTransport:
    """A transport that sends the head of a response together with what follows it, if that comes at once."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1."):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _late: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: Any) -> None:
        joining: Any = JoiningTransport(transport, self.loop)
        super().connection_made(joining)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEADER_BYTES:
            self._end()
        elif self._in_head and self._head_bytes and self._late is None:  # a head that has begun, and is not all there
            self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def on_headers_complete(self) -> None:
        self._head_came()
        if sum(len(name) + len(value) for name, value in self.headers) > HEADER_BYTES:
            self._end()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and end the connection."""
        body = msgspec.json.encode(error_json(400, f"the bytes are not HTTP: {msg}"))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode("ascii") + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        chosen: Any = _too_many if app is service_unavailable else app
        super()._start_asgi_task(cycle, chosen)

    def _await_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _head_came(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer where there are more connections than any use has."""
    headers = [(b"retry-after", b"1"), (b"connection", b"close")]
    await send_json(send, 503, error_json(503, "too many connections; try again later"), headers)
