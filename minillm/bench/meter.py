"""Measure wall-clock times, the best rates of the machine, and the steps of an engine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from minillm.bench.table import shown
from minillm.engine.engine import Engine
from minillm.kernels.timing import device_seconds, now
from minillm.runner.observers import StepObserver
from minillm.runner.step import StepWork


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall-clock time of ``run`` in seconds, including its work on the device.

    One call to warm up is not counted.
    """
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def read_bandwidth(device: torch.device, size: int = 1 << 29) -> float:
    """Return the median memory bandwidth in bytes per second: of reads on a CPU, of reads plus writes of a copy on a
    GPU.
    """
    data = torch.randn(size // 4, device=device)
    if device.type != "cuda":
        return size / seconds_of(data.sum, device, 7)
    target = torch.empty_like(data)
    return 2 * size / seconds_of(lambda: target.copy_(data), device, 7)


@dataclass(frozen=True)
class LoadLimits:
    """The best rates that were measured on this machine."""

    copy_bandwidth: float = shown("copy, TB/s", ".2f", 1e-12)  # bytes per second, see `read_bandwidth`
    # FLOPs per second of a large bfloat16 matmul; infinite if not measured (on a CPU, memory bandwidth is the limit)
    matmul_rate: float = shown("bfloat16 matmuls, TFLOP/s", ".0f", 1e-12, default=math.inf)

    @classmethod
    def measure(cls, device: torch.device, size: int = 1 << 29) -> LoadLimits:
        """Measure copies of ``size`` bytes, and on a GPU also large matmuls."""
        bandwidth = read_bandwidth(device, size)
        if device.type != "cuda":
            return cls(bandwidth)
        a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        return cls(bandwidth, 2 * 8192**3 / device_seconds(lambda: a @ b, 10))


@dataclass
class Meter(StepObserver):
    """An observer of an engine's steps.

    It computes the floor, a lower bound of their time, and other figures of a run.
    """

    engine: Engine
    limits: LoadLimits
    floor: float = 0.0  # seconds that all steps would take at the machine's limits
    idle_share: float | None = None  # share of time in which the GPU is idle between successive decode steps
    peak_blocks: int = 0  # maximum blocks in use
    # For each step: events at the begin and at the end of a decode step on the GPU's clock; empty for other steps.
    _marks: list[list[torch.cuda.Event]] = field(default_factory=list)

    @property
    def peak_tokens(self) -> int:
        return self.peak_blocks * self.engine.cache.block_size

    def begin(self, work: StepWork) -> None:
        """Add the least time of a step to the floor.

        The step reads the weights once and, if it decodes, every used block once. If its matmuls take longer, their
        time counts. Both are computed for the part of the model that this process holds.
        """
        model, cache = self.engine.runner.model, self.engine.cache
        config, bytes_read = model.local, model.weight_bytes
        if work.decode is not None or work.num_decodes:
            used = cache.num_blocks - cache.num_free
            bytes_read += used * cache.block_size * config.kv_bytes_per_token(model.kv_element_size)
        flops = 2 * config.num_parameters * work.num_tokens
        self.floor += max(bytes_read / self.limits.copy_bandwidth, flops / self.limits.matmul_rate)
        if model.device.type == "cuda":
            self._marks.append([now()] if work.decode is not None and not work.chunks else [])

    def end(self) -> None:
        """Record the end of a decode step's work. If this is called again for the same step, the last call counts."""
        if self._marks and self._marks[-1]:
            self._marks[-1][1:] = [now()]

    def conclude(self) -> None:
        """Compute `idle_share` from the gaps between the end of a decode step and the start of the next one."""
        if self._marks:
            torch.cuda.synchronize()
        pairs = [(before, after) for before, after in pairwise(self._marks) if before and after]
        idle = sum(max(0.0, before[1].elapsed_time(after[0])) for before, after in pairs)
        total = sum(before[0].elapsed_time(after[0]) for before, after in pairs)
        self.idle_share = idle / total if total else None


@contextmanager
def metered(engine: Engine, limits: LoadLimits) -> Iterator[Meter]:
    """Measure every step of ``engine`` inside the ``with``.

    The yielded meter has its final figures after the ``with``.
    """
    meter = Meter(engine, limits)
    engine.figures.reset_peaks()
    engine.runner.observers.append(meter)
    try:
        yield meter
        meter.conclude()
    finally:
        engine.runner.observers.remove(meter)
        meter.peak_blocks = engine.figures.cache_stats().peak_used_blocks
