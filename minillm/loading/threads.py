"""Adapt torch's number of threads to the cores that other programs leave free, during loading and steps.

The threads of an op wait for each other at its end. If another program takes the core of one thread, all others spin
until that thread continues, and every op becomes as slow as the scheduler's time slices. One thread fewer costs little.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minillm.runner.observers import StepObserver
from minillm.runner.step import StepWork

_EVERY = 0.25  # seconds between measurements
_IDLE = 0.1  # seconds without a step, after which the measurement starts again
_TOLERATED = 0.35  # cores: other programs may take this much from the last thread
_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
Clocks = tuple[float, float, float]  # seconds: wall time, busy time of the cores, CPU time of this process
_USERS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


class FreeCores(StepObserver):
    """Sets torch's number of threads before a step, and while weights are loaded.

    It never exceeds torch's number of threads at construction, and does not override a number set by other code.

    Args:
        read: returns the seconds for which the cores of this process were busy since the machine started; by default
            the system's count.
        since: earlier `clocks` at which the first measurement begins.
    """

    def __init__(self, read: Callable[[], float] | None = None, since: Clocks | None = None) -> None:
        self._read = read or _busy_seconds
        self._most = max(1, min(torch.get_num_threads(), quota()))
        self._cores = len(os.sched_getaffinity(0))
        self._ours = torch.get_num_threads()
        self._seen = since or clocks(self._read)
        self._ended = math.inf  # no step yet: the first one counts from the loading of the model

    def begin(self, work: StepWork) -> None:
        if time.monotonic() - self._ended > _IDLE:  # other programs may have used the idle cores
            self._seen = clocks(self._read)
        else:
            self.follow()

    def end(self) -> None:
        self._ended = time.monotonic()

    def follow(self) -> None:
        """Call `look` if the last measurement is old enough."""
        if time.monotonic() - self._seen[0] >= _EVERY:
            self.look()

    def look(self) -> None:
        """Set torch's threads to the number of cores that were free since the last measurement."""
        before, self._seen = self._seen, clocks(self._read)
        seconds, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        others = max(0.0, busy - own) / seconds
        wanted = max(1, min(self._most, math.floor(self._cores - others + _TOLERATED)))
        if torch.get_num_threads() == self._ours != wanted:
            torch.set_num_threads(wanted)
            self._ours = wanted


def clocks(read: Callable[[], float] | None = None) -> Clocks:
    """Return the current clocks, for `FreeCores`."""
    return time.monotonic(), (read or _busy_seconds)(), time.process_time()


def follows_free_cores() -> bool:
    """Return whether minillm may set the number of threads: Linux reports the load, and no variable sets the number."""
    return _STAT.exists() and not any(name in os.environ for name in _USERS_OWN)


def _busy_seconds() -> float:
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *counts = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])  # between them: idle and iowait
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def quota() -> int:
    """Return the number of cores that the process's container may use."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or no limit
        return os.cpu_count() or 1
