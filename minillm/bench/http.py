"""``http``: compare an engine in this process with ``minillm serve`` on the same requests, alternating."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.bench.client import STREAMED, Endpoint, running_server
from minillm.bench.table import ScaleOptions, Subject, shown
from minillm.bench.workloads import Request, drive, throughput, times_of
from minillm.checks import integer
from minillm.errors import MinillmError
from minillm.llm import LLM
from minillm.params import SamplingParams

# Seconds between single requests on both sides. Without a pause, an engine finds its code and data in the processor's
# caches and answers sooner, which has nothing to do with HTTP.
_PAUSE = 0.02


@dataclass(frozen=True)
class HttpOptions(ScaleOptions):
    num_streams: int = integer(256, 1, 1 << 16, help="concurrent streams")
    rounds: int = integer(4, 1, 1000, help="sequential requests per stream")
    runs: int = integer(3, 1, 100, help="pairs of runs")


@dataclass(frozen=True)
class HttpResult:
    """The result of the comparison: medians over the runs.

    The engine in this process ("own") and the server's engine have the same configuration. While one engine works, the
    other engine uses no CPU time.
    """

    num_streams: int = shown("streams at a time", ",")
    num_requests: int = shown("requests", ",")
    own_rate: float = shown("tokens per second in this process", ",.0f")
    http_rate: float = shown("through HTTP", ",.0f")
    lost: float = shown("lost", ".1%")
    own_first: float = shown("ms to the first token here", ".2f", 1e3)
    http_first: float = shown("through HTTP, one at a time", ".2f", 1e3)
    http_costs: float = shown("of it outside the engine", ".2f", 1e3)


def measure(subject: Subject, options: HttpOptions) -> HttpResult:
    """Run the requests of the workload `throughput`, then single requests.

    Each run is done in this process, then over HTTP.

    Raises MinillmError if the server does not start, or if an answer is incomplete.
    """
    llm = subject.llm
    requests = throughput(
        random.Random(2),
        llm.engine.runner.model.config.vocab_size,
        options.scale,
        options.num_streams * options.rounds,
    )
    single = [(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)) for prompt, _ in requests[:24]]
    rates: tuple[list[float], list[float]] = ([], [])
    firsts: tuple[list[float], list[float], list[float]] = ([], [], [])
    with running_server(subject.name, llm.config) as url:
        endpoint = Endpoint.of(url)
        for run in range(options.runs + 1):
            llm.reset_prefix_cache()
            seconds, outputs = drive(llm.engine, requests)
            tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
            llm.reset_prefix_cache()
            mine = [_alone(llm, request) for request in single]
            began = time.perf_counter()
            count = asyncio.run(_streams(endpoint, requests, options.num_streams, f"run {run}"))
            taken = time.perf_counter() - began
            if count != tokens:
                raise MinillmError(f"the server returned {count} tokens instead of {tokens}")
            theirs = _one_by_one(endpoint, single, f"alone {run}")
            if run:  # the first run warms up
                rates[0].append(tokens / seconds)
                rates[1].append(tokens / taken)
                costs = [first - own for first, own in theirs]
                for into, values in zip(firsts, (mine, [first for first, _ in theirs], costs), strict=True):
                    into.append(statistics.median(values))
    own, http = statistics.median(rates[0]), statistics.median(rates[1])
    return HttpResult(options.num_streams, len(requests), own, http, 1 - http / own, *map(statistics.median, firsts))


def _alone(llm: LLM, request: Request) -> float:
    """Compute one request with the engine in this process. Return the seconds to its first token."""
    time.sleep(_PAUSE)
    return times_of(drive(llm.engine, [request])[1][0])[0]


async def _streams(endpoint: Endpoint, requests: Sequence[Request], num_streams: int, salt: str) -> int:
    """Send all requests over ``num_streams`` connections. Each connection waits for an answer before its next request.

    Return the number of generated tokens. Runs with different values of ``salt`` share no prefix cache.
    """
    left = iter(requests)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request) -> int:
        writer.write(_message(endpoint, request, salt))
        stream = _Stream()
        while not stream.has_ended:
            stream.take(await reader.read(1 << 16))
        return stream.num_tokens

    async def one() -> int:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            return sum([await answer(reader, writer, request) for request in left])
        finally:
            writer.close()

    return sum(await asyncio.gather(*(one() for _ in range(num_streams))))


def _one_by_one(endpoint: Endpoint, requests: Sequence[Request], salt: str) -> list[tuple[float, float]]:
    """Send requests one after another over one connection. Return two times in seconds for each request.

    The first time is measured by this client, from sending the request to the arrival of the first token. The second
    time is measured by the engine: how long it took to generate the first token. The client only waits for its socket,
    so it adds almost nothing to the first time.
    """
    seconds = []
    with socket.create_connection((endpoint.host, endpoint.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for request in requests:
            message, stream = _message(endpoint, request, salt), _Stream()
            time.sleep(_PAUSE)
            began = time.perf_counter()
            connection.sendall(message)
            while not stream.has_ended:
                stream.take(connection.recv(1 << 16))
            seconds.append((stream.first_time - began, stream.engine_seconds))
    return seconds


def _message(endpoint: Endpoint, request: Request, salt: str) -> bytes:
    """Return the bytes of an HTTP request for a streamed answer. ``salt`` becomes the request's `cache_salt`."""
    prompt, params = request
    assert isinstance(params, SamplingParams)
    body = {"prompt": prompt, "max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed}
    body |= STREAMED | {"ignore_eos": True, "cache_salt": salt}
    return endpoint.message("/completions", body, keep_alive=True)


class _Stream:
    """Parses the bytes of a streamed HTTP answer, only as far as the measurement requires.

    Attributes:
        first_time: the value of `time.perf_counter` when the first token arrived; 0 before.
    """

    def __init__(self) -> None:
        self.first_time = 0.0
        self._head, self._tail = b"", b""

    def take(self, piece: bytes) -> None:
        """Parse ``piece``, the next bytes from the connection.

        Raises MinillmError if it is empty: the answer was cut off.
        """
        if not piece:
            raise MinillmError(f"the server's answer has no end: {self._tail[-200:]!r}")
        if not self.first_time:
            self._head += piece
            if b"data: " in piece:
                self.first_time = time.perf_counter()
        self._tail = (self._tail + piece)[-4096:]

    @property
    def has_ended(self) -> bool:
        return self._tail.endswith(b"0\r\n\r\n")  # the end of a chunked body

    @property
    def engine_seconds(self) -> float:
        """Return the seconds from the request to the first token, as measured by the engine."""
        return float(self._found(rb"(?i)server-timing: engine;dur=([\d.]+)", self._head)) * 1e-3

    @property
    def num_tokens(self) -> int:
        return int(self._found(rb'"completion_tokens":(\d+)', self._tail))

    def _found(self, pattern: bytes, data: bytes) -> bytes:
        if (found := re.search(pattern, data)) is None:
            raise MinillmError(f"the server's answer has no {pattern.decode()}: {data[-200:]!r}")
        return found[1]
