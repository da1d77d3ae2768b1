"""What the machine can do at best: the ceilings that results are divided by."""

from __future__ import annotations

import statistics
import time

import torch


def read_bandwidth(device: torch.device, size: int = 1 << 29, repeats: int = 7) -> float:
    """Bytes per second at which memory is read (CPU), or copied, reads and writes counted (GPU); the median."""
    data = torch.randn(size // 4, device=device)
    target = torch.empty_like(data) if device.type == "cuda" else None
    rates = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        if target is not None:
            target.copy_(data)
            torch.cuda.synchronize(device)
        else:
            data.sum()
        rates.append(size * (2 if target is not None else 1) / (time.perf_counter() - began))
    return statistics.median(rates[1:])  # the first one touches the pages


def matmul_rate(device: torch.device, size: int = 8192, repeats: int = 10) -> float:
    """FLOPs per second of a square bfloat16 product on random data; the median."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize(device)
        rates.append(2 * size**3 / (begin.elapsed_time(end) * 1e-3))
    return statistics.median(rates)
