"""Test `minillm bench serve` against our own server and against servers that misbehave: the figures, not the speed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lib.server import Server, served
from minillm.bench.client import Answer, Endpoint
from minillm.bench.serve import ServeOptions, ServeResult, measure
from minillm.errors import MinillmError, UsageError


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with served(tiny_model, "--num-blocks", "256") as server:
        yield server


def options(**more: object) -> ServeOptions:
    return ServeOptions(**{"warm_up": 2, "vocab_size": 90, "scale": 0.02, **more})  # type: ignore[arg-type]


def check(result: ServeResult) -> None:
    for times in (result.time_to_first_token, result.time_per_output_token, result.normalised_latency):
        assert 0 <= times[0] <= times[1] <= times[2]
    assert result.longest_gap >= result.time_per_output_token[0]
    assert result.output_rate > result.request_rate > 0


def test_requests_arrive_at_random_and_all_are_answered(server: Server) -> None:
    result = measure({"model": "unused"}, options(peer=server.url, rate=20.0, num_requests=12, tpot_limit=1e9,
                                                   ttft_limit=1e9))  # fmt: skip
    check(result)
    assert (result.num_requests, result.num_failed, result.by_turn) == (12, 0, None)
    assert result.good_share == 1
    assert result.goodput == pytest.approx(result.request_rate)
    server.wait_until(lambda: server.figure("seats_taken") == 0)


def test_conversations_grow_behind_one_prompt(server: Server) -> None:
    before = server.figure("prefix_hit_tokens_total")
    result = measure(
        {"model": "unused"},
        options(peer=f"{server.url}/v1/", conversations=3, turns=4, ttft_limit=1e-6, seed=3),
    )
    check(result)
    assert (result.num_requests, result.num_failed, result.rate) == (12, 0, None)
    assert result.by_turn is not None
    assert len(result.by_turn) == 4
    assert result.goodput == result.good_share == 0
    # Each later turn finds all full blocks of the turn before; a turn adds 3 + 2 tokens to 30.
    server.wait_until(lambda: server.figure("prefix_hit_tokens_total") - before >= 3 * 3 * 32)


def test_it_starts_a_server(tiny_model: Path) -> None:
    result = measure(
        {"model": str(tiny_model), "device": "cpu", "num_blocks": 64},
        options(num_requests=3, rate=1e5, served_name=tiny_model.name),
    )
    check(result)
    assert (result.num_requests, result.num_failed) == (3, 0)


@asynccontextmanager
async def peer(*answers: bytes) -> AsyncIterator[Endpoint]:
    """Run a server that answers each request with the next of ``answers``, the last one again and again."""
    left = itertools.chain(answers, itertools.repeat(answers[-1]))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        for piece in next(left).split(b"|"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield Endpoint.of(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/v1")


def reply(*lines: object, end: bytes = b"") -> bytes:
    """Return a streamed answer without a length, split within events."""
    body = b"|".join(b"data: " + json.dumps(line).encode()[:9] + b"|" + json.dumps(line).encode()[9:] + b"\n\n"
                     for line in lines)  # fmt: skip
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n|" + body + end


def ask(*answers: bytes) -> Answer:
    async def run() -> Answer:
        async with peer(*answers) as endpoint:
            return await endpoint.ask("/completions", {"prompt": [1]})

    return asyncio.run(run())


def test_events_are_tokens_and_the_server_counts_them() -> None:
    text = {"choices": [{"text": "a", "finish_reason": None}]}
    last = {"choices": [{"text": "", "finish_reason": "length"}]}
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (b'data: {"choices": [{"te', b'xt": "b"}]}\n\n')
    )
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    answer = ask(chunked)
    assert (answer.problem, len(answer.times), answer.num_tokens) == ("", 1, 1)
    length = reply(text, text, last, usage, end=b"data: [DONE]\n\n")
    head, _, body = length.replace(b"|", b"").partition(b"\r\n\r\n")
    answer = ask(head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert (answer.problem, len(answer.times), answer.num_tokens) == ("", 2, 7)
    assert answer.per_token == pytest.approx((answer.times[1] - answer.times[0]) / 6)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy", "status 429: busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}", "the server has closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is no stream of completions"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\ndata: {1}\n", "the answer is no stream of completions"),
    ],
)
def test_failures_are_named(answer: bytes, problem: str) -> None:
    assert ask(answer).problem.startswith(problem)


def test_a_peer_without_models_or_answers_is_reported() -> None:
    async def run() -> str:
        async with peer(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone") as endpoint:
            return await endpoint.model()

    with pytest.raises(MinillmError, match="lists no models: status 404: none"):
        asyncio.run(run())
    with pytest.raises(MinillmError, match=r"no request was answered: 127\.0\.0\.1:1"):
        measure({"model": "unused"}, options(peer="http://127.0.0.1:1", served_name="m", num_requests=2, rate=1e5))
    with pytest.raises(UsageError, match="--peer 'localhost:8000'"):
        Endpoint.of("localhost:8000")
