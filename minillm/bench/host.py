"""``host``: measure the CPU time of a step on one core, without a model.

The tokens, and the candidates of beam searches, are random.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from minillm.beams.candidates import BeamStep
from minillm.beams.method import Beams, Searches, beam_step
from minillm.beams.search import Candidate
from minillm.bench.grammar_steps import grammar_steps
from minillm.bench.table import NoOptions, shown
from minillm.cache import BlockManager
from minillm.engine.admission import Admission
from minillm.engine.engine import Engine, Step
from minillm.engine.preemption import Preemption
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.kernels import AttentionShape, Costs, Field
from minillm.loading.engine import methods_for
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.runner.device.beams import DeviceBeams
from minillm.runner.device.rows import Rows, Sharing
from minillm.sequence import Chunk, Schedule, SequenceGroup
from minillm.text.tokenizer import Tokenizer
from minillm.weights.files import find_downloaded
from minillm.weights.manifest import default_model

_VOCAB, _STEPS = 49152, 200


@dataclass(frozen=True)
class HostResult:
    """The median time per step of one kind of work, such as "decode, 256 sequences: scheduler and cache"."""

    what: str = shown("", width=52)
    microseconds: float = shown("us per step", ".0f")


class _Runner:
    """A stand-in for the runner that needs no device.

    Its method `draw` returns the runner itself, with random tokens.
    """

    may_run_ahead = may_compute_ahead = False
    tokens: list[int]  # the next step's tokens, chosen before the step is timed

    def draw(self, logits: object, draws: list[Chunk]) -> _Runner:
        return self

    def wait(self) -> tuple[list[int], list[None], list[bool]]:
        return self.tokens, [None] * len(self.tokens), [False] * len(self.tokens)


def measure(options: NoOptions) -> Iterator[HostResult]:
    """Measure all kinds of steps. Yield a result for each kind, and for each part of a step with a schema."""
    for times in (_decode_step(256), _beam_step(32, 4), _followed_step(32, 4), _followed_step(8, 4)):
        for what, seconds in times.items():
            yield HostResult(what, 1e6 * statistics.median(seconds))
    default = find_downloaded(default_model())
    known = None if default is None or default.path.is_file() else Tokenizer.from_directory(default.path)
    for vocab, tokenizer in ((_VOCAB, known), (128256, None)):
        for num_seqs in (1, 16, 64):
            parts, name = grammar_steps(num_seqs, vocab, tokenizer), f"step, {num_seqs} with a schema, {vocab:,} tokens"
            yield HostResult(name, 1e6 * sum(parts.values()))
            for part, taken in parts.items():
                yield HostResult(f"  {part}", 1e6 * taken)


def _engine(runner: Any, num_seqs: int, num_requests: int, params: Params) -> Engine:
    """Return an engine with ``num_requests`` requests for random prompts of 50 to 300 tokens."""
    scheduler = Scheduler(Admission(Preemption(BlockManager(num_seqs * 80, 16, prefix_caching=True))), num_seqs, 8192)
    requests = Requests(scheduler, None, _VOCAB, 4096, frozenset([2]))
    engine = Engine(runner, requests, methods_for(requests, runner))
    rng = random.Random(0)
    for number in range(num_requests):
        engine.add_request(str(number), [rng.randrange(3, _VOCAB) for _ in range(rng.randint(50, 300))], params)
    return engine


def _scheduled(engine: Engine) -> tuple[float, Schedule, list[Chunk]]:
    """Schedule a step and mark it as computed.

    Returns: the CPU time of both in seconds; the schedule; the schedule's chunks that need logits.
    """
    began = time.perf_counter()
    schedule = engine.scheduler.schedule()
    engine.cache.take_copies()
    seconds = time.perf_counter() - began
    sampled = [chunk for chunk in schedule.chunks if chunk.num_logits]
    for row, chunk in enumerate(sampled):
        chunk.row = row
    began = time.perf_counter()
    engine.note_computed(schedule)
    return seconds + time.perf_counter() - began, schedule, sampled


def _decode_step(num_seqs: int) -> dict[str, list[float]]:
    rng, runner = random.Random(1), _Runner()
    engine = _engine(runner, num_seqs, num_seqs, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    accounting, rest = list[float](), list[float]()
    while len(accounting) < _STEPS:
        seconds, schedule, sampled = _scheduled(engine)
        runner.tokens = [rng.randrange(3, _VOCAB) for _ in sampled]
        noted = time.perf_counter()
        step = Step(schedule, [])
        engine.launch_flights(step, cast(Any, None), sampled)
        engine.conclude(step)
        done = time.perf_counter()
        if len(schedule.decodes) == num_seqs:
            accounting.append(seconds)
            rest.append(done - noted)
    name = f"decode, {num_seqs} sequences"
    return {f"{name}: scheduler and cache": accounting, f"{name}: draws, tokens to sequences": rest}


def _beam_step(num_groups: int, width: int) -> dict[str, list[float]]:
    params = BeamSearchParams(beam_width=width, max_tokens=1000, ignore_eos=True)
    rng, engine = random.Random(1), _engine(None, num_groups * width, num_groups, params)
    times: list[float] = []

    def candidates(step: BeamStep) -> list[Candidate]:
        found = [
            Candidate(value - rng.expovariate(1), beam, rng.randrange(3, _VOCAB))
            for beam, value in enumerate(step.searches[0].logprobs[: len(step.rows[0])])
            for _ in range(2 * width)
        ]
        return sorted(found, key=lambda candidate: -candidate.logprob)[: 2 * width]

    while len(times) < _STEPS:
        seconds, schedule, sampled = _scheduled(engine)
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
    return {f"beam step, {num_groups} groups of width {width}": times}


class _Searches:
    """Simulate a device that runs beam searches: return made-up continuations of every beam."""

    may_run_ahead = True
    found: list[list[tuple[float, int, int]]]  # the next step's continuations, chosen before the step is timed

    def __init__(self, num_beams: int) -> None:
        shape = AttentionShape(32, 8, 128, 2, 132)
        self.rows = Rows(num_beams, Field.TABLE + 256, 16, Sharing(shape, Costs()))

    def compute(self, beams: list[Chunk]) -> None:
        self.rows.work_for(beams, joins=False)
        self.rows.note_drawn(beams)
        self.groups = list(dict.fromkeys(chunk.group for chunk in beams))

    def take_choices(self) -> tuple[list[SequenceGroup], _Searches]:
        return self.groups, self

    def wait(self) -> list[list[tuple[float, int, int]]]:
        return self.found


def _followed_step(num_groups: int, width: int) -> dict[str, list[float]]:
    """Measure the CPU time of beam search steps in which the device chooses the beams.

    The measured work is the scheduler, the cache, the changes of device state, and the bookkeeping.

    Return a dictionary with one entry: the name of this kind of step -> the seconds of each measured step.
    """
    params = BeamSearchParams(beam_width=width, max_tokens=1000, ignore_eos=True)
    rng, device = random.Random(1), _Searches(num_groups * width)
    engine = _engine(None, num_groups * width, num_groups, params)
    beams = Beams(engine.requests, cast(DeviceBeams, device))
    for group in engine.requests.groups.values():
        group.method = beams
        beams.begin(group)
    times: list[float] = []
    while len(times) < _STEPS:
        seconds, schedule, sampled = _scheduled(engine)
        device.found = [
            sorted(
                (
                    (beam.cumulative_logprob - rng.expovariate(1), slot, rng.randrange(3, _VOCAB))
                    for slot, beam in enumerate(group.sequences)
                    for _ in range(2 * width)
                ),
                reverse=True,
            )[: 2 * width]
            for group in dict.fromkeys(chunk.group for chunk in sampled if chunk.group.device)
        ]
        _first_steps([chunk for chunk in sampled if not chunk.group.device], width)
        chosen = [chunk for chunk in sampled if chunk.group.device]
        began = time.perf_counter()
        if chosen:
            device.compute(chosen)
        step = Step(schedule, [])
        engine.launch_flights(step, cast(Any, None), chosen)
        engine.conclude(step)
        if len(chosen) == num_groups * width:
            times.append(seconds + time.perf_counter() - began)
    return {f"beam step on the device, {num_groups} groups of width {width}": times}


def _first_steps(prompts: list[Chunk], width: int) -> None:
    """Expand the single beam of each prompt to ``width`` beams. A search does this first step on the CPU."""
    for chunk in prompts:
        step = beam_step(chunk.group, {chunk.sequence.seq_id: chunk.row})
        best = [Candidate(-1.0 - i, 0, 3 + i) for i in range(2 * width)]
        cast(Beams, chunk.group.method).advance(step, [best], {})
