"""Progress of long operations: as plain data, and as bars on terminals and in notebooks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from minillm.text.safe import clean_line


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` units; ``total`` is None where it is not known."""

    label: str
    done: int
    total: int | None
    unit: str = "bytes"


OnProgress = Callable[[Progress], None]
OnMessage = Callable[[str], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing with it."""


def ignore_message(message: str) -> None:
    """Do nothing with it."""


def size(num_bytes: float) -> str:
    """``154 MiB``: the unit that leaves few digits, as memory is counted; one decimal where a digit stands alone."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1023.5:
            return f"{num_bytes:.{1 if num_bytes < 9.95 and unit != 'B' else 0}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def rate(tokens_per_second: float | None) -> str:
    """Return ``84`` or ``3.1``; a dash where the rate is unknown."""
    if tokens_per_second is None:
        return "-"
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 9.95 else f"{tokens_per_second:.1f}"


def say(message: str) -> None:
    """Write a message about the work on stderr, without running into a bar."""
    _tqdm().write(f"minillm: {clean_line(message, 1000)}", file=sys.stderr)


@contextmanager
def loading_bar(on_progress: OnProgress | None = None, *, enabled: bool | None = None) -> Iterator[OnProgress]:
    """Show a model's download and loading; yields the function to call with each `Progress`.

    Args:
        on_progress: called instead of showing a bar.
        enabled: None shows a bar on terminals and in notebooks.
    """
    if on_progress is not None or not _is_shown(enabled):
        yield on_progress or ignore_progress
        return
    bars: dict[str, Any] = {}  # by label; the last one is open

    def report(progress: Progress) -> None:
        label, in_bytes = progress.label, progress.unit == "bytes"
        if label not in bars:
            close()
            unit = "B" if in_bytes else f" {progress.unit}"
            bars[label] = _bar(progress.total, unit, desc=clean_line(label), unit_scale=in_bytes, unit_divisor=1024)
        bars[label].total = progress.total
        bars[label].update(progress.done - bars[label].n)

    def close() -> None:
        while bars:
            bars.popitem()[1].close()

    try:
        yield report
    finally:
        close()


class GenerationBar:
    """Prompts done out of all, and tokens per second; None for ``enabled``: on terminals and in notebooks."""

    def __init__(self, total: int, *, enabled: bool | None = None) -> None:
        self._tokens = 0
        self._bar = _bar(total, "prompt") if _is_shown(enabled) and total > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def print(self, text: str) -> None:
        """Print a line on stdout, without running into the bar where both are on one terminal."""
        if self._bar is not None:
            self._bar.clear()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.refresh()

    def advance(self, num_tokens: int) -> None:
        """Count one more prompt, with ``num_tokens`` generated."""
        self._tokens += num_tokens
        if self._bar is not None:
            if elapsed := self._bar.format_dict["elapsed"]:
                self._bar.set_postfix_str(f"{self._tokens / elapsed:.0f} tok/s", refresh=False)
            self._bar.update()


def _is_shown(enabled: bool | None) -> bool:
    watched = sys.stderr is not None and sys.stderr.isatty()
    return (watched or _in_notebook()) if enabled is None else (enabled and watched)


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _tqdm() -> Any:
    """tqdm, which takes a while to import."""
    if _in_notebook():
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm
    return tqdm


def _bar(total: int | None, unit: str, **options: Any) -> Any:
    return _tqdm()(total=total, unit=unit, file=sys.stderr, leave=False, dynamic_ncols=True, **options)
