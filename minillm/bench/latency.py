"""``latency``: measure how fast a few sequences decode together.

A step's time is compared with the floor, the time to read the weights once. docs/performance.md describes the protocol.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from minillm.bench.meter import LoadLimits, metered, read_bandwidth
from minillm.bench.peers import PEERS, Timing
from minillm.bench.table import ModelOptions, Subject, shown
from minillm.bench.workloads import drive, times_of
from minillm.checks import choice, integer
from minillm.llm import LLM
from minillm.params import MAX_TOKENS, SamplingParams

RUNS = 3
_LOOP = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@dataclass(frozen=True)
class Options(ModelOptions):
    batch_size: int = integer(1, 1, MAX_TOKENS, help="sequences in the batch")
    input_len: int = integer(128, 1, MAX_TOKENS, help="prompt tokens per sequence")
    output_len: int = integer(256, 1, MAX_TOKENS, help="generated tokens per sequence")
    peer: str | None = choice(None, tuple(PEERS), metavar="PEER", help="also measure this program, in the same process")
    busy: int = integer(0, 0, 1024, help="measure again next to N processes that each keep a core busy")


@dataclass(frozen=True)
class LatencyResult:
    """The result of one program, minillm or a peer: medians over the runs.

    Rates are tokens per second, summed over all sequences.
    """

    name: str = shown("", width=32)
    batch_size: int = shown("sequences", "d")
    time_to_first_token: float = shown("first ms", ".0f", 1e3)
    time_per_output_token: float = shown("ms/token", ".2f", 1e3)
    decode_rate: float = shown("decode tok/s", ".1f")  # tokens after the first token, per second after the first token
    overall_rate: float = shown("all tok/s", ".1f")  # all tokens, per second of the whole run
    floor_rate: float = shown("floor tok/s", ".1f")
    fraction_of_floor: float = shown("of floor", ".0%")
    idle_share: float | None = shown("GPU idle", ".1%", default=None)  # share of time between decode steps
    peak_kv_tokens: int | None = None


def measure(subject: Subject, options: Options) -> list[LatencyResult]:
    """Measure the model on random prompts. If a peer is given, alternate with runs of the peer on the same prompts.

    With `Options.busy`, measure again while that many other processes each keep a core busy.
    """
    llm, model = subject.llm, subject.llm.engine.runner.model
    generator = torch.Generator().manual_seed(0)
    size = (options.batch_size, options.input_len)
    prompts = torch.randint(0, model.config.vocab_size, size, generator=generator).tolist()
    runners: dict[str, Callable[[int], Timing]] = {f"minillm {subject.name}": partial(_run, llm, prompts)}
    if options.peer is not None:
        run_peer, peer_name = PEERS[options.peer](subject, prompts)
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
    with metered(llm.engine, LoadLimits(bandwidth)) as meter:
        _run(llm, prompts, options.output_len)
    floor_rate = options.batch_size * bandwidth / model.weight_bytes
    first, *rest = (_result(label, runs, options, floor_rate) for label, runs in timings.items())
    return [replace(first, idle_share=meter.idle_share, peak_kv_tokens=meter.peak_tokens), *rest]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy inside the ``with``, each with a child process. The children end with this process."""
    command = [sys.executable, "-I", "-S", "-c", _LOOP, str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)
        )
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is busy from now on
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _run(llm: LLM, prompts: list[list[int]], output_len: int) -> Timing:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    llm.reset_prefix_cache()  # it holds the prompts of the last run
    seconds, outputs = drive(llm.engine, [(prompt, params) for prompt in prompts])
    return max(times_of(output)[0] for output in outputs), seconds


def _result(name: str, runs: list[Timing], options: Options, floor_rate: float) -> LatencyResult:
    first, total = map(statistics.median, zip(*runs, strict=True))
    per_token = statistics.median((total - first) / max(1, options.output_len - 1) for first, total in runs)
    rate = options.batch_size / per_token if per_token else 0.0
    overall_rate = options.batch_size * options.output_len / total
    return LatencyResult(name, options.batch_size, first, per_token, rate, overall_rate, floor_rate, rate / floor_rate)
