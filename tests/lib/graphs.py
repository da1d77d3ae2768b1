"""Graphs for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor

from minillm.runner.device.graphs import Graphs


class WorkGraphs(Graphs):
    """Graphs that keep the work itself, and replay it by running it. They note the keys that ran."""

    def __init__(self, *rows: Tensor) -> None:
        super().__init__(*rows, enabled=True)
        self.ran: list[Hashable] = []

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        self.record(key, work)
        self.ran.append(key)
        return self._recorded[key][1]()

    def _rehearse(self, works: Iterable[Callable[[], object]]) -> None:
        for work in works:
            work()  # on padding, like a GPU

    def _capture(self, work: Callable[[], Any]) -> Any:
        return None, work
