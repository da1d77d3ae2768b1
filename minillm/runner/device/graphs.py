"""CUDA graphs: record work of a fixed shape once, and replay it with a single launch."""

import gc
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from minillm.kernels.streams import capture_stream
from minillm.model.kinds import one_layer_of_each_kind

Result = TypeVar("Result")


class Graphs:
    """CUDA graphs, by a key for the work and its shape. They share memory, so they must run one after another.

    Args:
        rows: tensors that list the rows of device state to compute. During recording they hold only padding (-1), so
            that recording changes no row.
        enabled: record and replay. Otherwise `run` calls the work each time.
    """

    def __init__(self, *rows: Tensor, enabled: bool) -> None:
        self._rows, self._enabled = rows, enabled
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def lacks(self, key: Hashable) -> bool:
        """Return whether graphs are enabled and ``key`` is not recorded yet."""
        return self._enabled and key not in self._recorded

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """Replay the graph of ``work`` and return the result of ``work``. Record the graph first if it is missing.

        The tensors of the result belong to the graph: its next replay overwrites them.
        """
        if not self._enabled:
            return work()
        self.record(key, work)
        graph, result = self._recorded[key]
        graph.replay()
        return result

    def record(self, key: Hashable, work: Callable[[], object]) -> None:
        """Record a graph of ``work`` under ``key``. During recording, all rows are padding.

        Do nothing if ``key`` is recorded or graphs are disabled.
        """
        self.record_all({key: work})

    def record_all(self, works: Mapping[Hashable, Callable[[], object]]) -> None:
        """Record a graph of each work, as `record` does for one. Layers of the same kind are rehearsed once for all."""
        works = {key: work for key, work in works.items() if self.lacks(key)}
        if not works:
            return
        kept = [rows.clone() for rows in self._rows]
        for rows in self._rows:
            rows.fill_(-1)
        try:
            self._rehearse(works.values())
            for key, work in works.items():
                self._recorded[key] = self._capture(work)
        finally:
            for rows, numbers in zip(self._rows, kept, strict=True):
                rows.copy_(numbers)

    def recorded(self, fits: Callable[[Any], bool]) -> Any:
        """Return the smallest recorded key for which ``fits`` returns True, or None. These keys must be comparable."""
        keys: Iterable[Any] = self._recorded
        return min(filter(fits, keys), default=None)

    def clear(self) -> None:
        """Discard all graphs and their memory."""
        self._recorded.clear()
        self._pool = None

    def _rehearse(self, works: Iterable[Callable[[], object]]) -> None:
        """Run each work with one layer of each kind, on the stream that records it.

        This compiles the kernels, and creates what is kept for later calls, such as cuBLAS's workspace.
        """
        device = self._rows[0].device
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream), one_layer_of_each_kind():
                for work in works:
                    work()
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)

    def _capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record ``work``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(capture_stream(self._rows[0].device)):
            # If the garbage collector deleted another graph during the capture, the capture would fail.
            collects = gc.isenabled()
            gc.disable()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
                if collects:
                    gc.enable()
        self._pool = graph.pool()
        return graph, result
