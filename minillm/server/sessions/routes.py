"""The HTTP routes that stream events: changes in the block pool, and sessions of chat apps."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from minillm.server.http.fair_queue import Full
from minillm.server.service import Service, json_response
from minillm.server.sessions.questions import Questions
from minillm.service import call_messages as messages
from minillm.service.sharing import leaves_some

_PING_SECONDS = 15.0  # after this many seconds without an event, a stream sends a ping
_MOST_WATCHERS = 32
_MOST_UNREAD = 256  # a stream is closed if more events than this wait for its client


async def watch_cache(service: Service, request: Request) -> Response:
    watcher = f"watcher-{secrets.token_hex(8)}"
    engine, reader = service.engine, request.state.tenant if service.has_keys else None

    def start() -> None:
        engine.send(messages.Watch(watcher, reader))

    def stop() -> None:
        engine.send(messages.Unwatch(watcher))

    def encode(changed: Any) -> bytes:
        return b"data: " + msgspec.json.encode(changed) + b"\n\n"

    return _listening(service, request.state.tenant, watcher, start, stop, encode)


async def open_session(service: Service, request: Request) -> Response:
    """Open a session, and stream its events to a chat app, one JSON object per line.

    The first line contains the session's name, the second line the model's facts.
    """
    session, tenant, engine = f"s{secrets.token_hex(8)}", request.state.tenant, service.engine
    reader = tenant if service.has_keys else None

    def tell(line: bytes) -> None:
        if (listener := engine.listeners.get(session)) is not None:
            listener(line)

    questions = Questions(session, tenant, engine, service.queue, tell)

    def start() -> None:
        service.sessions[session] = questions
        engine.answered[session] = questions.end
        engine.send(messages.OpenSession(session, tenant, reader, service.salt(tenant)))

    def stop() -> None:
        service.sessions.pop(session, None)
        engine.answered.pop(session, None)
        questions.close()
        engine.send(messages.CloseSession(session))

    first = msgspec.json.encode({"session": session}) + b"\n" + msgspec.json.encode(service.facts.facts) + b"\n"
    media_type = "application/x-ndjson"
    return _listening(service, tenant, session, start, stop, bytes, first, ping=b"\n", media_type=media_type)


async def take_session_commands(service: Service, request: Request) -> Response:
    session = request.path_params["name"]
    questions = service.sessions.get(session)
    if questions is None or questions.tenant != request.state.tenant:
        raise HTTPException(404, "there is no such session")
    try:
        for line in request.state.body.splitlines():
            questions.take(line)
    except Full as full:
        raise HTTPException(429, str(full), {"retry-after": str(full.retry_after)}) from None
    return json_response({})


def _listening(
    service: Service,
    tenant: str,
    name: str,
    start: Callable[[], object],
    stop: Callable[[], object],
    encode: Callable[[Any], bytes],
    first: bytes = b"",
    *,
    ping: bytes = b": alive\n\n",
    media_type: str = "text/event-stream",
) -> Response:
    """Return a response that streams the engine's events for a watcher or session called ``name``.

    If the client does not read the events, the stream ends.

    Args:
        start: called when the stream begins, to make the engine send events.
        stop: called when the stream ends.
        encode: converts an event to bytes.
        first: bytes to send first.
        ping: bytes to send if there was no event for `_PING_SECONDS`.

    Raises HTTPException if too many streams are open.
    """
    engine, free = service.engine, _MOST_WATCHERS - service.watchers.total()
    if free <= 0 or (service.shared and not leaves_some(service.watchers[tenant], 1, free)):
        raise HTTPException(429, "too many streams of events are open; close one of them, or try again later")
    waiting: asyncio.Queue[Any] = asyncio.Queue(_MOST_UNREAD)
    lost = asyncio.Event()

    def listen(event: Any) -> None:
        if event is None or waiting.full():
            lost.set()
        else:
            waiting.put_nowait(event)

    async def events() -> AsyncIterator[bytes]:
        engine.listeners[name] = listen
        service.watchers[tenant] += 1
        start()
        ends = [asyncio.create_task(end.wait()) for end in (lost, service.closing, engine.ended)]
        coming = asyncio.create_task(waiting.get())
        try:
            if first:
                yield first
            while True:
                await asyncio.wait([coming, *ends], timeout=_PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if any(end.done() for end in ends):
                    return
                if coming.done():
                    yield encode(coming.result())
                    coming = asyncio.create_task(waiting.get())
                else:
                    yield ping
        finally:
            for task in (coming, *ends):
                task.cancel()
            engine.listeners.pop(name, None)
            service.watchers[tenant] -= 1
            stop()

    return StreamingResponse(events(), media_type=media_type, headers={"cache-control": "no-cache"})
