"""The steps of a run: the time that its bytes and FLOPs need at least, and how long the device stood idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from minillm.bench.hardware import matmul_rate, read_bandwidth
from minillm.engine.engine import Engine
from minillm.runner.step import StepObserver, StepWork


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the machine, measured."""

    bandwidth: float  # bytes per second
    flops: float | None  # per second; None where it was not measured (on a CPU the bytes decide)

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings:
        return cls(read_bandwidth(device), matmul_rate(device) if device.type == "cuda" else None)


@dataclass
class Meter(StepObserver):
    """Sums over the steps of a run."""

    engine: Engine
    ceilings: Ceilings
    floor: float = 0.0  # seconds
    idle_share: float | None = None  # of the time between the first and the last of successive decode steps
    peak_blocks: int = 0
    _marks: list[Any] = field(default_factory=list)  # (begin, end) of each decode step on the device's clock

    def begin(self, work: StepWork) -> None:
        """Count a step: the weights and each block in use are read once, or the prompts' products take longer.

        Where several ranks share the model, rank 0's part of that.
        """
        model, cache = self.engine.runner.model, self.engine.cache
        config, size = model.local, model.dtype.itemsize
        bytes_read = model.weight_bytes
        if work.decode is not None or work.num_decodes:
            used = cache.num_blocks - cache.num_free
            bytes_read += used * cache.block_size * config.kv_bytes_per_token(size)
        seconds = bytes_read / self.ceilings.bandwidth
        if self.ceilings.flops is not None:
            seconds = max(seconds, 2 * config.num_parameters * work.num_tokens / self.ceilings.flops)
        self.floor += seconds
        if model.device.type == "cuda" and work.decode is not None and not work.chunks:
            self._marks.append((_now(), None))
        elif self._marks:
            self._marks.append(None)  # no gap between two decode steps begins or ends here

    def end(self) -> None:
        if self._marks and self._marks[-1] is not None:
            self._marks[-1] = (self._marks[-1][0], _now())

    def conclude(self) -> None:
        """Read the device's clock: gaps between the end of one decode step and the start of the next."""
        idle = total = 0.0
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if before is not None and after is not None:
                idle += max(0.0, before[1].elapsed_time(after[0]))
                total += before[0].elapsed_time(after[0])
        self.idle_share = idle / total if total else None


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def metered(engine: Engine, ceilings: Ceilings) -> Iterator[Meter]:
    """Measure everything that ``engine`` does inside the ``with``."""
    meter = Meter(engine, ceilings)
    engine.figures.reset_peaks()
    engine.runner.observers.append(meter)
    try:
        yield meter
        if meter._marks:
            torch.cuda.synchronize()
            meter.conclude()
    finally:
        engine.runner.observers.remove(meter)
        meter.peak_blocks = engine.figures.cache_stats().peak_used_blocks
