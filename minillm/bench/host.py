"""``host``: what a step costs beside the device's work, on one core: scheduler, cache, beams.

The device is played by nobody: tokens and candidates are made up beforehand, at random.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from minillm.beams.candidates import BeamStep
from minillm.beams.search import Candidate
from minillm.bench.registry import NoOptions, Workload
from minillm.bench.table import Column
from minillm.cache import BlockManager, SwapSpace
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.outputs import TokenLogprobs
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.runner.runner import reaches_the_end

_VOCAB = 49152
_STEPS = 200


@dataclass(frozen=True)
class HostResult:
    """Microseconds per step, median."""

    what: str
    microseconds: float

    COLUMNS: ClassVar = (
        Column("", lambda r: r.what, width=52),
        Column("us a step", lambda r: r.microseconds, ".0f"),
    )


class _Config:
    vocab_size = _VOCAB


class _Model:
    config = _Config()


class _Runner:
    model = _Model()


def _engine(num_blocks: int, max_num_seqs: int) -> Engine:
    cache = BlockManager(num_blocks, 16, prefix_caching=True)
    return Engine(
        runner=cast(Any, _Runner()),
        cache=cache,
        scheduler=Scheduler(cache, max_num_seqs, 8192, SwapSpace(0)),
        tokenizer=None,
        max_model_len=4096,
        eos_token_ids=frozenset([2]),
    )


def _add_requests(engine: Engine, rng: random.Random, count: int, params: Params) -> None:
    for number in range(count):
        prompt = [rng.randrange(3, _VOCAB) for _ in range(rng.randint(50, 300))]
        engine.add_request(str(number), prompt, params)


def measure(options: NoOptions) -> list[HostResult]:
    """Both figures, and their parts."""
    return [*_decode_step(256), *_beam_step(32, 4)]


def _decode_step(num_seqs: int) -> list[HostResult]:
    rng = random.Random(0)
    engine = _engine(num_seqs * 80, num_seqs)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    _add_requests(engine, rng, num_seqs, params)
    books: list[float] = []
    rest: list[float] = []
    while len(books) < _STEPS:
        began = time.perf_counter()
        schedule = engine.scheduler.schedule()
        engine.cache.take_copies()
        scheduled = time.perf_counter()
        sampled = [chunk for chunk in schedule.chunks if reaches_the_end(chunk)]
        noting = time.perf_counter()
        first = engine.note_computed(schedule)
        noted = time.perf_counter()
        draws, _ = engine.draws_of(sampled, first)
        for group, row in draws:
            engine.append_token(group, row.sequence, TokenLogprobs(rng.randrange(3, _VOCAB), 0.0))
        done = time.perf_counter()
        if len(schedule.decodes) == num_seqs:
            books.append(scheduled - began + noted - noting)
            rest.append(done - noted)
    return [
        HostResult(f"decode, {num_seqs} sequences: scheduler and cache", 1e6 * statistics.median(books)),
        HostResult(f"decode, {num_seqs} sequences: draws, tokens to sequences", 1e6 * statistics.median(rest)),
    ]


def _beam_step(num_groups: int, width: int) -> list[HostResult]:
    rng = random.Random(0)
    engine = _engine(num_groups * width * 80, num_groups * width)
    params = BeamSearchParams(beam_width=width, max_tokens=1000, ignore_eos=True)
    _add_requests(engine, rng, num_groups, params)
    times: list[float] = []

    def candidates(step: BeamStep) -> list[Candidate]:
        found = [
            Candidate(value - rng.expovariate(1), beam, rng.randrange(3, _VOCAB))
            for beam, value in enumerate(step.searches[0].logprobs[: len(step.rows[0])])
            for _ in range(2 * width)
        ]
        return sorted(found, key=lambda candidate: -candidate.logprob)[: 2 * width]

    while len(times) < _STEPS:
        began = time.perf_counter()
        schedule = engine.scheduler.schedule()
        engine.cache.take_copies()
        scheduled = time.perf_counter()
        sampled = [chunk for chunk in schedule.chunks if reaches_the_end(chunk)]
        noting = time.perf_counter()
        _, searching = engine.draws_of(sampled, engine.note_computed(schedule))
        steps = engine.beam_steps(searching)
        noted = time.perf_counter()
        found = [candidates(step) for step in steps]
        choosing = time.perf_counter()
        for (group, _), step, each in zip(searching, steps, found, strict=True):
            engine.advance_beams_of(group, step, [each], {})
        done = time.perf_counter()
        if len(schedule.decodes) == num_groups * width:
            times.append(scheduled - began + noted - noting + done - choosing)
    return [HostResult(f"beam step, {num_groups} groups of width {width}", 1e6 * statistics.median(times))]


WORKLOADS = {"host": Workload(NoOptions, measure)}
