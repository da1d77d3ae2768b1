"""Measure a device's memory bandwidth, and store it in the cache directory.

The bandwidth is the highest of several short measurements. Other programs can make a measurement slower, never faster,
so the highest is closest to the hardware. A later measurement replaces the stored one only if it is higher. Reading the
stored bandwidth does not import torch.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.system import cache_dir, processor
from minillm.text.reading import read_bytes
from minillm.text.safe import parse_json

if TYPE_CHECKING:
    import torch

_PROBE_BYTES = 1 << 28  # more than a processor's cache holds
_COUNT = 8  # number of measurements; each takes some hundredths of a second
_SPREAD = 1.3  # the machine is busy if the best rate is above the median rate by more than this factor
_TAKEN = 0.35  # the machine is busy if other programs use more than this number of cores
_MOST_BYTES = 1 << 16  # size limit for the file
_PLAUSIBLE = (1e8, 1e14)  # bytes per second


@dataclass(frozen=True)
class Bandwidth:
    """A memory bandwidth: ``rate`` in bytes per second. ``is_busy``: other programs slowed the measurement down."""

    rate: float
    is_busy: bool = False


def kept_rate(device: str) -> float | None:
    """Return the highest rate measured so far for a processor or card, in bytes per second.

    Return None if it has never been measured, or if the file is damaged.
    """
    rate = _read().get(device)
    return float(rate) if isinstance(rate, int | float) and _PLAUSIBLE[0] <= rate <= _PLAUSIBLE[1] else None


def kept_gpu_rate() -> float | None:
    """Return the stored rate of the first NVIDIA card in bytes per second, or None. Needs neither torch nor CUDA."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names = (line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model:"))
        return kept_rate(next(names, ""))
    return None


def known_rate(device: torch.device) -> float:
    """Return the stored rate of a device in bytes per second. Measure it if no rate is stored."""
    return kept_rate(_name(device)) or measure(device).rate


def measure(device: torch.device) -> Bandwidth:
    """Measure the memory bandwidth (see `best_of`): of reads on a CPU, of copies (reads plus writes) on a GPU."""
    import torch

    data = torch.ones(_PROBE_BYTES // 4, device=device)
    on_gpu = device.type == "cuda"
    target = torch.empty_like(data) if on_gpu else data

    def once() -> float:
        began = time.perf_counter()
        if on_gpu:
            target.copy_(data)
            torch.cuda.synchronize(device)
        else:
            data.sum()
        return (1 + on_gpu) * _PROBE_BYTES / (time.perf_counter() - began)

    return best_of(_name(device), once)


def best_of(device: str, once: Callable[[], float]) -> Bandwidth:
    """Measure several times. Return the highest known rate, whether measured now or stored by an earlier run.

    Store the rate if it is a new maximum.

    Args:
        device: the name of the processor or card.
        once: measures once, and returns bytes per second.
    """
    since = _clocks()
    rates = sorted(once() for _ in range(_COUNT))
    seconds, busy, own = (now - then for now, then in zip(_clocks(), since, strict=True))
    before = kept_rate(device) or 0.0
    if rates[-1] > before:
        _keep(device, rates[-1])
    rate = max(rates[-1], before)
    return Bandwidth(rate, is_busy(rates, rate, (busy - own) / seconds))


def is_busy(rates: Sequence[float], rate: float, cores: float) -> bool:
    """Return whether other programs slowed a measurement down.

    Args:
        rates: the measured rates in ascending order. They are low or vary if the machine is busy.
        rate: the best known rate.
        cores: the number of cores that other programs used during the measurement.
    """
    return cores > _TAKEN or rate > _SPREAD * rates[len(rates) // 2]


def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def _clocks() -> tuple[float, float, float]:
    """Return `threads.clocks`. If the system does not count the cores' busy seconds, they are 0."""
    from minillm.loading.threads import clocks  # not at the top: it imports torch

    try:
        return clocks()
    except OSError:
        return clocks(lambda: 0.0)


def _path() -> Path:
    return cache_dir() / "bandwidth.json"


def _read() -> dict[str, Any]:
    try:
        found = parse_json(read_bytes(_path(), _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(device: str, rate: float) -> None:
    """Store a rate by replacing the file atomically. If the cache directory is not writable, store nothing."""
    with suppress(OSError):
        _path().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_path().parent) as scratch:
            part = Path(scratch, _path().name)
            part.write_text(json.dumps({**_read(), device: rate}, indent=1), encoding="utf-8")
            os.replace(part, _path())
