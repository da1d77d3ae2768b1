"""A client that measures streamed completions of an OpenAI-compatible server. It can also start `minillm serve`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError

_LONGEST = 600.0  # time limit of a request in seconds
_KEY_VARIABLE = "OPENAI_API_KEY"
# Fields of a completion request: the answer is streamed, with token ids and the number of tokens.
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


@dataclass(frozen=True)
class Endpoint:
    """The base address of an OpenAI server, such as ``http://127.0.0.1:8000/v1``. ``key``: the API key, or empty."""

    host: str
    port: int
    path: str
    secure: bool
    key: str = ""

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Return the endpoint of a URL, with or without ``/v1``. The key is ``$OPENAI_API_KEY``.

        Raises UsageError if the URL is invalid.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--peer {url[:80]!r}: give the server's address, such as http://127.0.0.1:8000")
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, port, path, parts.scheme == "https", os.environ.get(_KEY_VARIABLE, ""))

    def message(self, path: str, body: Mapping[str, Any] | None = None, *, keep_alive: bool = False) -> bytes:
        """Return the bytes of an HTTP request: POST if there is a ``body``, else GET.

        Unless ``keep_alive``, the request tells the server to close the connection after its answer.
        """
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {self.path}{path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            f"connection: {'keep-alive' if keep_alive else 'close'}",
            "content-type: application/json",
            "accept: application/json, text/event-stream",
            f"content-length: {len(data)}",
            *([f"authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + data

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request and wait for its answer. A failure is not raised: it is described in `Answer.problem`."""
        loop = asyncio.get_running_loop()
        answer = Answer(loop.create_future())
        context = ssl.create_default_context() if self.secure else None
        try:
            async with asyncio.timeout(_LONGEST):
                transport, _ = await loop.create_connection(
                    lambda: _Protocol(answer, self.message(path, body)), self.host, self.port, ssl=context
                )
                try:
                    await answer.ended
                finally:
                    transport.close()
        except TimeoutError:
            answer.problem = answer.problem or f"no answer after {_LONGEST:.0f} s"
        except OSError as error:
            answer.problem = answer.problem or f"{self.host}:{self.port}: {error.strerror or error}"
        return answer

    async def model(self) -> str:
        """Return the name of the first model that the server offers. Raises MinillmError if it offers no model."""
        answer = await self.ask("/models")
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            reason = answer.problem or answer.body[:200].decode(errors="replace")
            raise MinillmError(f"{self.host}:{self.port} lists no models: {reason}") from None


@dataclass
class Answer:
    """The server's answer to one request, filled in as it arrives. Times are those of `time.perf_counter`.

    Attributes:
        sent: the time when the request was sent.
        times: for each event with a token, the time when it arrived.
        num_tokens: the number of generated tokens; if the server does not report it, the number of events with a token.
        problem: a description of an error, or empty.
    """

    ended: asyncio.Future[None]
    sent: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # empty if the server does not send them
    problem: str = ""
    body: bytes = b""  # the body of an answer that is not streamed

    @property
    def first(self) -> float:
        """Seconds from the request to the first token."""
        return self.times[0] - self.sent

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first token; 0 if the answer has only one token."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)

    @property
    def longest_gap(self) -> float:
        """The longest time in seconds between two successive events with tokens."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


class _Protocol(asyncio.Protocol):
    """An asyncio protocol for one connection: sends a request, and records when each event of the answer arrives."""

    def __init__(self, answer: Answer, message: bytes) -> None:
        self._answer, self._message = answer, message
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._answer.sent = time.perf_counter()
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError, LookupError, TypeError) as error:
            self._end(f"the answer is no stream of completions ({type(error).__name__})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the server has closed the connection")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(msgspec.json.decode(line[6:]))
        self._answer.body = (self._answer.body + body)[: 1 << 20] if not self._answer.times else b""

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer.status != 200:
            self._end(f"status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        else:
            answer.num_tokens = answer.num_tokens or len(answer.times)
            self._end("")

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self._end(str(event["error"])[:200])
        for choice in event.get("choices") or ():
            self._answer.token_ids += choice.get("token_ids") or ()
            if choice.get("text") or choice.get("token_ids") or not choice.get("finish_reason"):
                self._answer.times.append(self._now)
        if event.get("usage"):
            self._answer.num_tokens = int(event["usage"]["completion_tokens"])

    def _end(self, problem: str) -> None:
        if not self._answer.ended.done():
            self._answer.problem = problem
            self._answer.ended.set_result(None)


@contextmanager
def running_server(model: str, config: EngineConfig) -> Iterator[str]:
    """Run ``minillm serve`` with a model and a configuration. Yield its address, such as ``http://127.0.0.1:49152``.

    Raises MinillmError if the server does not start.
    """
    default = EngineConfig()
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    changed = {name: value for name, value in values.items() if value != getattr(default, name)}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.toml"
        lines = [f"{name} = {json.dumps(value)}" for name, value in changed.items()]
        file.write_text("\n".join(["[engine]", *lines, ""]))
        command = [sys.executable, "-m", "minillm", "serve", model, "--port", "0", "--config", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said = line
                if found := re.search(r" at (http://[\d.]+:\d+)/v1", line):
                    break
            else:
                raise MinillmError(f"the server did not start: {said.strip()}")
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
