"""Words for people that both the command line and the app need. Cheap to import: ``minillm --help`` does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def size(num_bytes: float) -> str:
    """``161 MB``: decimal units, as downloads are counted."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def nearest(word: str, words: Iterable[str]) -> str:
    """Which of ``words`` was probably meant by one that is not among them; empty where none is near."""
    close = difflib.get_close_matches(word, list(words), 1, 0.5)
    return close[0] if close else ""
