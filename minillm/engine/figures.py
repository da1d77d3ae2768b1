"""Statistics of an engine: use of its block pool, and a report about each step."""

import time
from dataclasses import replace

from minillm.cache import CacheStats, pool_stats
from minillm.engine.scheduler import Scheduler
from minillm.outputs import StepReport
from minillm.sequence import Schedule


class Figures:
    """Running statistics of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_steps = 0
        self.last_step: StepReport | None = None  # of the last concluded step
        self.device_seconds = 0.0  # since the last report
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Reset peak and mean use at the start of a run."""
        self._peak_used = self._sum_used = self._steps_counted = 0

    def count_blocks(self) -> None:
        """Count a step that is about to be launched, and record how many blocks are in use."""
        used = self._scheduler.cache.num_blocks - self._scheduler.cache.num_free
        self._peak_used, self._sum_used = max(self._peak_used, used), self._sum_used + used
        self._steps_counted += 1
        self.num_steps += 1

    def report(self, schedule: Schedule, began: float) -> None:
        """Store the report of a step that was just concluded. ``began``: the step's start, by `time.monotonic`."""
        ended = time.monotonic()
        self.last_step = StepReport(
            number=self.num_steps,
            num_prefills=len(schedule.prefills),
            num_prefill_tokens=sum(chunk.count for chunk in schedule.prefills),
            num_decodes=len(schedule.decodes) + len(schedule.extended),
            num_preempted=len(schedule.preempted),
            num_swapped_out=len(schedule.moves.out),
            num_swapped_in=len(schedule.moves.back),
            seconds=ended - began,
            device_seconds=self.device_seconds,
            ended=ended,
        )
        self.device_seconds = 0.0
        if self._scheduler.admission.tier is not None:
            self._scheduler.admission.tier.reader.measure(self.last_step)

    def cache_stats(self) -> CacheStats:
        """Return the pool's present use, totals since the start, and peak and mean use since the last `reset_peaks`."""
        preemption, swap = self._scheduler.preemption, self._scheduler.preemption.swap
        return replace(
            pool_stats(self._scheduler.cache),
            num_preemptions=preemption.count,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
            host_blocks_used=swap.num_blocks - swap.num_free,
            pinned_blocks=self._scheduler.idle.num_pinned_blocks,
            **({} if self._scheduler.admission.tier is None else self._scheduler.admission.tier.figures()),
            peak_used_blocks=self._peak_used,
            mean_used_blocks=self._sum_used / self._steps_counted if self._steps_counted else 0.0,
        )
