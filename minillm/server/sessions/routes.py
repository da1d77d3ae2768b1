"""The HTTP routes that stream events: changes in the block pool, and sessions of chat apps."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from minillm.server.http.sending import HTTPError
from minillm.server.service import Service, json_response
from minillm.server.sessions.questions import Questions
from minillm.service import call_messages as messages
from minillm.service import messages as chat
from minillm.service.sharing import leaves_some

_PING_SECONDS = 15.0  # after this many seconds without an event, a stream sends a ping
_MOST_WATCHERS = 32
_MOST_UNREAD = 256  # a stream is closed if more events than this wait for its client


async def watch_cache(service: Service, request: Request) -> Response:
    opened = _new_session(service, request, "watcher-", watches=True)
    return _listening(service, opened, lambda line: b"data: " + line + b"\n")


async def open_session(service: Service, request: Request) -> Response:
    """Open a session, and stream its events to a chat app, one JSON object per line.

    The first line contains the session's name, the second line the model's facts.
    """
    opened = _new_session(service, request, "s", salt=service.salt(request.state.tenant))
    session, engine = opened.session, service.engine

    def send_line(line: bytes) -> None:
        if (listener := engine.listeners.get(session)) is not None:
            listener(line)

    questions = Questions(session, opened.tenant, engine, service.queue, send_line)
    facts = msgspec.structs.replace(service.facts, max_num_seqs=0, vocab_size=0, defaults={}, chat_template="")
    first = msgspec.json.encode({"session": session}) + b"\n" + chat.encode(facts)
    media_type = "application/x-ndjson"
    return _listening(service, opened, lambda line: line, questions, first, ping=b"\n", media_type=media_type)


def _new_session(service: Service, request: Request, prefix: str, **options: Any) -> messages.OpenSession:
    """Return the call that opens a session with a new name."""
    tenant = request.state.tenant
    reader = tenant if service.has_keys else None
    return messages.OpenSession(f"{prefix}{secrets.token_hex(8)}", tenant, reader, **options)


async def take_session_commands(service: Service, request: Request) -> Response:
    session = request.path_params["name"]
    questions = service.sessions.get(session)
    if questions is None or questions.tenant != request.state.tenant:
        raise HTTPError(404, "there is no such session")
    for line in request.state.body.splitlines():
        questions.take(line)
    return json_response({})


def _listening(
    service: Service,
    opened: messages.OpenSession,
    encode: Callable[[bytes], bytes],
    questions: Questions | None = None,
    first: bytes = b"",
    *,
    ping: bytes = b": alive\n\n",
    media_type: str = "text/event-stream",
) -> Response:
    """Return a response that streams the events of a session. The session ends with the stream.

    If the client does not read the events, the stream ends.

    Args:
        opened: the call that opens the session. It is sent when the stream begins.
        encode: converts a line with an event to the bytes to send.
        questions: the session's questions, if its client is a chat app.
        first: bytes to send first.
        ping: bytes to send if there was no event for `_PING_SECONDS`.

    Raises HTTPError if too many streams are open, EngineDied if no engine accepts requests.
    """
    name, tenant, engine = opened.session, opened.tenant, service.engine
    engine.check()
    free = _MOST_WATCHERS - service.watchers.total()
    if free <= 0 or (service.shared and not leaves_some(service.watchers[tenant], 1, free)):
        raise HTTPError(429, "too many streams of events are open; close one of them, or try again later")
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
        if questions is not None:
            service.sessions[name], engine.answered[name] = questions, questions.end
        engine.send(opened)
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
            if questions is not None:
                del service.sessions[name], engine.answered[name]
                questions.close()
            engine.send(messages.CloseSession(name))

    return StreamingResponse(events(), media_type=media_type, headers={"cache-control": "no-cache"})
