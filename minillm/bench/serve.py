"""``serve``: measure an OpenAI-compatible server under load: requests at random times, or growing conversations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from minillm.bench.client import STREAMED, Answer, Endpoint, running_server
from minillm.bench.table import ServerOptions, shown, word
from minillm.checks import integer, number
from minillm.config import EngineConfig
from minillm.errors import MinillmError

_SYSTEM, _QUESTION, _REPLY = 1500, 150, 100  # tokens in a conversation's system prompt, each question, each reply
_PROMPTS, _REPLIES = (100, 1024), (50, 400)  # single requests: (least, most) tokens of prompts, and of replies


@dataclass(frozen=True)
class ServeOptions(ServerOptions):
    peer: str | None = word(
        None, "measure the OpenAI server at this address instead of a new minillm serve", metavar="URL"
    )
    served_name: str | None = word(None, "the model's name there (default: its first model)")
    rate: float = number(4.0, 0, 1e6, above=True, help="requests per second, with random (Poisson) arrival times")
    num_requests: int = integer(256, 1, 1 << 24, help="number of requests")
    conversations: int = integer(
        0, 0, 1 << 16, help="instead: this many conversations at once, after one system prompt of 1,500 tokens"
    )
    turns: int = integer(8, 1, 1000, help="turns of each conversation: 150 new tokens, and 100 of answer")
    ttft_limit: float = number(200.0, 0, 1e9, above=True, help="goodput: most milliseconds to the first token")
    tpot_limit: float = number(12.0, 0, 1e9, above=True, help="goodput: most milliseconds per output token")
    warm_up: int = integer(32, 0, 1 << 16, help="requests at once before the measurement")
    vocab_size: int = integer(30_000, 32, 1 << 24, help="prompts are random token ids below this")
    seed: int = integer(0, 0, 1 << 32, help="seed of lengths, tokens and arrival times")


@dataclass(frozen=True)
class ServeResult:
    """The result of ``serve``. Times are in seconds, as (median, 90th percentile, 99th percentile)."""

    rate: float | None = shown("requests per second, offered", "g")  # None: conversations
    num_requests: int = shown("requests", ",")
    seconds: float = shown("seconds", ".2f")
    output_rate: float = shown("tokens per second", ",.0f")
    time_to_first_token: tuple[float, float, float] = shown("ms to first token, p50/p90/p99", ".1f", 1e3)
    time_per_output_token: tuple[float, float, float] = shown("ms per output token", ".2f", 1e3)
    # Time from arrival to end, divided by the number of tokens (Orca, Yu et al. 2022).
    normalised_latency: tuple[float, float, float] = shown("ms of normalized latency", ".1f", 1e3)
    num_failed: int = shown("failed requests", ",")
    request_rate: float = shown("requests per second, answered", ".2f")
    longest_gap: float = shown("ms of the longest gap", ".1f", 1e3)
    goodput: float = shown("good requests per second", ".2f")
    good_share: float = shown("of all requests", ".1%")
    by_turn: tuple[float, ...] | None = shown("ms to first token, by turn", ".1f", 1e3, default=None)


def measure(engine: dict[str, Any], options: ServeOptions) -> ServeResult:
    """Warm up a server, and then measure it: the server at ``options.peer``, or a new `minillm serve`.

    ``engine`` has the model and the options of `EngineConfig` for a new server. Raises MinillmError if the server does
    not start, or if no request is answered.
    """
    settings = dict(engine)
    model = settings.pop("model")
    server = nullcontext(options.peer) if options.peer else running_server(model, EngineConfig(**settings))
    with server as url:
        return asyncio.run(_Load(Endpoint.of(url or ""), options).run())


class _Load:
    """Sends the requests of one measurement, and computes the result."""

    def __init__(self, endpoint: Endpoint, options: ServeOptions) -> None:
        self._endpoint, self._options = endpoint, options
        self._rng, self._model = random.Random(options.seed), ""

    async def run(self) -> ServeResult:
        options = self._options
        self._model = options.served_name or await self._endpoint.model()
        warm = self._requests(options.warm_up)
        await asyncio.gather(*(self._ask(prompt, count) for prompt, count in warm))
        began = time.perf_counter()
        turns = await (self._conversations() if options.conversations else self._arrivals(began))
        return self._result(turns, time.perf_counter() - began)

    async def _arrivals(self, began: float) -> list[list[Answer]]:
        """Send single requests at random times. Return the list of all answers, as the only element of a list."""
        requests = self._requests(self._options.num_requests)
        gaps = (self._rng.expovariate(self._options.rate) for _ in requests[1:])
        due = accumulate(gaps, initial=0.0)

        async def one(prompt: list[int], count: int, at: float) -> Answer:
            await asyncio.sleep(began + at - time.perf_counter())
            return await self._ask(prompt, count)

        return [await asyncio.gather(*(one(*each, at) for each, at in zip(requests, due, strict=True)))]

    async def _conversations(self) -> list[list[Answer]]:
        """Run all conversations concurrently. A conversation sends its next turn when its previous turn is answered.

        Return one list per turn, with the answers of all conversations.
        """
        options, system = self._options, self._tokens(_SYSTEM)
        turns: list[list[Answer]] = [[] for _ in range(options.turns)]
        questions = [[self._tokens(_QUESTION) for _ in turns] for _ in range(options.conversations)]
        replies = [[self._tokens(_REPLY) for _ in turns] for _ in range(options.conversations)]

        async def hold(number: int) -> None:
            text = list(system)
            for turn, answers in enumerate(turns):
                text += questions[number][turn]
                answer = await self._ask(text, self._scaled(_REPLY))
                answers.append(answer)
                if answer.problem:
                    return
                text += answer.token_ids or replies[number][turn]  # if ids are not sent, use a random reply instead

        await asyncio.gather(*map(hold, range(options.conversations)))
        return turns

    async def _ask(self, prompt: list[int], max_tokens: int) -> Answer:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self._endpoint.ask("/completions", body | STREAMED)
        if not answer.problem and not answer.times:
            answer.problem = "the answer has no tokens"
        return answer

    def _requests(self, count: int) -> list[tuple[list[int], int]]:
        """Return ``count`` random prompts, each with the number of tokens to generate."""
        draw = self._rng.randint
        return [(self._tokens(draw(*_PROMPTS)), self._scaled(draw(*_REPLIES))) for _ in range(count)]

    def _tokens(self, count: int) -> list[int]:
        """Return random token ids, without the vocabulary's first ids, which are often control tokens."""
        return [self._rng.randrange(20, self._options.vocab_size) for _ in range(self._scaled(count))]

    def _scaled(self, count: int) -> int:
        return max(1, int(count * self._options.scale))

    def _result(self, turns: list[list[Answer]], seconds: float) -> ServeResult:
        answers = list(chain.from_iterable(turns))
        done = [answer for answer in answers if not answer.problem]
        if not done:
            raise MinillmError(f"no request was answered: {answers[0].problem}")
        most_first, most_per_token = self._options.ttft_limit * 1e-3, self._options.tpot_limit * 1e-3
        good = sum(answer.first <= most_first and answer.per_token <= most_per_token for answer in done)
        by_turn = tuple(_percentile([each.first for each in turn if not each.problem], 0.5) for turn in turns)
        return ServeResult(
            None if self._options.conversations else self._options.rate,
            len(answers),
            seconds,
            sum(answer.num_tokens for answer in done) / seconds,
            _percentiles([answer.first for answer in done]),
            _percentiles([answer.per_token for answer in done]),
            _percentiles([(answer.times[-1] - answer.sent) / answer.num_tokens for answer in done]),
            len(answers) - len(done),
            len(done) / seconds,
            max(answer.longest_gap for answer in done),
            good / seconds,
            good / len(answers),
            by_turn if self._options.conversations else None,
        )


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    return _percentile(values, 0.5), _percentile(values, 0.9), _percentile(values, 0.99)
