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
from dataclasses import dataclass, replace

from minillm.bench.meter import Ceilings, metered
from minillm.bench.registry import ScaleOptions as Options
from minillm.bench.registry import Subject
from minillm.bench.table import shown
from minillm.bench.timing import synchronize
from minillm.errors import UsageError
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams

Request = tuple[list[int], Params]
MakeRequests = Callable[[random.Random, int, float], list[Request]]  # of a vocabulary's size and a scale


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
    floor_seconds: float = shown("seconds of the floor", ".2f", default=0.0)  # of bytes and FLOPs at the ceilings
    fraction_of_floor: float = shown("of it reached", ".0%", default=0.0)
    idle_share: float | None = shown("GPU idle between decode steps", ".1%", default=None)
    peak_kv_tokens: int = shown("peak KV use, token slots", ",", default=0)
    peak_kv_share: float = shown("peak KV use, of the pool", ".0%", default=0.0)
    # ``stall`` only: between two tokens of a sequence that decodes
    longest_wait: float | None = shown("ms of the longest wait", ".1f", 1e3, default=None)


def measure(subject: Subject, options: Options) -> WorkloadResult:
    """Run one of `REQUESTS`, or ``stall``, twice and measure the second run."""
    llm, cache, scale = subject.llm, subject.llm.engine.cache, options.scale
    ceilings = Ceilings.measure(llm.engine.runner.model.device)
    run = _stall if subject.workload == "stall" else _drive
    llm.reset_prefix_cache()
    run(subject, random.Random(0), scale)
    if subject.workload != "prefix":
        llm.reset_prefix_cache()
    with metered(llm.engine, ceilings) as meter:
        result = run(subject, random.Random(2), scale)
    return replace(
        result,
        floor_seconds=meter.floor,
        fraction_of_floor=meter.floor / result.seconds,
        idle_share=meter.idle_share,
        peak_kv_tokens=meter.peak_tokens,
        peak_kv_share=meter.peak_blocks / cache.num_blocks,
    )


def throughput(rng: random.Random, vocab: int, scale: float, count: int = 256) -> list[Request]:
    low, high = _scaled(100, scale), _scaled(1024, scale)
    return [
        (
            _prompt(rng, vocab, rng.randint(low, high)),
            SamplingParams(temperature=0.6, max_tokens=rng.randint(low, high), ignore_eos=True, seed=number % 256),
        )
        for number in range(count)
    ]


def _alike(count: int, length: int, params: Params, *, shared: int = 0) -> MakeRequests:
    """``count`` requests for 128 tokens each, of ``length`` tokens of their own behind ``shared`` ones."""

    def make(rng: random.Random, vocab: int, scale: float) -> list[Request]:
        prefix = _prompt(random.Random(1), vocab, _scaled(shared, scale)) if shared else []  # the warm-up's, too
        scaled = replace(params, max_tokens=_scaled(128, scale))
        return [(prefix + _prompt(rng, vocab, _scaled(length, scale)), scaled) for _ in range(count)]

    return make


REQUESTS: dict[str, MakeRequests] = {
    "throughput": throughput,
    "parallel": _alike(32, 512, SamplingParams(n=8, temperature=1.0, ignore_eos=True, seed=0)),
    "prefix": _alike(128, 64, SamplingParams(temperature=0, ignore_eos=True), shared=2048),
    "beam": _alike(8, 256, BeamSearchParams(beam_width=4, n=1, ignore_eos=True)),
}


def _prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def _scaled(length: int, scale: float) -> int:
    return max(1, int(length * scale))


def times_of(output: RequestOutput) -> tuple[float, float, float]:
    """Seconds of a finished request: to its first token, for each later one of its longest completion, and in all.

    Raises:
        UsageError: the request failed.
    """
    if output.error is not None:
        raise UsageError(f"a request of the workload failed: {output.error}")
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    later = max(len(completion.token_ids) for completion in output.outputs) - 1
    per_token = (metrics.finished_time - metrics.first_token_time) / max(1, later)
    return metrics.first_token_time - metrics.arrival_time, per_token, metrics.finished_time - metrics.arrival_time


def _drive(subject: Subject, rng: random.Random, scale: float) -> WorkloadResult:
    """All requests of a workload at once."""
    engine = subject.llm.engine
    model = engine.runner.model
    requests = REQUESTS[subject.workload](rng, model.config.vocab_size, scale)
    synchronize(model.device)
    began = time.perf_counter()
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
    synchronize(model.device)
    seconds = time.perf_counter() - began
    outputs = engine.take_finished()
    first, per_token, _ = map(statistics.median, zip(*map(times_of, outputs), strict=True))
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return _result(subject, len(requests), tokens, seconds, first, per_token)


def _stall(subject: Subject, rng: random.Random, scale: float) -> WorkloadResult:
    """Sequences that decode, and a long prompt that comes between: the time to its first token is told."""
    engine, vocab = subject.llm.engine, subject.llm.engine.runner.model.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=max(40, int(200 * scale)), ignore_eos=True)
    began = time.perf_counter()
    for number in range(16):
        engine.add_request(str(number), _prompt(rng, vocab, _scaled(100, scale)), params)
    seen: dict[str, float] = {}
    longest, steps = 0.0, 0
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter()
        for request_id in {delta.request_id for delta in deltas} - {"long"}:
            if steps >= 20:
                longest = max(longest, now - seen.get(request_id, now))
            seen[request_id] = now
        steps += 1
        if steps == 20:
            short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            engine.add_request("long", _prompt(rng, vocab, _scaled(8000, scale)), short)
    outputs = engine.take_finished()
    seconds = time.perf_counter() - began
    first = next(times_of(output)[0] for output in outputs if output.request_id == "long")
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    result = _result(subject, len(outputs), count, seconds, first, seconds / params.max_tokens)
    return replace(result, longest_wait=longest)


def _result(subject: Subject, count: int, tokens: int, seconds: float, first: float, each: float) -> WorkloadResult:
    return WorkloadResult(subject.workload, subject.name, count, tokens, seconds, tokens / seconds, first, each)
