"""Measure wall-clock times, the machine's memory bandwidth and matmul rate, and an engine's steps."""

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
from minillm.kernels.streams import device_seconds, now
from minillm.runner.observers import StepObserver
from minillm.runner.step import StepWork


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall-clock time of ``repeats`` calls of ``run`` in seconds, including its work on the device.

    One more call warms up and is not counted.
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
    """Measure the memory bandwidth. Return the median in bytes per second.

    On a CPU, ``size`` bytes are read. On a GPU, ``size`` bytes are copied; bytes read and bytes written both count.
    """
    data = torch.randn(size // 4, device=device)
    if device.type != "cuda":
        return size / seconds_of(data.sum, device, 7)
    target = torch.empty_like(data)
    return 2 * size / seconds_of(lambda: target.copy_(data), device, 7)


@dataclass(frozen=True)
class LoadLimits:
    """The measured limits of this machine, from which the floor of a step's time is computed."""

    copy_bandwidth: float = shown("copy, TB/s", ".2f", 1e-12)  # bytes per second, see `read_bandwidth`
    # FLOPs per second of a large bfloat16 matmul; infinite if not measured (on a CPU, memory bandwidth is the limit)
    matmul_rate: float = shown("bfloat16 matmuls, TFLOP/s", ".0f", 1e-12, default=math.inf)

    @classmethod
    def measure(cls, device: torch.device, size: int = 1 << 29) -> LoadLimits:
        """Measure the bandwidth of copying ``size`` bytes. On a GPU, also measure the rate of large matmuls."""
        bandwidth = read_bandwidth(device, size)
        if device.type != "cuda":
            return cls(bandwidth)
        a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        return cls(bandwidth, 2 * 8192**3 / device_seconds(lambda: a @ b, 10))


@dataclass
class Meter(StepObserver):
    """Observe an engine's steps, and compute figures of the whole run.

    One of the figures is the floor: a lower bound of the time that all steps take.
    """

    engine: Engine
    limits: LoadLimits
    floor: float = 0.0  # seconds that all steps would take at the machine's limits
    idle_share: float | None = None  # share of time in which the GPU is idle between successive decode steps
    peak_blocks: int = 0  # maximum blocks in use
    # For each step: CUDA events at its begin and its end if it is a decode step without prefills, otherwise empty.
    _marks: list[list[torch.cuda.Event]] = field(default_factory=list)

    @property
    def peak_tokens(self) -> int:
        return self.peak_blocks * self.engine.cache.block_size

    def begin(self, work: StepWork) -> None:
        """Add the lower bound of this step's time to the floor.

        The bound is the time to read the weights once. In a step that decodes, the time to read every used block once
        is added. If the matmuls take longer at the machine's matmul rate, the bound is their time. With tensor
        parallelism, only this rank's shard of the model counts.
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
        """Record the end of a decode step's work. It may be called several times per step; the last call counts."""
        if self._marks and self._marks[-1]:
            self._marks[-1][1:] = [now()]

    def conclude(self) -> None:
        """Compute `idle_share`: the fraction of time in which the GPU is idle between successive decode steps."""
        if self._marks:
            torch.cuda.synchronize()
        pairs = [(before, after) for before, after in pairwise(self._marks) if before and after]
        idle = sum(max(0.0, before[1].elapsed_time(after[0])) for before, after in pairs)
        total = sum(before[0].elapsed_time(after[0]) for before, after in pairs)
        self.idle_share = idle / total if total else None


@contextmanager
def metered(engine: Engine, limits: LoadLimits) -> Iterator[Meter]:
    """Measure every step of ``engine`` inside the ``with``.

    Yield the meter. Its figures are final after the ``with``.
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
