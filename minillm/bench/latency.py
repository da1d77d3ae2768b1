"""``latency``: how fast a few sequences decode together.

Protocol: random weights in a model's shape (or real ones with ``--model``), ``batch_size`` prompts of ``input_len``
random tokens, greedy, end-of-sequence ignored, ``output_len`` tokens each, one warm-up run, then ``RUNS`` runs of which
the median counts. With a peer, its runs alternate with ours in the same process.

The floor is the time to read the weights once per step at the bandwidth measured in the same run; where several ranks
share the model, rank 0's part of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from minillm.bench.hardware import read_bandwidth
from minillm.bench.meter import Ceilings, metered
from minillm.llm import LLM
from minillm.params import SamplingParams

RUNS = 3


@dataclass(frozen=True)
class Timing:
    """One run, in seconds."""

    first_token: float  # from the request to the first token
    total: float


@dataclass(frozen=True)
class LatencyResult:
    """Medians over the runs; rates in tokens per second over all sequences."""

    name: str
    batch_size: int
    time_to_first_token: float
    time_per_output_token: float
    decode_rate: float  # tokens after the first, over the time after the first
    overall_rate: float  # all tokens over all time
    floor_rate: float
    fraction_of_floor: float
    idle_share: float | None = None  # of a GPU, between decode steps
    peak_kv_tokens: int | None = None


def measure(
    llm: LLM, *, name: str, batch_size: int, input_len: int, output_len: int, peer: Callable[..., Any] | None = None
) -> list[LatencyResult]:
    """Measure ``llm``, and the peer that ``peer(llm)`` makes, on the same prompts."""
    generator = torch.Generator().manual_seed(0)
    vocab = llm.engine.runner.model.config.vocab_size
    prompts = torch.randint(0, vocab, (batch_size, input_len), generator=generator).tolist()
    runners: dict[str, Callable[[int], Timing]] = {f"minillm {name}": lambda count: _run(llm, prompts, count)}
    if peer is not None:
        run_peer, peer_name = peer(llm, prompts)
        runners[f"{peer_name} {name}"] = run_peer
    timings: dict[str, list[Timing]] = {label: [] for label in runners}
    for run in runners.values():
        run(min(8, output_len))
    for _ in range(RUNS):
        for label, run in runners.items():
            timings[label].append(run(output_len))
    model = llm.engine.runner.model
    bandwidth = read_bandwidth(model.device)
    with metered(llm.engine, Ceilings(bandwidth, None)) as meter:
        _run(llm, prompts, output_len)
    floor_rate = batch_size * bandwidth / model.weight_bytes
    results = [_result(label, runs, batch_size, output_len, floor_rate) for label, runs in timings.items()]
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


def _result(name: str, runs: list[Timing], batch_size: int, output_len: int, floor_rate: float) -> LatencyResult:
    first = statistics.median(run.first_token for run in runs)
    total = statistics.median(run.total for run in runs)
    per_token = statistics.median((run.total - run.first_token) / max(1, output_len - 1) for run in runs)
    rate = batch_size / per_token if per_token else 0.0
    return LatencyResult(
        name=name,
        batch_size=batch_size,
        time_to_first_token=first,
        time_per_output_token=per_token,
        decode_rate=rate,
        overall_rate=batch_size * output_len / total,
        floor_rate=floor_rate,
        fraction_of_floor=rate / floor_rate,
    )
