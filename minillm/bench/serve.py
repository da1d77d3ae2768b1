"""``serve``: requests that arrive by chance (a Poisson process), as a server's users do.

Prompts and answers are those of ``throughput``. The engine runs in this process; between steps, requests whose time has
come are added. A request's normalised latency is its time from arrival to end over its tokens (Orca, Yu et al. 2022).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from minillm.bench.registry import ScaleOptions, Subject
from minillm.bench.table import shown
from minillm.bench.workloads import throughput, times_of
from minillm.checks import integer, number
from minillm.llm import LLM


@dataclass(frozen=True)
class Options(ScaleOptions):
    rate: float = number(4.0, 0, 1e6, above=True, help="requests per second")
    num_requests: int = integer(256, 1, 1 << 24, help="in all")


@dataclass(frozen=True)
class ServeResult:
    """Seconds as (median, 90th, 99th percentile)."""

    rate: float = shown("requests per second, offered", "g")
    num_requests: int = shown("requests", ",")
    seconds: float = shown("seconds", ".2f")
    output_rate: float = shown("tokens per second", ",.0f")
    time_to_first_token: tuple[float, float, float] = shown("ms to first token, p50/p90/p99", ".1f", 1e3)
    time_per_output_token: tuple[float, float, float] = shown("ms per output token", ".1f", 1e3)
    normalised_latency: tuple[float, float, float] = shown("ms of normalised latency", ".1f", 1e3)


def measure(subject: Subject, options: Options) -> ServeResult:
    """Warm up with a few requests at once, then offer them at the rate asked for."""
    _serve(subject.llm, 1e6, min(32, options.num_requests), options.scale)
    return _serve(subject.llm, options.rate, options.num_requests, options.scale)


def _serve(llm: LLM, rate: float, num_requests: int, scale: float) -> ServeResult:
    rng, engine = random.Random(0), llm.engine
    requests = throughput(rng, engine.runner.model.config.vocab_size, scale, num_requests)
    arrivals = list(accumulate((rng.expovariate(rate) for _ in requests[1:]), initial=0.0))
    llm.reset_prefix_cache()
    began, began_clock = time.perf_counter(), time.monotonic()
    added = 0
    while added < num_requests or engine.has_work:
        now = time.perf_counter() - began
        while added < num_requests and arrivals[added] <= now:
            group = engine.add_request(str(added), *requests[added])
            group.metrics.arrival_time = began_clock + arrivals[added]
            added += 1
        if engine.has_work:
            engine.step()
        else:
            time.sleep(max(0.0, min(0.001, arrivals[added] - now)))
    seconds = time.perf_counter() - began
    outputs = engine.take_finished()
    first, per_token, whole = zip(*map(times_of, outputs), strict=True)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    normalised = [each / count for each, count in zip(whole, counts, strict=True)]
    times = map(_percentiles, (first, per_token, normalised))
    return ServeResult(rate, num_requests, seconds, sum(counts) / seconds, *times)


def _percentiles(values: Iterable[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99
