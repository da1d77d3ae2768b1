"""``throughput``, ``parallel``, ``prefix``, ``beam``, ``stall``: measure batches of requests on the engine.

docs/performance.md describes the protocol. The prefix cache starts empty, except for the prefix that ``prefix`` warms.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minillm.bench.meter import LoadLimits, metered, synchronize
from minillm.bench.table import ScaleOptions, Subject, shown
from minillm.engine.engine import Engine
from minillm.errors import UsageError
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams

Request = tuple[list[int], Params]
MakeRequests = Callable[[random.Random, int, float], list[Request]]  # arguments: generator, vocabulary size, scale


@dataclass(frozen=True)
class WorkloadResult:
    """The result of one measured run. Times are in seconds, medians over the requests."""

    workload: str
    name: str
    num_requests: int = shown("requests", ",")
    output_tokens: int = shown("output tokens", ",")  # in a beam search, tokens of the best beam only
    seconds: float = shown("seconds", ".2f")
    rate: float = shown("output tokens per second", ",.0f")
    time_to_first_token: float = shown("ms to the first token, median", ",.0f", 1e3)
    time_per_output_token: float = shown("ms per output token, median", ".2f", 1e3)
    floor_seconds: float = shown("seconds of the floor", ".2f", default=0.0)  # see `Meter.floor`
    fraction_of_floor: float = shown("of it reached", ".0%", default=0.0)
    idle_share: float | None = shown("GPU idle between decode steps", ".1%", default=None)
    peak_kv_tokens: int = shown("peak KV use, token slots", ",", default=0)
    peak_kv_share: float = shown("peak KV use, of the pool", ".0%", default=0.0)
    # For ``stall`` only: the longest time between two tokens of a decoding sequence.
    longest_wait: float | None = shown("ms of the longest wait", ".1f", 1e3, default=None)


def measure(subject: Subject, options: ScaleOptions) -> WorkloadResult:
    """Run ``stall`` or one of the workloads in `REQUESTS` twice. Return the result of the second run."""
    llm, engine = subject.llm, subject.llm.engine
    run = _stall if subject.workload == "stall" else _at_once
    llm.reset_prefix_cache()
    run(subject, random.Random(0), options.scale)
    if subject.workload != "prefix":
        llm.reset_prefix_cache()
    with metered(engine, LoadLimits.measure(engine.runner.model.device)) as meter:
        result = run(subject, random.Random(2), options.scale)
    floor, share = meter.floor, meter.peak_blocks / engine.cache.num_blocks
    result = replace(result, floor_seconds=floor, fraction_of_floor=floor / result.seconds)
    return replace(result, idle_share=meter.idle_share, peak_kv_tokens=meter.peak_tokens, peak_kv_share=share)


def throughput(rng: random.Random, vocab: int, scale: float, count: int = 256) -> list[Request]:
    low, high = _scaled(100, scale), _scaled(1024, scale)

    def request(number: int) -> Request:
        prompt, max_tokens = _prompt(rng, vocab, rng.randint(low, high)), rng.randint(low, high)
        return prompt, SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True, seed=number % 256)

    return [request(number) for number in range(count)]


def _alike(count: int, length: int, params: Params, *, shared: int = 0) -> MakeRequests:
    """Return a function that makes ``count`` requests with prompts of equal length. Each request asks for 128 tokens.

    All prompts begin with the same ``shared`` tokens, followed by ``length`` random tokens of their own.
    """

    def make(rng: random.Random, vocab: int, scale: float) -> list[Request]:
        prefix = _prompt(random.Random(1), vocab, _scaled(shared, scale)) if shared else []  # as in the warm-up
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
    """Return three times of a finished request, in seconds.

    Returns:
        - the time from the request's arrival to its first token;
        - the mean time per token after the first, for the longest completion;
        - the time from the request's arrival to its end.

    Raises UsageError if the request failed.
    """
    if output.error is not None:
        raise UsageError(f"a request of the workload failed: {output.error}")
    metrics: Any = output.metrics  # a finished request has all of them
    began, first, ended = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
    later = max(len(completion.token_ids) for completion in output.outputs) - 1
    return first - began, (ended - first) / max(1, later), ended - began


def drive(engine: Engine, requests: list[Request]) -> tuple[float, list[RequestOutput]]:
    """Run the engine until all requests, which arrive at once, are answered. Return the seconds and the outputs."""
    device = engine.runner.model.device
    synchronize(device)
    began = time.perf_counter()
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
    synchronize(device)
    return time.perf_counter() - began, engine.take_finished()


def _at_once(subject: Subject, rng: random.Random, scale: float) -> WorkloadResult:
    engine = subject.llm.engine
    requests = REQUESTS[subject.workload](rng, engine.runner.model.config.vocab_size, scale)
    seconds, outputs = drive(engine, requests)
    first, per_token, _ = map(statistics.median, zip(*map(times_of, outputs), strict=True))
    return _result(subject, outputs, seconds, first, per_token)


def _stall(subject: Subject, rng: random.Random, scale: float) -> WorkloadResult:
    """Add a long prompt while 16 sequences decode, to see how long it delays their tokens.

    The result also has the time to the long prompt's first token.
    """
    engine, vocab = subject.llm.engine, subject.llm.engine.runner.model.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=max(40, int(200 * scale)), ignore_eos=True)
    began = time.perf_counter()
    for i in range(16):
        engine.add_request(str(i), _prompt(rng, vocab, _scaled(100, scale)), params)
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
    return replace(_result(subject, outputs, seconds, first, seconds / params.max_tokens), longest_wait=longest)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _result(
    subject: Subject, outputs: list[RequestOutput], seconds: float, first: float, per_token: float
) -> WorkloadResult:
    kind, count, tokens = subject.workload, len(outputs), sum(map(_num_tokens, outputs))
    return WorkloadResult(kind, subject.name, count, tokens, seconds, tokens / seconds, first, per_token)
