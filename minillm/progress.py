"""Progress of long operations: as plain data, and as bars on terminals and in notebooks."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from minillm.text.safe import clean_line


@dataclass(frozen=True)
class Progress:
    """Progress of one operation: ``done`` of ``total`` units are done. A ``total`` of None is unknown."""

    label: str
    done: int
    total: int | None
    unit: str = "bytes"


OnProgress = Callable[[Progress], None]
OnMessage = Callable[[str], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing. The default ``on_progress``."""


def ignore_message(message: str) -> None:
    """Do nothing. The default ``on_message``."""


def size(num_bytes: float) -> str:
    """Return a size as text, such as ``154 MiB`` or ``1.5 MiB``, in units of 1,024 up to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1023.5:
            return f"{num_bytes:.{1 if num_bytes < 9.95 and unit != 'B' else 0}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def rate(tokens_per_second: float | None) -> str:
    """Return a rate as text, such as ``84`` or ``3.1``; a dash if the rate is unknown."""
    if tokens_per_second is None:
        return "-"
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 9.95 else f"{tokens_per_second:.1f}"


def say(message: str) -> None:
    """Write a message to stderr without breaking a progress bar."""
    tqdm_class().write(f"minillm: {clean_line(message, 1000)}", file=sys.stderr)


@contextmanager
def loading_bar(on_progress: OnProgress | None = None, *, enabled: bool | None = None) -> Iterator[OnProgress]:
    """Show the progress of a model's download and loading. Yield the function to call with each `Progress`.

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
    """A progress bar with the number of finished prompts and tokens per second.

    If ``enabled`` is None, the bar is shown on terminals and in notebooks. There is no bar for a single prompt.

    Attributes:
        tokens: tokens generated so far.
    """

    def __init__(self, total: int, *, enabled: bool | None = None) -> None:
        self.tokens = 0
        self._bar = _bar(total, "prompt") if _is_shown(enabled) and total > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def print(self, text: str) -> None:
        """Print a line to stdout without breaking the bar, in case both are on one terminal."""
        if self._bar is not None:
            self._bar.clear()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.refresh()

    def advance(self, num_tokens: int) -> None:
        """Count one more finished prompt, with ``num_tokens`` generated tokens."""
        self.tokens += num_tokens
        if self._bar is not None:
            if elapsed := self._bar.format_dict["elapsed"]:
                self._bar.set_postfix_str(f"{self.tokens / elapsed:.0f} tok/s", refresh=False)
            self._bar.update()


def _is_shown(enabled: bool | None) -> bool:
    watched = sys.stderr is not None and sys.stderr.isatty()
    return (watched or _in_notebook()) if enabled is None else (enabled and watched)


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def tqdm_class() -> Any:
    """Return the tqdm class. Imported here because the import takes a while."""
    if _in_notebook():
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm
    if not hasattr(tqdm, "_lock"):  # tqdm's own lock works across processes: in Python 3.14 it starts one more process
        tqdm.set_lock(threading.RLock())
    return tqdm


def _bar(total: int | None, unit: str, **options: Any) -> Any:
    return tqdm_class()(total=total, unit=unit, file=sys.stderr, leave=False, dynamic_ncols=True, **options)
