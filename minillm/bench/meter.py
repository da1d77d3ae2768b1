"""What a run did, step by step: the time that its bytes and FLOPs need at least, and how long the device stood idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from minillm.bench.hardware import matmul_rate, read_bandwidth
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Schedule


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best, measured."""

    bandwidth: float  # bytes per second
    flops: float | None  # per second; None where it was not measured (on a CPU the bytes decide)

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings:
        return cls(read_bandwidth(device), matmul_rate(device) if device.type == "cuda" else None)


@dataclass
class Meter:
    """Sums over the steps of a run."""

    ceilings: Ceilings
    floor: float = 0.0  # seconds
    idle_share: float | None = None  # of the time between the first and the last of successive decode steps
    peak_blocks: int = 0
    _marks: list[Any] = field(default_factory=list)

    def add(self, engine: Engine, schedule: Schedule) -> None:
        """Count a step: the weights and each block in use are read once, or the prompts' products take longer.

        Where several ranks share the model, rank 0's part of that.
        """
        model, cache = engine.runner.model, engine.cache
        config, size = model.local, model.dtype.itemsize
        bytes_read = model.weight_bytes
        if schedule.decodes:
            used = cache.num_blocks - cache.num_free
            bytes_read += used * cache.block_size * config.kv_bytes_per_token(size)
        seconds = bytes_read / self.ceilings.bandwidth
        if self.ceilings.flops is not None:
            seconds = max(seconds, 2 * config.num_parameters * schedule.num_tokens / self.ceilings.flops)
        self.floor += seconds

    def conclude(self) -> None:
        """Read the device's clock: gaps between the end of one decode step and the begin of the next."""
        idle = total = 0.0
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if before is not None and after is not None:
                idle += max(0.0, before[1].elapsed_time(after[0]))
                total += before[0].elapsed_time(after[0])
        self.idle_share = idle / total if total else None


@contextmanager
def metered(engine: Engine, ceilings: Ceilings) -> Iterator[Meter]:
    """Measure what ``engine`` does inside the ``with``."""
    meter = Meter(ceilings)
    runner, run = engine.runner, engine.runner.run
    decoder = runner.decoder if runner.model.device.type == "cuda" else None  # whose clock there is

    def counting(schedule: Schedule, copies: list[tuple[int, int]]) -> Any:
        meter.add(engine, schedule)
        result = run(schedule, copies)
        if schedule.prefills and meter._marks:
            meter._marks.append(None)  # what follows is no gap between two decode steps
        return result

    engine.reset_peaks()
    runner.run = counting  # type: ignore[method-assign]
    if decoder is not None:
        decoder.marks = meter._marks
    try:
        yield meter
        if decoder is not None:
            torch.cuda.synchronize()
            meter.conclude()
    finally:
        del runner.run
        if decoder is not None:
            decoder.marks = None
        meter.peak_blocks = engine.cache_stats().peak_used_blocks
