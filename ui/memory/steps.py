"""The engine's steps, one a line, the newest at the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from minillm.outputs import StepReport
from minillm.ui.memory.line_view import LineView, Parts
from minillm.ui.memory.pool import Memory
from minillm.ui.numbers import count

HEADING = "  step prefill decode     ms "
_WINDOW = 5.0  # seconds of work that the rates are taken over
_LEAST_BAR = 2
_LONGEST_BAR = 40


class StepList(LineView):
    """Number, prefilled tokens (and chunks), decodes, milliseconds, and their split: ▒ the host's own, █ the device.

    ``!`` counts the groups that were preempted, ``↓`` and ``↑`` the blocks that were swapped out and in.
    """

    COMPONENT_CLASSES = {"number", "prefill", "decode", "time", "host", "device", "trouble"}  # noqa: RUF012

    follows = True

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._first = 0  # number of the first step that is listed

    def catch_up(self) -> None:
        first = self._steps[0].number if self._steps else 0
        dropped, self._first = max(0, first - self._first) if self._first else 0, first
        self.set_lines(len(self._steps), dropped)

    @property
    def _steps(self) -> Sequence[StepReport]:
        return self.memory.pool.steps if self.memory.pool is not None else ()

    def line(self, row: int, width: int) -> Parts:
        step = self._steps[row]
        chunks = f"{count(step.num_prefill_tokens)}" + (f"/{step.num_prefills}" if step.num_prefills > 1 else "")
        trouble = _trouble(step)
        room = max(_LEAST_BAR, min(_LONGEST_BAR, width - len(HEADING) - len(trouble)))
        host, device = split_bar(step, room)
        return [
            (f"{step.number:>6}", "number"),
            (f"{chunks if step.num_prefills else '':>8}", "prefill"),
            (f"{step.num_decodes or '':>7}", "decode"),
            (f"{1000 * step.seconds:>7.1f} ", "time"),
            (host, "host"),
            (device, "device"),
            (trouble, "trouble"),
        ]

    def headline(self, width: int, height: int) -> Content:
        """Rates over the last seconds of work, on one line of ``width`` cells or on two."""
        steps: list[StepReport] = []
        seconds = 0.0
        for step in reversed(self._steps):
            steps.append(step)
            seconds += step.seconds
            if seconds >= _WINDOW:
                break
        if not steps:
            return Content("no step yet")
        seconds = max(seconds, 1e-9)
        decoded = sum(step.num_decodes for step in steps) / seconds
        prefilled = sum(step.num_prefill_tokens for step in steps) / seconds
        device = min(1.0, sum(step.device_seconds for step in steps) / seconds)
        rates = f"{decoded:,.1f} tok/s decoded · {prefilled:,.0f} prefilled"
        split = f"last {seconds:.1f} s: device █ {device:.0%}, host ▒ {1 - device:.0%}"
        return Content(rates + (" · " if len(rates) + len(split) + 3 <= width else "\n") + split)


def _trouble(step: StepReport) -> str:
    """The preemptions and swaps of a step, which lacked room."""
    parts = (("!", step.num_preempted), ("↓", step.num_swapped_out), ("↑", step.num_swapped_in))
    return "".join(f" {mark}{number}" for mark, number in parts if number)


def split_bar(step: StepReport, width: int) -> tuple[str, str]:
    """The step's time as a bar in two parts: the host's own, and the device's."""
    device = round(width * min(1.0, step.device_seconds / step.seconds)) if step.seconds > 0 else 0
    return "▒" * (width - device), "█" * device
