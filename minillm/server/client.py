"""The HTTP process's asyncio client of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import ContextLengthError, MinillmError, UsageError
from minillm.service import call_messages as messages
from minillm.service.messages import Abort, Load, Loaded, LoadFailed, Loading, Notice, Preparing, RequestFailed
from minillm.service.process import EngineProcess

_PING_SECONDS = 2.0
_SILENT_SECONDS = 10.0  # a process without an answer for this long is reported as not responding
_STEP_SECONDS = 120.0  # a step that takes this long is considered hung; on a slow CPU, a step takes some seconds

LoadingEvent = Loading | Notice | LoadFailed
"""The progress of loading, or its failure."""


class EngineDied(MinillmError):
    """The engine process has ended or does not respond."""


@dataclass(eq=False)
class Answer:
    """The events of one request that have arrived from the engine: its start, its texts and its end."""

    request_id: str
    texts: list[messages.Text] = field(default_factory=list)  # texts that `take` has not returned yet
    began: messages.Began | None = None
    ended: messages.Ended | RequestFailed | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when an event has arrived

    @property
    def in_reasoning(self) -> bool:
        """Return whether the answer begins inside the reasoning."""
        return self.began is not None and self.began.in_reasoning

    @property
    def has_reasoned(self) -> bool:
        """Return whether the answer continues reasoning that has text already."""
        return self.began is not None and self.began.has_reasoned

    def take(self) -> list[messages.Text]:
        """Return the texts that arrived since the last call. Texts of the same completion are joined."""
        texts, self.texts = self.texts, []
        if len(texts) < 2:
            return texts
        joined: dict[int, messages.Text] = {}
        for text in texts:
            if (one := joined.setdefault(text.index, text)) is not text:
                one.text += text.text
                one.num_tokens += text.num_tokens
                one.tokens = one.tokens + text.tokens
                one.token_ids = one.token_ids + text.token_ids
                one.finish_reason, one.stop_reason = text.finish_reason, text.stop_reason
        return list(joined.values())


class EventProtocol(asyncio.Protocol):
    """Splits the bytes from a socket into events, and passes each event to ``take`` at once.

    An asyncio stream would need a task that reads it. Then each token would reach its client one iteration of the event
    loop later.
    """

    def __init__(self, take: Callable[[messages.AnyEvent], object]) -> None:
        self._take = take
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 4 and len(self._data) >= (end := 4 + int.from_bytes(self._data[:4], "little")):
            body = bytes(self._data[4:end])
            del self._data[:end]  # before the event is handled: an event that fails must not be read again
            self._take(messages.decode_event(body))


@dataclass
class CallClient:
    """Sends calls to an engine process, and passes the events to answers and callbacks. Create it with `start`."""

    process: EngineProcess
    on_loading: Callable[[LoadingEvent], object] = lambda event: None  # called with the progress of loading
    ready: asyncio.Future[Loaded] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answers: dict[str, Answer] = field(default_factory=dict)
    figures: messages.Figures | None = None
    prepared: tuple[int, int] = (0, 0)  # number of step shapes with prepared CUDA graphs and kernels, and their total
    listeners: dict[str, Callable[[Any], object]] = field(default_factory=dict)  # by session
    answered: dict[str, Callable[[str], object]] = field(default_factory=dict)  # by session; called when an answer ends
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: MinillmError | None = None
    silent_seconds: float = 0.0  # seconds for which a `Ping` has not been answered
    step_seconds: float = 0.0  # seconds that the current step had taken at the last `Ping`
    _results: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    async def start(
        cls, process: EngineProcess, load: Load, on_loading: Callable[[LoadingEvent], object]
    ) -> CallClient:
        """Connect with the process and load a model. The future ``ready`` is done once the model is loaded.

        With ``load.wait_warm``, ``ready`` also waits until the kernels and CUDA graphs for steps of all shapes are
        prepared. ``on_loading`` is called with the progress of loading.
        """
        engine = cls(process, on_loading)
        await process.connect(EventProtocol(engine._take))
        engine.send(load)
        engine.watching = asyncio.create_task(engine._watch())  # type: ignore[attr-defined]
        return engine

    def send(self, call: messages.AnyCall) -> None:
        """Send a call. It is lost if the process has ended. Raises UsageError for a value that cannot be encoded."""
        self.process.write(messages.encode(call))

    @property
    def trouble(self) -> str:
        """Return why the engine accepts no requests; empty if it accepts requests."""
        if self.ended.is_set():
            return str(self.failure or "the engine has ended")
        if self.silent_seconds >= _SILENT_SECONDS:
            return f"the engine's process has not answered for {self.silent_seconds:.0f} s"
        if self.step_seconds >= _STEP_SECONDS:
            return f"the engine has been computing one step for {self.step_seconds:.0f} s"
        return ""

    def complete(self, call: messages.Complete, news: asyncio.Event) -> Answer:
        """Start a request and return its answer. ``news`` is set whenever an event of the answer arrives.

        Raises:
            EngineDied: the engine accepts no requests.
            UsageError: a value cannot be encoded.
        """
        self._check()
        self.send(call)
        answer = self.answers[call.request_id] = Answer(call.request_id, news=news)
        return answer

    def leave(self, answer: Answer) -> None:
        """Drop an answer. If the answer's request has not ended, abort the request."""
        if self.answers.pop(answer.request_id, None) is not None and answer.ended is None:
            self.send(Abort(answer.request_id))

    async def ask(self, make: Callable[[str], messages.Call]) -> Any:
        """Send a call and return its result. ``make`` creates the call from the call's id.

        Raises:
            EngineDied: the engine accepts no requests.
            UsageError: the engine rejects the call.
        """
        self._check()
        return await self._ask(make)

    def fail(self, why: str) -> None:
        """End all running answers with the error ``why``."""
        for answer in self.answers.values():
            answer.ended = answer.ended or RequestFailed(answer.request_id, why, "gone")
            answer.news.set()

    def _check(self) -> None:
        if trouble := self.trouble:
            raise EngineDied(f"{trouble}; send the request again later")

    async def _ask(self, make: Callable[[str], messages.Call]) -> Any:
        call_id = f"call-{next(self._numbers)}"
        future = self._results[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(make(call_id))
            return await future
        finally:
            self._results.pop(call_id, None)

    async def stop(self) -> None:
        """Stop the process, and wait until all running answers have ended."""
        await self.process.stop(2.0)
        await self.ended.wait()

    async def _watch(self) -> None:
        """Wait for the end of the process. Then end all running answers and pending calls with an error."""
        code = await self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        self.failure = self.failure or EngineDied(f"the engine's process {how}")
        self.ended.set()
        if not self.ready.done():
            self.ready.set_exception(self.failure)
        self.fail(f"{self.failure}; send the request again later")
        for future in self._results.values():
            if not future.done():
                future.set_exception(EngineDied(str(self.failure)))

    async def _ping(self) -> None:
        """Ping the process at intervals. Update ``silent_seconds`` and ``step_seconds``.

        ``silent_seconds`` adds up this loop's timeouts instead of reading a clock. If this server itself was suspended,
        a clock would make the engine look silent.
        """
        with contextlib.suppress(EngineDied):
            while True:
                asked = asyncio.create_task(self._ask(messages.Ping))
                while not (await asyncio.wait([asked], timeout=_PING_SECONDS))[0]:
                    self.silent_seconds += _PING_SECONDS
                self.silent_seconds, self.step_seconds = 0.0, asked.result()
                await asyncio.sleep(_PING_SECONDS)

    def _take(self, event: messages.AnyEvent) -> None:
        match event:
            case messages.Texts(texts):
                for text in texts:
                    if (answer := self.answers.get(text.request_id)) is not None:
                        answer.texts.append(text)
                        answer.news.set()
            case messages.Ended(request_id) | RequestFailed(request_id):
                if (answer := self.answers.get(request_id)) is not None:
                    answer.ended = event
                    answer.news.set()
            case messages.Began(request_id):
                if (answer := self.answers.get(request_id)) is not None:
                    answer.began = event
                    answer.news.set()
            case messages.Figures():
                self.figures = event
            case Preparing(done, total):
                self.prepared = done, total
            case messages.Result(call_id, value, error, kind):
                future = self._results.get(call_id)
                if future is not None and not future.done():
                    if error:
                        future.set_exception((ContextLengthError if kind == "context" else UsageError)(error))
                    else:
                        future.set_result(value)
            case messages.SessionEvent(session, line):
                if (listener := self.listeners.get(session)) is not None:
                    listener(line)
            case messages.SessionAnswered(session, request_id):
                if (answered := self.answered.get(session)) is not None:
                    answered(request_id)
            case Loaded():
                self.ready.set_result(event)
                self.pinging = asyncio.create_task(self._ping())
            case Loading() | Notice() | LoadFailed():
                if isinstance(event, LoadFailed):
                    self.failure = UsageError(event.error) if event.exit_code == 2 else MinillmError(event.error)
                self.on_loading(event)
