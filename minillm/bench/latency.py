"""``latency``: how fast a few sequences decode together.

Protocol: random weights in a model's shape (or real ones with ``--model``), ``batch_size`` prompts of ``input_len``
random tokens, greedy, end-of-sequence ignored, ``output_len`` tokens each, one warm-up run, then ``RUNS`` runs of which
the median counts. With a peer, its runs alternate with ours in the same process. With ``--busy N``, so do runs beside
which N other processes compute.

The floor is the time to read the weights once per step at the bandwidth measured in the same run; where several ranks
share the model, rank 0's part of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from minillm.bench.busy import busy
from minillm.bench.hardware import read_bandwidth
from minillm.bench.meter import Ceilings, metered
from minillm.bench.peers import PEERS, Timing
from minillm.bench.registry import ModelOptions, Subject
from minillm.bench.table import shown
from minillm.checks import custom, integer
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import MAX_TOKENS, SamplingParams

RUNS = 3


def _peer(name: str, value: str | None) -> str | None:
    if value is not None and value not in PEERS:
        raise UsageError(f"{name} must be one of {', '.join(PEERS)}, not {value!r}")
    return value


@dataclass(frozen=True)
class Options(ModelOptions):
    batch_size: int = integer(1, 1, MAX_TOKENS, help="sequences that decode together")
    input_len: int = integer(128, 1, MAX_TOKENS, help="prompt tokens of each")
    output_len: int = integer(256, 1, MAX_TOKENS, help="tokens that each generates")
    peer: str | None = custom(None, _peer, metavar="{transformers}", help="measure this too, in the same process")
    busy: int = integer(0, 0, 1024, help="measure again, beside N other processes that each keep a core busy")


@dataclass(frozen=True)
class LatencyResult:
    """Medians over the runs; rates in tokens per second over all sequences."""

    name: str = shown("", width=32)
    batch_size: int = shown("sequences", "d")
    time_to_first_token: float = shown("first ms", ".0f", 1e3)
    time_per_output_token: float = shown("ms/token", ".2f", 1e3)
    decode_rate: float = shown("decode tok/s", ".1f")  # tokens after the first, over the time after the first
    overall_rate: float = shown("all tok/s", ".1f")  # all tokens over all time
    floor_rate: float = shown("floor tok/s", ".1f")
    fraction_of_floor: float = shown("of floor", ".0%")
    idle_share: float | None = shown("GPU idle", ".1%", default=None)  # between decode steps
    peak_kv_tokens: int | None = None


def measure(subject: Subject, options: Options) -> list[LatencyResult]:
    """Measure the model and the peer on the same prompts, each on a quiet machine and, if asked for, on a busy one."""
    llm, model = subject.llm, subject.llm.engine.runner.model
    generator = torch.Generator().manual_seed(0)
    size = (options.batch_size, options.input_len)
    prompts = torch.randint(0, model.config.vocab_size, size, generator=generator).tolist()
    runners: dict[str, Callable[[int], Timing]] = {f"minillm {subject.name}": partial(_run, llm, prompts)}
    if options.peer is not None:
        run_peer, peer_name = PEERS[options.peer](llm, prompts)
        runners[f"{peer_name} {subject.name}"] = run_peer
    for run in runners.values():
        run(min(8, options.output_len))
    timings: dict[str, list[Timing]] = {}
    for _ in range(RUNS):
        for others in sorted({0, options.busy}):
            with busy(others):
                for label, run in runners.items():
                    label += f", {others} busy" if others else ""
                    timings.setdefault(label, []).append(run(options.output_len))
    bandwidth = read_bandwidth(model.device)
    with metered(llm.engine, Ceilings(bandwidth, None)) as meter:
        _run(llm, prompts, options.output_len)
    floor_rate = options.batch_size * bandwidth / model.weight_bytes
    results = [_result(label, runs, options, floor_rate) for label, runs in timings.items()]
    peak = meter.peak_blocks * llm.engine.cache.block_size
    results[0] = replace(results[0], idle_share=meter.idle_share, peak_kv_tokens=peak)
    return results


def _run(llm: LLM, prompts: list[list[int]], output_len: int) -> Timing:
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    engine.cache.reset_prefix_cache()  # the prompts of the last run would be found there
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    started: set[str] = set()
    first = 0.0
    while engine.has_work:
        for delta in engine.step():
            started.add(delta.request_id)
        if len(started) == len(prompts) and not first:
            first = time.perf_counter() - began
    engine.take_finished()
    return Timing(first, time.perf_counter() - began)


def _result(name: str, runs: list[Timing], options: Options, floor_rate: float) -> LatencyResult:
    first = statistics.median(run.first_token for run in runs)
    total = statistics.median(run.total for run in runs)
    per_token = statistics.median((run.total - run.first_token) / max(1, options.output_len - 1) for run in runs)
    rate = options.batch_size / per_token if per_token else 0.0
    return LatencyResult(
        name=name,
        batch_size=options.batch_size,
        time_to_first_token=first,
        time_per_output_token=per_token,
        decode_rate=rate,
        overall_rate=options.batch_size * options.output_len / total,
        floor_rate=floor_rate,
        fraction_of_floor=rate / floor_rate,
    )
