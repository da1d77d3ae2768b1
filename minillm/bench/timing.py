"""Microseconds of a launch on a GPU: median over replays of a CUDA graph, with a cold L2.

A graph of many launches hides what the host costs. Each launch works on another copy of the inputs, and the copies
together are several times the L2, so no launch finds its data there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_LAUNCHES = 24
_REPLAYS = 11
_COLD_BYTES = 400 << 20  # several times the largest L2


def copies_for_cold_l2(bytes_per_launch: int) -> int:
    """How many copies of a launch's inputs to rotate through."""
    return max(1, min(64, -(-_COLD_BYTES // max(1, bytes_per_launch))))


def graph_microseconds(launch: Callable[[int], object], launches: int = _LAUNCHES) -> float:
    """Median microseconds of ``launch(i)``, i counting up, replayed from one CUDA graph."""
    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)
