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
