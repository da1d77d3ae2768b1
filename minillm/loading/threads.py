"""Adapt torch's number of threads to the cores that other programs leave free, during loading and steps.

The threads of an op wait for each other at the op's end. If another program takes the core of one thread, all other
threads spin until that thread continues. Every op then takes as long as the operating system's time slices. Running
with one thread fewer costs little in comparison.
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
_IDLE = 0.1  # after this many seconds without a step, a new measurement starts
_TOLERATED = 0.35  # other programs may use this fraction of the last thread's core
_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
Clocks = tuple[float, float, float]  # in seconds: wall-clock time, busy time of the cores, CPU time of this process
_USERS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


class FreeCores(StepObserver):
    """Sets torch's number of threads before steps, and while weights are loaded.

    The number never exceeds torch's number of threads before the first instance. A number that other code has set is
    left unchanged. All instances in a process share this state, because an engine may find the number of another one.

    Args:
        read: returns the seconds for which this process's cores were busy since the machine started. By default, they
            are read from the operating system.
        since: an earlier result of `clocks`, at which the first measurement begins; by default now.
    """

    _ours = 0  # torch's number of threads as an instance has found or set it last
    _most = 1

    def __init__(self, read: Callable[[], float] | None = None, since: Clocks | None = None) -> None:
        self._read = read or _busy_seconds
        if (found := torch.get_num_threads()) != FreeCores._ours:
            FreeCores._ours, FreeCores._most = found, max(1, min(found, quota()))
        self._cores = len(os.sched_getaffinity(0))
        self._seen = since or clocks(self._read)
        self._ended = math.inf  # before the first step; that step uses the measurement begun while loading

    def begin(self, work: StepWork) -> None:
        if time.monotonic() - self._ended > _IDLE:  # programs that used the idle cores may not need them during steps
            self._seen = clocks(self._read)
        else:
            self.follow()

    def end(self) -> None:
        self._ended = time.monotonic()

    def follow(self) -> None:
        """Adapt the number of threads with `look`, but only if some time has passed since the last measurement."""
        if time.monotonic() - self._seen[0] >= _EVERY:
            self.look()

    def look(self) -> None:
        """Set torch's number of threads to the number of cores that other programs have left free.

        The measurement covers the time since the clocks were last read.
        """
        before, self._seen = self._seen, clocks(self._read)
        seconds, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        others = max(0.0, busy - own) / seconds
        wanted = max(1, min(self._most, math.floor(self._cores - others + _TOLERATED)))
        if torch.get_num_threads() == self._ours != wanted:
            torch.set_num_threads(wanted)
            FreeCores._ours = wanted


def clocks(read: Callable[[], float] | None = None) -> Clocks:
    """Return the present time, the cores' busy time, and this process's CPU time, each in seconds.

    From two results, `FreeCores` computes how many cores were free in between. ``read``: see `FreeCores`.
    """
    return time.monotonic(), (read or _busy_seconds)(), time.process_time()


def follows_free_cores() -> bool:
    """Return whether minillm may set the number of threads.

    It may if the system reports the cores' load (Linux), and if no environment variable sets the number.
    """
    return _STAT.exists() and not any(name in os.environ for name in _USERS_OWN)


def _busy_seconds() -> float:
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *counts = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])  # the two in the middle: idle, iowait
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def quota() -> int:
    """Return the number of cores that the process's container may use."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # there is no cgroup, or it has no limit
        return os.cpu_count() or 1
