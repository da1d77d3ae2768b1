"""How far something long has come: data for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` units; ``total`` is None where it is not known."""

    label: str
    done: int
    total: int | None
    unit: str = "bytes"


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """For callers who do not want to know."""


def size(num_bytes: float) -> str:
    """``161 MB``: decimal units, as downloads are counted."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
