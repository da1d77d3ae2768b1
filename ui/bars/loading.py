"""How far a model's download and loading have come."""

from __future__ import annotations

import time

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from minillm.progress import Progress, size
from minillm.text.safe import clean_line
from minillm.ui.numbers import bar, count, duration


class LoadingBar(Widget):
    """One line: the work, its progress, its speed."""

    progress: reactive[Progress | None] = reactive(None)

    def __init__(self) -> None:
        super().__init__()
        self._label = ""
        self._began = (0.0, 0)  # when this label was first seen, and how far it was then

    def watch_progress(self, loading: Progress | None) -> None:
        if loading is not None and loading.label != self._label:
            self._label = loading.label
            self._began = (time.monotonic(), loading.done)

    def render(self) -> Content:
        if self.progress is None:
            return Content("")
        elapsed = time.monotonic() - self._began[0]
        rate = (self.progress.done - self._began[1]) / elapsed if elapsed > 0.5 else 0.0
        return Content(progress_line(self.progress, rate, self.content_size.width))


def progress_line(loading: Progress, rate: float, width: int) -> str:
    """``rate`` is in units per second, 0 where it is not known yet."""
    in_bytes = loading.unit == "bytes"
    words = [clean_line(loading.label, 60)]
    if loading.total:
        done = min(loading.done, loading.total)
        words.append(bar(done / loading.total, max(4, min(24, width - 60))))
        shown = f"{size(done)} of {size(loading.total)}" if in_bytes else f"{count(done)} of {count(loading.total)}"
        words.append(shown if in_bytes else f"{shown} {clean_line(loading.unit, 20)}")
        if rate > 0 and in_bytes:
            words.append(f"{size(rate)}/s")
            if done < loading.total:
                words.append(f"{duration((loading.total - done) / rate)} left")
    elif loading.done:
        words.append(size(loading.done) if in_bytes else f"{count(loading.done)} {clean_line(loading.unit, 20)}")
    words.append("esc cancels")
    return "  ".join(words)
