"""``throughput``, ``parallel``, ``prefix``, ``beam``, ``stall``: whole workloads through the engine.

Protocol: random tokens, end-of-sequence ignored, random weights in a model's shape (or real ones with ``--model``), one
warm-up run of the whole workload, then the measured one. The prefix cache starts empty, but for what ``prefix`` warms.

==========  =========================================================================================
throughput  256 requests, prompts and answers uniform from 100 to 1,024 tokens, temperature 0.6
parallel    n = 8 samples of each of 32 prompts of 512 tokens, 128 tokens each
prefix      128 requests that share 2,048 tokens, cached, with 64 of their own, 128 tokens each, greedy
beam        width 4, 8 prompts of 256 tokens, 128 tokens; the tokens of the best beam count
stall       16 sequences decode while a prompt of 8,000 tokens arrives: the longest wait for a token
==========  =========================================================================================
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minillm.bench.meter import Ceilings, Meter, metered
from minillm.bench.registry import ScaleOptions as Options
from minillm.bench.registry import Subject
from minillm.bench.table import shown
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import BeamSearchParams, Params, SamplingParams

Request = tuple[list[int], Params]


@dataclass(frozen=True)
class WorkloadResult:
    """One measured run. Times in seconds; medians over the requests."""

    workload: str
    name: str
    num_requests: int = shown("requests", ",")
    output_tokens: int = shown("output tokens", ",")  # of the best beam only, in a beam search
    seconds: float = shown("seconds", ".2f")
    rate: float = shown("output tokens per second", ",.0f")
    time_to_first_token: float = shown("ms to the first token, median", ",.0f", 1e3)
    time_per_output_token: float = shown("ms per output token, median", ".2f", 1e3)
    floor_seconds: float = shown("seconds of the floor", ".2f")  # of bytes and FLOPs at the measured ceilings
    fraction_of_floor: float = shown("of it reached", ".0%")
    idle_share: float | None = shown("GPU idle between decode steps", ".1%")
    peak_kv_tokens: int = shown("peak KV use, token slots", ",")
    peak_kv_share: float = shown("peak KV use, of the pool", ".0%")
    # ``stall`` only: between two tokens of a sequence that decodes
    longest_wait: float | None = shown("ms of the longest wait", ".1f", 1e3, default=None)


def throughput(rng: random.Random, vocab: int, scale: float) -> list[Request]:
    low, high = max(1, int(100 * scale)), max(1, int(1024 * scale))
    return [
        (
            _prompt(rng, vocab, rng.randint(low, high)),
            SamplingParams(temperature=0.6, max_tokens=rng.randint(low, high), ignore_eos=True, seed=number),
        )
        for number in range(256)
    ]


def parallel(rng: random.Random, vocab: int, scale: float) -> list[Request]:
    params = SamplingParams(n=8, temperature=1.0, max_tokens=max(1, int(128 * scale)), ignore_eos=True, seed=0)
    return [(_prompt(rng, vocab, max(1, int(512 * scale))), params) for _ in range(32)]


def prefix(rng: random.Random, vocab: int, scale: float) -> list[Request]:
    shared = _prompt(random.Random(1), vocab, max(1, int(2048 * scale)))  # the warm-up's, too
    params = SamplingParams(temperature=0, max_tokens=max(1, int(128 * scale)), ignore_eos=True)
    return [(shared + _prompt(rng, vocab, max(1, int(64 * scale))), params) for _ in range(128)]


def beam(rng: random.Random, vocab: int, scale: float) -> list[Request]:
    params = BeamSearchParams(beam_width=4, n=1, max_tokens=max(1, int(128 * scale)), ignore_eos=True)
    return [(_prompt(rng, vocab, max(1, int(256 * scale))), params) for _ in range(8)]


REQUESTS: dict[str, Callable[[random.Random, int, float], list[Request]]] = {
    "throughput": throughput,
    "parallel": parallel,
    "prefix": prefix,
    "beam": beam,
}


def measure(subject: Subject, options: Options) -> WorkloadResult:
    """Run one of `REQUESTS`, or ``stall``, twice and measure the second run."""
    llm, workload, scale = subject.llm, subject.workload, options.scale
    model = llm.engine.runner.model
    ceilings, vocab = Ceilings.measure(model.device), model.config.vocab_size
    if workload == "stall":
        _stall(llm, random.Random(0), scale)
        llm.reset_prefix_cache()
        with metered(llm.engine, ceilings) as meter:
            run = _stall(llm, random.Random(2), scale)
    else:
        make = REQUESTS[workload]
        llm.reset_prefix_cache()
        _drive(llm, make(random.Random(0), vocab, scale))
        if workload != "prefix":
            llm.reset_prefix_cache()
        requests = make(random.Random(2), vocab, scale)
        with metered(llm.engine, ceilings) as meter:
            run = _drive(llm, requests)
    return _result(subject, run, meter)


@dataclass
class _Run:
    seconds: float
    first: list[float]
    per_token: list[float]
    output_tokens: int
    num_requests: int = 0
    longest_wait: float | None = None


def _prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def _synchronize(llm: LLM) -> None:
    if llm.engine.runner.model.device.type == "cuda":
        torch.cuda.synchronize()


def _drive(llm: LLM, requests: list[Request]) -> _Run:
    engine = llm.engine
    _synchronize(llm)
    began = time.perf_counter()
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
    _synchronize(llm)
    seconds = time.perf_counter() - began
    run = _Run(seconds, [], [], 0, len(requests))
    for output in engine.take_finished():
        if output.error is not None:
            raise UsageError(f"a request of the workload failed: {output.error}")
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        run.first.append(metrics.first_token_time - metrics.arrival_time)
        count = max(len(completion.token_ids) for completion in output.outputs)
        run.per_token.append((metrics.finished_time - metrics.first_token_time) / max(1, count - 1))
        run.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
    return run


def _stall(llm: LLM, rng: random.Random, scale: float) -> _Run:
    """Sequences that decode, and a long prompt that comes between."""
    engine, vocab = llm.engine, llm.engine.runner.model.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=max(40, int(200 * scale)), ignore_eos=True)
    began = time.perf_counter()
    for number in range(16):
        engine.add_request(str(number), _prompt(rng, vocab, max(1, int(100 * scale))), params)
    seen: dict[str, float] = {}
    longest, steps, added = 0.0, 0, False
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id != "long":
                if added and delta.request_id in seen:
                    longest = max(longest, now - seen[delta.request_id])
                seen[delta.request_id] = now
        steps += 1
        if steps == 20:
            added = True
            short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            engine.add_request("long", _prompt(rng, vocab, max(1, int(8000 * scale))), short)
    outputs = engine.take_finished()
    seconds = time.perf_counter() - began
    first = [o.metrics.time_to_first_token or 0.0 for o in outputs if o.metrics and o.request_id == "long"]
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return _Run(seconds, first, [seconds / params.max_tokens], count, len(outputs), longest)


def _result(subject: Subject, run: _Run, meter: Meter) -> WorkloadResult:
    cache = subject.llm.engine.cache
    return WorkloadResult(
        workload=subject.workload,
        name=subject.name,
        num_requests=run.num_requests,
        output_tokens=run.output_tokens,
        seconds=run.seconds,
        rate=run.output_tokens / run.seconds,
        time_to_first_token=statistics.median(run.first),
        time_per_output_token=statistics.median(run.per_token),
        floor_seconds=meter.floor,
        fraction_of_floor=meter.floor / run.seconds,
        idle_share=meter.idle_share,
        peak_kv_tokens=meter.peak_blocks * cache.block_size,
        peak_kv_share=meter.peak_blocks / cache.num_blocks,
        longest_wait=run.longest_wait,
    )
