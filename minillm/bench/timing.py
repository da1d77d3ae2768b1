"""Times of launches, and the best rates of the machine, which results are divided by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_LAUNCHES = 24
_REPLAYS = 11
_COLD_BYTES = 400 << 20  # several times the largest L2


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall-clock seconds of ``run`` and its work on the device; a first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _device_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``run`` by the GPU's clock."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def copies_for_cold_l2(bytes_per_launch: int) -> int:
    """How many copies of a launch's inputs to rotate through."""
    return max(1, min(64, -(-_COLD_BYTES // max(1, bytes_per_launch))))


def graph_microseconds(launch: Callable[[int], object], launches: int = _LAUNCHES) -> float:
    """Median microseconds of ``launch(i)``, i counting up, over replays of one CUDA graph, with a cold L2.

    A graph of many launches hides what the host costs. Each launch should work on another copy of the inputs: the
    copies together are several times the L2 (`copies_for_cold_l2`), so that no launch finds its data there.
    """
    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    return _device_seconds(graph.replay, _REPLAYS) * 1e6 / launches


def read_bandwidth(device: torch.device, size: int = 1 << 29) -> float:
    """Bytes per second at which memory is read (CPU), or copied, reads and writes counted (GPU); the median."""
    data = torch.randn(size // 4, device=device)
    if device.type != "cuda":
        return size / seconds_of(data.sum, device, 7)
    target = torch.empty_like(data)
    return 2 * size / seconds_of(lambda: target.copy_(data), device, 7)


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """FLOPs per second of a square bfloat16 product on random data; the median."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _device_seconds(lambda: a @ b, 10)
