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
    """Return the median wall-clock seconds of ``run`` and its work on the device, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def read_bandwidth(device: torch.device, size: int = 1 << 29) -> float:
    """Return the median bytes per second of reads (CPU), or of reads plus writes in a copy (GPU)."""
    data = torch.randn(size // 4, device=device)
    if device.type != "cuda":
        return size / seconds_of(data.sum, device, 7)
    target = torch.empty_like(data)
    return 2 * size / seconds_of(lambda: target.copy_(data), device, 7)


@dataclass(frozen=True)
class Limits:
    """Hold the measured best rates of the machine."""

    copy_bandwidth: float = shown("copy, TB/s", ".2f", 1e-12)  # bytes per second, see `read_bandwidth`
    # FLOPs per second of a large bfloat16 product; infinite where it was not measured (on a CPU the bytes decide)
    matmul_rate: float = shown("bfloat16 matmuls, TFLOP/s", ".0f", 1e-12, default=math.inf)

    @classmethod
    def measure(cls, device: torch.device, size: int = 1 << 29) -> Limits:
        """Measure copies of ``size`` bytes, and on a GPU matmuls."""
        bandwidth = read_bandwidth(device, size)
        if device.type != "cuda":
            return cls(bandwidth)
        a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        return cls(bandwidth, 2 * 8192**3 / device_seconds(lambda: a @ b, 10))


@dataclass
class Meter(StepObserver):
    """Sum figures over the steps of a run."""

    engine: Engine
    limits: Limits
    floor: float = 0.0  # seconds
    idle_share: float | None = None  # of the time between the first and the last of successive decode steps
    peak_blocks: int = 0
    # The begin and the end of each decode step on the device's clock; an empty list for other steps.
    _marks: list[list[torch.cuda.Event]] = field(default_factory=list)

    @property
    def peak_tokens(self) -> int:
        return self.peak_blocks * self.engine.cache.block_size

    def begin(self, work: StepWork) -> None:
        """Add a step: it reads the weights and each used block of rank 0 once, or is limited by its matmuls."""
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
        """Mark the end of a decode step's work. The last call for a step counts."""
        if self._marks and self._marks[-1]:
            self._marks[-1][1:] = [now()]

    def conclude(self) -> None:
        """Compute the gaps between the end of one decode step and the start of the next, by the device's clock."""
        if self._marks:
            torch.cuda.synchronize()
        pairs = [(before, after) for before, after in pairwise(self._marks) if before and after]
        idle = sum(max(0.0, before[1].elapsed_time(after[0])) for before, after in pairs)
        total = sum(before[0].elapsed_time(after[0]) for before, after in pairs)
        self.idle_share = idle / total if total else None


@contextmanager
def metered(engine: Engine, limits: Limits) -> Iterator[Meter]:
    """Measure every step that ``engine`` takes inside the ``with``."""
    meter = Meter(engine, limits)
    engine.figures.reset_peaks()
    engine.runner.observers.append(meter)
    try:
        yield meter
        meter.conclude()
    finally:
        engine.runner.observers.remove(meter)
        meter.peak_blocks = engine.figures.cache_stats().peak_used_blocks
