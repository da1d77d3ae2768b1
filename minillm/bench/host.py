"""``host``: the cost of a step beside the device's work, on one core: scheduler, cache, beams.

There is no device: tokens and candidates are made up beforehand, at random.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

from minillm.beams.candidates import BeamStep
from minillm.beams.method import Searches, beam_step
from minillm.beams.search import Candidate
from minillm.bench.registry import NoOptions as Options
from minillm.bench.table import shown
from minillm.cache import BlockManager
from minillm.engine.engine import Engine, Step
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.load import methods_for
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.sequence import Chunk, Schedule

_VOCAB = 49152
_STEPS = 200


@dataclass(frozen=True)
class HostResult:
    """Microseconds per step, median."""

    what: str = shown("", width=52)
    microseconds: float = shown("us a step", ".0f")


class _Drawn:
    """Drawn tokens, made up."""

    may_run_ahead = False

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def wait(self) -> tuple[list[int], list[None], list[bool]]:
        count = len(self._tokens)
        return self._tokens, [None] * count, [False] * count


class _Runner:
    """A runner without a device."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tokens: list[int] = []

    def make_up(self, count: int) -> None:
        """Draw the tokens of the next step, before its time is taken."""
        self._tokens = [self._rng.randrange(3, _VOCAB) for _ in range(count)]

    def draw(self, logits: object, draws: list[Chunk]) -> _Drawn:
        return _Drawn(self._tokens[: len(draws)])


def measure(options: Options) -> list[HostResult]:
    """Both figures, and their parts."""
    return [*_decode_step(256), *_beam_step(32, 4)]


def _engine(runner: _Runner, num_blocks: int, max_num_seqs: int) -> Engine:
    scheduler = Scheduler(BlockManager(num_blocks, 16, prefix_caching=True), max_num_seqs, 8192)
    requests = Requests(scheduler, None, _VOCAB, 4096, frozenset([2]))
    return Engine(cast(Any, runner), requests, methods_for(requests, cast(Any, runner)))


def _add_requests(engine: Engine, rng: random.Random, count: int, params: Params) -> None:
    for number in range(count):
        prompt = [rng.randrange(3, _VOCAB) for _ in range(rng.randint(50, 300))]
        engine.add_request(str(number), prompt, params)


def _books(engine: Engine) -> tuple[float, Schedule, list[Chunk]]:
    """Schedule a step and note it as computed: the seconds of that, and the chunks that reach their end."""
    began = time.perf_counter()
    schedule = engine.scheduler.schedule()
    engine.cache.take_copies()
    scheduled = time.perf_counter()
    sampled = [chunk for chunk in schedule.chunks if chunk.reaches_the_end]
    for row, chunk in enumerate(sampled):
        chunk.row = row
    noting = time.perf_counter()
    engine.note_computed(schedule)
    return scheduled - began + time.perf_counter() - noting, schedule, sampled


def _decode_step(num_seqs: int) -> list[HostResult]:
    rng = random.Random(0)
    runner = _Runner(rng)
    engine = _engine(runner, num_seqs * 80, num_seqs)
    _add_requests(engine, rng, num_seqs, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    books: list[float] = []
    rest: list[float] = []
    while len(books) < _STEPS:
        runner.make_up(num_seqs)
        seconds, schedule, sampled = _books(engine)
        noted = time.perf_counter()
        step = Step(schedule, [])
        engine.launch_flights(step, cast(Any, None), sampled)
        engine.conclude(step)
        done = time.perf_counter()
        if len(schedule.decodes) == num_seqs:
            books.append(seconds)
            rest.append(done - noted)
    return [
        HostResult(f"decode, {num_seqs} sequences: scheduler and cache", 1e6 * statistics.median(books)),
        HostResult(f"decode, {num_seqs} sequences: draws, tokens to sequences", 1e6 * statistics.median(rest)),
    ]


def _beam_step(num_groups: int, width: int) -> list[HostResult]:
    rng = random.Random(0)
    engine = _engine(_Runner(rng), num_groups * width * 80, num_groups * width)
    _add_requests(engine, rng, num_groups, BeamSearchParams(beam_width=width, max_tokens=1000, ignore_eos=True))
    times: list[float] = []

    def candidates(step: BeamStep) -> list[Candidate]:
        found = [
            Candidate(value - rng.expovariate(1), beam, rng.randrange(3, _VOCAB))
            for beam, value in enumerate(step.searches[0].logprobs[: len(step.rows[0])])
            for _ in range(2 * width)
        ]
        return sorted(found, key=lambda candidate: -candidate.logprob)[: 2 * width]

    while len(times) < _STEPS:
        seconds, schedule, sampled = _books(engine)
        launching = time.perf_counter()
        step = Step(schedule, [])
        engine.launch_flights(step, cast(Any, None), sampled)
        if not step.flights:
            continue
        flight = cast(Searches, step.flights[0])
        steps = [beam_step(group, row_of) for group, row_of in flight.searching]
        launched = time.perf_counter()
        found = [candidates(each) for each in steps]
        choosing = time.perf_counter()
        for each, best in zip(steps, found, strict=True):
            flight.beams.advance(each, [best], {})
        done = time.perf_counter()
        if len(schedule.decodes) == num_groups * width:
            times.append(seconds + launched - launching + done - choosing)
    return [HostResult(f"beam step, {num_groups} groups of width {width}", 1e6 * statistics.median(times))]
