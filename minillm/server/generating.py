"""Send a response while it is generated, as one JSON object or as a stream of server-sent events.

If the client disconnects, generation ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from starlette.types import Receive, Scope, Send

from minillm.errors import UsageError
from minillm.server.answers import Json, Usage
from minillm.server.client import Answer, EngineDied
from minillm.server.http.fair_queue import FairQueue, Place, num_slots
from minillm.server.http.metrics import Metrics
from minillm.server.http.sending import CONTEXT_LENGTH, HTTPError, body_message, send_json
from minillm.server.replicas import Replicas
from minillm.service.call_messages import Complete, Completion, Ended, Text
from minillm.service.messages import RequestFailed

_TICK = 0.001  # seconds
# The head of a stream (status and headers) is sent after _HEAD_SECONDS if the engine has accepted the request by then.
# Otherwise it is sent once the engine accepts the request, or after _MOST_HEAD_SECONDS. Later errors become events.
_HEAD_SECONDS = 0.2
_MOST_HEAD_SECONDS = 0.9
_SILENT_SECONDS = 10.0  # after this long without an event, a ping is sent; proxies close connections after 60 s
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ResponseEncoder(Protocol):
    """Encodes responses and events of one protocol, as `minillm.server.answers.Frame` does for OpenAI's completions."""

    ping: ClassVar[bytes]  # sent on a stream that has nothing to send

    def response(self, choices: list[Json], usage: Usage, prompt: Json) -> Json:
        """Return a complete response. ``prompt`` contains the response's fields about the prompt."""

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """Return the events that begin a stream. It is called when the engine has accepted all prompts."""

    def chunks(self, choices: list[Json], usage: Usage | None, prompt: Json, *, has_usage: bool) -> bytes:
        """Return the events for the next choices of a stream. ``prompt`` contains further fields of the first event."""

    def closing(self, usage: Usage, *, has_usage: bool) -> bytes:
        """Return the last events of a stream that has succeeded."""

    def error(self, failed: HTTPError) -> Json:
        """Return an error in this protocol's format."""

    def failed(self, failed: HTTPError) -> bytes:
        """Return the last event of a stream that has failed."""


class Formatter(Protocol):
    """Formats the completions of a request as choices, the elements of OpenAI's field ``choices``.

    In all methods, ``number`` is the index of the prompt.
    """

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        """Return the choice to send before a completion's first text. None: there is nothing to send."""

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        """Return the choices for the next text of a streamed completion; empty if nothing can be sent yet."""

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        """Return the choices for the finished completions of a prompt."""

    def prompt(self, answers: Sequence[Answer]) -> Json:
        """Return the response's fields about the prompt, outside of the choices."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request: one engine call for each prompt, and the format of the response."""

    tenant: str
    calls: Sequence[Complete]
    encoder: ResponseEncoder
    formatter: Formatter
    streamed: bool
    has_usage: bool = False  # the stream ends with the token usage
    counts: bool = False  # each chunk of the stream has the token usage so far
    names: Mapping[str, str] = field(default_factory=dict)  # fields in the engine's errors -> fields of the request
    priority: int = 0


@dataclass
class GeneratedResponse:
    """An ASGI response that generates its content while it is sent."""

    request: ParsedRequest
    engine: Replicas
    queue: FairQueue
    metrics: Metrics
    send_seconds: float  # maximum seconds for a client to read a message
    usage: Usage = field(default_factory=Usage)
    _opening: bytes = b""  # events at the beginning of the stream that are not sent yet
    _started: bool = False  # the head of the response was sent
    _knows_events: bool = False  # the client accepts the type of event streams, so it can read comments
    _heading: asyncio.Lock = field(default_factory=asyncio.Lock)  # protects sending the head
    _accepted: asyncio.Event = field(default_factory=asyncio.Event)  # set when the engine has checked all prompts
    _sent: float = 0.0  # time at which the last message was sent completely
    _sending: float = math.inf  # start time of sending the current message; infinity between messages
    _is_disconnected: bool = False  # the client disconnected or stopped reading
    _is_over: bool = False
    _client_check: asyncio.TimerHandle | None = None
    _keeping: asyncio.Task[None] | None = None
    _beginning: asyncio.Task[None] | None = None  # starts the prompts after the first
    _places: dict[str, Place] = field(default_factory=dict)  # slots of running calls, by request
    _gone: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.current_task()
        assert work is not None
        self._knows_events = b"text/event-stream" in dict(scope["headers"]).get(b"accept", b"")
        # `_watch` runs when this task first waits. By then the request has been sent to the engine or queued.
        send = self._recording_times(send)
        watching = asyncio.get_running_loop().call_soon(self._watch, work, receive, send)
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not self._is_disconnected or work.uncancel():  # the server is shutting down
                raise
            self.metrics.disconnects.inc()
        finally:
            self._is_over = True
            for each in (watching, self._client_check, self._keeping, self._gone):
                if each is not None:
                    each.cancel()

    def _watch(self, work: asyncio.Task[Any], receive: Receive, send: Send) -> None:
        """Start watching the client. Cancel ``work`` if the client disconnects or stops reading.

        For a stream, also start the task that sends pings.
        """
        self._check_client(work)
        if self.request.streamed:
            self._keeping = asyncio.create_task(self._send_pings(send))
        self._gone = asyncio.create_task(self._until_disconnected(receive, send))
        self._gone.add_done_callback(lambda gone: self._leave(work))

    async def _until_disconnected(self, receive: Receive, send: Send) -> None:
        """Wait until the client disconnects.

        Another message says that the client has closed its sending half. Then send a ping on a stream: a client that
        has closed the whole connection replies with a reset.
        """
        while (await receive())["type"] != "http.disconnect":
            if self._started and self._sending == math.inf:
                await send(body_message(self.request.encoder.ping, more=True))

    def _leave(self, work: asyncio.Task[Any]) -> None:
        """Cancel ``work``, because nobody reads the response any more."""
        if not self._is_over and not self._is_disconnected:
            self._is_disconnected = True
            work.cancel()

    def _check_client(self, work: asyncio.Task[Any]) -> None:
        """Cancel ``work`` if the client has stopped reading. Otherwise check again later."""
        left = min(0.0, self._sending - time.monotonic()) + self.send_seconds
        if left < _TICK:  # a shorter wait would be a rounding error
            self._leave(work)
        else:
            self._client_check = asyncio.get_running_loop().call_later(left, self._check_client, work)

    def _recording_times(self, send: Send) -> Send:
        """Wrap ``send`` to record the times of sending. They show `_check_client` whether the client reads."""

        async def recording(message: Any) -> None:
            self._sending = time.monotonic()
            await send(message)
            self._sending, self._sent = math.inf, time.monotonic()

        return recording

    async def _send_pings(self, send: Send) -> None:
        """Wait a moment, then send the status and headers of a stream.

        After that, send a ping whenever nothing was sent for a while.
        """
        await asyncio.sleep(_HEAD_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_HEAD_SECONDS - _HEAD_SECONDS):
                await self._accepted.wait()
        await self._send_start(send)
        while True:
            silent = time.monotonic() - self._sent
            if silent < _SILENT_SECONDS - _TICK:
                await asyncio.sleep(_SILENT_SECONDS - silent)
            elif self._sending < math.inf:  # the client does not read
                await asyncio.sleep(_SILENT_SECONDS)
            else:
                await send(body_message(self.request.encoder.ping, more=True))

    async def _work(self, send: Send) -> None:
        began = time.monotonic()
        try:
            self.queue.check_space(self.request.tenant)
            await self._answer(send, began)
            self.metrics.whole.observe(time.monotonic() - began)
        except HTTPError as failed:
            await self._fail(send, failed)
        except EngineDied as died:
            await self._fail(send, HTTPError(503, str(died)))
        except UsageError as error:
            await self._fail(send, HTTPError(400, str(error)))

    async def _fail(self, send: Send, failed: HTTPError) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        encoder = self.request.encoder
        if self._started:  # the headers are sent: report the error as an event and end the stream
            await send(body_message(encoder.failed(failed), more=False))
        else:
            await send_json(send, failed.status, encoder.error(failed), failed.headers)

    async def _answer(self, send: Send, began: float) -> None:
        news = asyncio.Event()
        answers = [Answer(call.request_id, news=news) for call in self.request.calls]
        try:
            await self._begin(0, answers, news)
            if len(answers) > 1:
                self._beginning = asyncio.create_task(self._begin_others(answers, news))
            await (self._stream if self.request.streamed else self._at_once)(send, answers, news, began)
        finally:
            if self._beginning is not None:
                self._beginning.cancel()
            for answer in answers:
                self.engine.leave(answer)
            for place in self._places.values():
                self.queue.release(place)

    async def _begin(self, number: int, answers: list[Answer], news: asyncio.Event) -> None:
        """Wait until the queue admits prompt ``number``, then send the prompt to the engine."""
        call, request = self.request.calls[number], self.request
        place = await self.queue.wait(request.tenant, num_slots(call.params), request.priority)
        self._places[call.request_id] = place
        answers[number] = self.engine.complete(call, news)

    async def _begin_others(self, answers: list[Answer], news: asyncio.Event) -> None:
        """Send the prompts after the first one to the engine, one at a time. Other requests can run in between."""
        try:
            for number in range(1, len(answers)):
                await self._begin(number, answers, news)
        finally:
            news.set()

    def _look_at(self, answers: list[Answer]) -> None:
        """Free the slots that ended answers have in the queue. If a prompt could not be started, raise its error."""
        for answer in answers:
            if answer.ended is not None and (place := self._places.pop(answer.request_id, None)) is not None:
                self.queue.release(place)
        if self._beginning is not None and self._beginning.done():
            self._beginning.result()

    async def _at_once(self, send: Send, answers: list[Answer], news: asyncio.Event, began: float) -> None:
        while any(answer.ended is None for answer in answers):
            await news.wait()
            news.clear()
            self._look_at(answers)
            _raise_refused(answers, self.request.names)
        choices: list[Json] = []
        for number, answer in enumerate(answers):
            choices += self._end(number, answer)
        prompt = self.request.formatter.prompt(answers)
        await send_json(send, 200, self.request.encoder.response(choices, self.usage, prompt))

    def _end(self, number: int, answer: Answer) -> list[Json]:
        """Return the choices of an answer that has ended, and count its tokens."""
        ended = answer.ended
        assert isinstance(ended, Ended)
        self._count(answer, sum(each.num_tokens for each in ended.completions))
        return self.request.formatter.whole(number, ended.completions, answer)

    def _count(self, answer: Answer, num_tokens: int) -> None:
        ended = answer.ended
        assert isinstance(ended, Ended)
        self.usage.add(ended, num_tokens)
        self.metrics.prompt_tokens.inc(ended.num_prompt_tokens)
        self.metrics.cached_tokens.inc(ended.num_cached_tokens)
        self.metrics.completion_tokens.inc(num_tokens)

    async def _stream(self, send: Send, answers: list[Answer], news: asyncio.Event, began: float) -> None:
        request, encoder, formatter = self.request, self.request.encoder, self.request.formatter
        seen: set[tuple[int, int]] = set()
        counts = [0] * len(answers)
        left = set(range(len(answers)))
        engine_seconds, has_started = 0.0, False
        while left:
            await news.wait()
            news.clear()
            self._look_at(answers)
            choices: list[Json] = []
            if not self._accepted.is_set():
                _raise_refused(answers, self.request.names)
                if all(answer.began is not None or answer.ended is not None for answer in answers):
                    self._accepted.set()
                    self._opening = encoder.opening(answers)
                    if self._started:
                        await self._send_start(send)
            for number in sorted(left):
                answer = answers[number]
                texts: list[Text | Completion] = [*answer.take()]
                ended = answer.ended
                if isinstance(ended, RequestFailed):
                    _raise_refused(answers, self.request.names)
                elif ended is not None:
                    left.discard(number)
                    texts += ended.completions
                for text in texts:
                    if (number, text.index) not in seen:
                        seen.add((number, text.index))
                        if (first := formatter.first(number, text.index, answer)) is not None:
                            choices.append(first)
                    counts[number] += text.num_tokens
                    engine_seconds = engine_seconds or (text.first_seconds if isinstance(text, Text) else 0.0)
                    choices += formatter.pieces(number, text)
                if ended is not None:
                    self._count(answer, counts[number])
            if choices:
                is_first, before = not has_started, b""
                if is_first:
                    has_started, before = True, await self._start(send, engine_seconds)
                usage = _usage_so_far(answers, counts) if request.counts else None
                prompt = formatter.prompt(answers) if is_first else {}
                chunks = encoder.chunks(choices, usage, prompt, has_usage=request.has_usage)
                await send(body_message(before + chunks, more=True))
                if is_first:
                    self.metrics.first_token.observe(time.monotonic() - began)
        before = b"" if has_started else await self._start(send, engine_seconds)
        await send(body_message(before + encoder.closing(self.usage, has_usage=request.has_usage), more=False))

    async def _send_start(self, send: Send) -> None:
        """Send the status, the headers and the opening events of a stream, unless they were sent before."""
        if before := await self._start(send):
            await send(body_message(before, more=True))

    async def _start(self, send: Send, engine_seconds: float = 0.0) -> bytes:
        """Send the status and headers of a stream, unless they were sent before.

        Return bytes to send before the next events. These are the opening events, if they were not returned before. If
        the headers were sent before ``engine_seconds`` was known, the bytes end with an SSE comment that states this
        time, for clients that know comments. Load generators such as SGLang's and llmperf parse every line as data.

        Args:
            engine_seconds: the engine's time to the first token, for the header ``server-timing``; 0 if unknown.
        """
        timing = f"engine;dur={1e3 * engine_seconds:.3f}".encode() if engine_seconds else b""
        async with self._heading:
            before, self._opening = self._opening, b""
            if self._started:
                return before + (b": server-timing: " + timing + b"\n\n" if timing and self._knows_events else b"")
            headers = [*_EVENT_HEADERS, (b"server-timing", timing)] if timing else _EVENT_HEADERS
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._started = True
            return before


def _raise_refused(answers: Sequence[Answer], names: Mapping[str, str]) -> None:
    for answer in answers:
        if isinstance(answer.ended, RequestFailed):
            status, error = {"internal": 500, "gone": 503}.get(answer.ended.kind, 400), answer.ended.error
            name, colon, rest = error.partition(":")
            field = names.get(name, "")
            code = CONTEXT_LENGTH if answer.ended.kind == "context" else None
            raise HTTPError(status, f"{field or name}{colon}{rest}", field=field, code=code)


def _usage_so_far(answers: Sequence[Answer], counts: Sequence[int]) -> Usage:
    """Return the token usage so far: the tokens of prompts that have started, and the generated tokens."""
    began = [answer.began for answer in answers if answer.began is not None]
    return Usage(prompt=sum(each.num_prompt_tokens for each in began), completion=sum(counts))
