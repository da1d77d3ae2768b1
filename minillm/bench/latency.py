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
from typing import TYPE_CHECKING, Any, ClassVar

from minillm.bench.busy import busy
from minillm.bench.peers import Timing, transformers_peer
from minillm.bench.registry import ModelOptions, Subject, Workload
from minillm.bench.table import Column
from minillm.checks import custom, integer
from minillm.errors import UsageError
from minillm.params import MAX_TOKENS, SamplingParams

if TYPE_CHECKING:
    from minillm.llm import LLM

RUNS = 3


def _peer(name: str, value: Any) -> str | None:
    if value not in (None, "transformers"):
        raise UsageError(f"{name} must be transformers, not {value!r}")
    return value


@dataclass(frozen=True)
class LatencyOptions(ModelOptions):
    batch_size: int = integer(1, 1, MAX_TOKENS, help="sequences that decode together")
    input_len: int = integer(128, 1, MAX_TOKENS, help="prompt tokens of each")
    output_len: int = integer(256, 1, MAX_TOKENS, help="tokens that each generates")
    peer: str | None = custom(None, _peer, metavar="{transformers}", help="measure this as well, in the same process")
    busy: int = integer(0, 0, 1024, help="measure once more, beside N other processes that each keep a core busy")


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

    COLUMNS: ClassVar = (
        Column("", lambda r: r.name, width=32),
        Column("decode tok/s", lambda r: r.decode_rate, ".1f"),
        Column("ms/token", lambda r: 1e3 * r.time_per_output_token, ".2f"),
        Column("first ms", lambda r: 1e3 * r.time_to_first_token, ".0f"),
        Column("all tok/s", lambda r: r.overall_rate, ".1f"),
        Column("floor tok/s", lambda r: r.floor_rate, ".1f"),
        Column("of floor", lambda r: r.fraction_of_floor, ".0%"),
        Column("GPU idle", lambda r: r.idle_share, ".1%"),
    )


def measure(subject: Subject, options: LatencyOptions) -> list[LatencyResult]:
    """Measure the model and the peer on the same prompts, each alone and, if asked for, on a busy machine."""
    import torch

    from minillm.bench.hardware import read_bandwidth
    from minillm.bench.meter import Ceilings, metered

    llm, model = subject.llm, subject.llm.engine.runner.model
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.input_len)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    runners: dict[str, Callable[[int], Timing]] = {f"minillm {subject.name}": partial(_run, llm, prompts)}
    if options.peer is not None:
        run_peer, peer_name = transformers_peer(llm, prompts)
        runners[f"{peer_name} {subject.name}"] = run_peer
    for run in runners.values():
        run(min(8, options.output_len))
    timings: dict[str, list[Timing]] = {}
    for _ in range(RUNS):
        for others in sorted({0, options.busy}):
            with busy(others):
                for label, run in runners.items():
                    beside = f", {others} busy" if others else ""
                    timings.setdefault(label + beside, []).append(run(options.output_len))
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


def _result(name: str, runs: list[Timing], options: LatencyOptions, floor_rate: float) -> LatencyResult:
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


WORKLOADS = {"latency": Workload(LatencyOptions, measure)}
