"""The line below the prompt: the activity, its speed, and how full the context and the pool are."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from minillm.ui.numbers import bar, count, duration

FULL = 0.8  # of the context: from here on it is shown as a warning
_MARKS = {
    "no model": "○",
    "loading": "◌",
    "ready": "●",
    "reading": "◐",
    "generating": "◉",
    "stopping": "◍",
    "failed": "✖",
}


@dataclass(frozen=True)
class Status:
    """The content of the line. Sizes in tokens and blocks, 0 where they are not known."""

    activity: str = "no model"  # a key of the marks
    tokens_per_second: float = 0.0
    time_to_first_token: float | None = None
    context_used: int = 0
    context_size: int = 0
    blocks_used: int = 0
    blocks_total: int = 0


class StatusBar(Widget):
    """Shows a `Status`; parts that do not fit are left out, the least important first."""

    status: reactive[Status] = reactive(Status())

    def render(self) -> Content:
        status, width = self.status, self.content_size.width
        style = {"failed": "$text-error", "no model": "$text-warning"}.get(status.activity, "$text-success")
        left = [Content.styled(f"{_MARKS[status.activity]} {status.activity}", style)]
        if status.tokens_per_second:
            left.append(Content(f"{status.tokens_per_second:.1f} tok/s"))
        if status.time_to_first_token is not None:
            left.append(Content(f"first token {duration(status.time_to_first_token)}"))
        right = []
        if status.context_size:
            right.append(_context(status, meter=width >= 96))
        if status.blocks_total:
            right.append(Content(f"blocks {count(status.blocks_used)}/{count(status.blocks_total)}"))
        while len(left) + len(right) > 1 and _length(left) + _length(right) + 1 > width:
            if len(left) > 2:
                left.pop()
            elif len(right) > 1:
                right.pop()
            elif len(left) > 1:
                left.pop()
            else:
                right.pop()
        start, end = (Content("   ").join(part) for part in (left, right))
        return Content.assemble(start, " " * max(1, width - start.cell_length - end.cell_length), end)


def _length(parts: list[Content]) -> int:
    return sum(part.cell_length for part in parts) + 3 * max(0, len(parts) - 1)


def _context(status: Status, *, meter: bool) -> Content:
    fraction = status.context_used / status.context_size
    text = f"{count(status.context_used)}/{count(status.context_size)} ({fraction:.0%})"
    text = f"context {bar(fraction, 10)} {text}" if meter else f"context {text}"
    return Content.styled(text + " !" if fraction > FULL else text, "$text-warning bold" if fraction > FULL else "")
