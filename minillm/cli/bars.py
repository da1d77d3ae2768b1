"""Progress on stderr, only on a terminal: how far, how fast, how long still."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from minillm.text.safe import clean_line

if TYPE_CHECKING:
    from types import TracebackType

    from minillm.progress import Progress


def say(message: str) -> None:
    """A message about the work, on stderr."""
    tqdm.write(f"minillm: {clean_line(message, 1000)}", file=sys.stderr)


@contextmanager
def loading_bar(*, enabled: bool = True) -> Iterator[Callable[[Progress], None]]:
    """Show a model's download and loading; yields what to call with each `Progress`."""
    bar: tqdm | None = None
    label = ""
    enabled = enabled and sys.stderr.isatty()

    def report(progress: Progress) -> None:
        nonlocal bar, label
        if not enabled:
            return
        if bar is None or progress.label != label:
            if bar is not None:
                bar.close()
            label = progress.label
            in_bytes = progress.unit == "bytes"
            bar = tqdm(
                desc=clean_line(label),
                total=progress.total,
                unit="B" if in_bytes else f" {progress.unit}",
                unit_scale=in_bytes,
                unit_divisor=1024,
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
            )
        bar.total = progress.total
        bar.update(progress.done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()


class GenerationBar:
    """Prompts done out of all, and tokens per second."""

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        shown = enabled and sys.stderr.isatty() and total > 1
        self._tokens = 0
        self._bar = tqdm(
            total=total, unit="prompt", file=sys.stderr, disable=not shown, leave=False, dynamic_ncols=True
        )

    def __enter__(self) -> GenerationBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def print(self, text: str) -> None:
        """A line on stdout, without running into the bar where both are on one terminal."""
        with self._bar.external_write_mode(sys.stdout):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def advance(self, num_tokens: int) -> None:
        """One more prompt is done, with ``num_tokens`` generated."""
        self._tokens += num_tokens
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.set_postfix_str(f"{self._tokens / elapsed:.0f} tok/s", refresh=False)
        self._bar.update()
