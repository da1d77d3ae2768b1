"""Format numbers for display."""

from collections.abc import Sequence
from itertools import islice

from minillm.cache.runs import contiguous_runs

_LEVELS = "▁▂▃▄▅▆▇█"


def count(number: int) -> str:
    """Return a count with separators: ``12,345``."""
    return f"{number:,}"


def is_number(text: str) -> bool:
    """Return whether ``text`` is a whole number of at most 99 digits, so that ``int`` accepts it."""
    return text.isdecimal() and len(text) < 100


def duration(seconds: float) -> str:
    """Return a duration in seconds: ``340 ms``, ``1.2 s``, ``75 s``."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 block``, ``2 blocks``."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def bar(fraction: float, width: int) -> str:
    """Return a meter of ``width`` cells for a fraction from 0 to 1. It is readable without color."""
    filled = min(width, max(0, round(fraction * width)))
    if fraction > 0 and filled == 0 and width:
        filled = 1
    return "▰" * filled + "▱" * (width - filled)


def sparkline(values: Sequence[float], width: int, most: float) -> str:
    """Return a line with a vertical bar for each of the last ``width`` values, the newest on the right.

    ``most`` is the value of a full bar. The value 0 is shown as a blank.
    """
    marks = [
        " " if value <= 0 or most <= 0 else _LEVELS[min(len(_LEVELS) - 1, int(value / most * len(_LEVELS)))]
        for value in values[max(0, len(values) - width) :]
    ]
    return "".join(marks).rjust(width)


def spans(numbers: Sequence[int], most: int = 1_000) -> str:
    """Return the numbers as runs in their order: ``3–7, 12``.

    If there are more than ``most`` runs, ``…`` stands for the rest.
    """
    parts = [span(first, length) for _, first, length in islice(contiguous_runs(numbers), most + 1)]
    return ", ".join([*parts[:most], "…"] if len(parts) > most else parts)


def span(start: int, length: int) -> str:
    """Return a run of ``length`` numbers from ``start``: ``5`` or ``5–8``."""
    return str(start) if length == 1 else f"{start}–{start + length - 1}"
