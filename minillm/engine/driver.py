"""The driver runs one engine for several callers, in any number of threads.

Every caller runs the loop `Driver.run` in its own thread. One thread computes a step at a time, for the requests of all
callers. Each caller takes the results of its own requests.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.errors import MinillmError, as_known
from minillm.outputs import Delta, RequestOutput
from minillm.sequence import SequenceGroup
from minillm.system import deferred_interrupt

Key = TypeVar("Key")


class Driver:
    """An engine that several threads share, with the lock that protects it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._deltas: dict[str, deque[Delta]] = {}  # of streamed requests, until their callers take them

    @contextmanager
    def locked(self) -> Iterator[Engine]:
        """Lock the engine between two steps, and return it as the context manager's value."""
        with self._lock:
            yield self.engine

    def run(
        self,
        take: Callable[[int], Iterable[tuple[Key, Callable[[], Request]]] | None],
        *,
        refuse: Callable[[Key, MinillmError], RequestOutput] | None = None,
        added: Callable[[Key, SequenceGroup], object] = lambda key, group: None,
    ) -> Generator[tuple[Key, Delta | RequestOutput], None, None]:
        """Run requests; yield (key, delta) of streamed requests and (key, output) of all, as they come.

        Leaving the iterator early, or ctrl-c, aborts everything that is still running.

        Args:
            take: called with the number of sequences that could start. Returns (key, function that creates the request)
                pairs. An empty result ends the input. None means that there is no request at the moment. `take` is
                called when no request is queued, and when all earlier requests of this call are done. Only in the
                second case may `take` block.
            refuse: returns the output of a rejected request. Without it, the exception is raised.
            added: called with the group of each accepted request.
        """
        mine: dict[str, Key] = {}
        streams: dict[str, deque[Delta]] = {}  # of those of ``mine`` that are streamed
        more = True
        try:
            while more or mine:
                num_free_seqs = self.engine.scheduler.num_free_seqs
                if more and (not mine or (num_free_seqs > 0 and not self.engine.scheduler.waiting)):
                    taken = take(max(1, num_free_seqs))
                    more = taken is None
                    for key, make in taken or ():
                        more = True
                        try:
                            group = self._add(make())
                        except Exception as error:
                            if refuse is None:
                                raise
                            yield key, refuse(key, as_known(error))
                        else:
                            mine[group.request_id] = key
                            if group.streamed:
                                streams[group.request_id] = self._deltas[group.request_id]
                            added(key, group)
                ended = [name for name in list(self.engine.requests.finished) if name in mine]
                if ended:
                    with self._lock:
                        pass  # the step that ended them has now kept their last deltas
                for request_id, deltas in streams.items():
                    while deltas:
                        yield mine[request_id], deltas.popleft()
                for request_id in ended:
                    streams.pop(request_id, None)
                    self._deltas.pop(request_id, None)
                    yield mine.pop(request_id), self.engine.requests.take(request_id)
                if mine:
                    self.step()
        finally:  # free their blocks at once, without another step
            with self._lock:
                for request_id in mine:
                    self.engine.abort(request_id)
                self._keep(self.engine.carry_out_aborts())
                for request_id in mine:
                    self.engine.requests.finished.pop(request_id, None)
                    self._deltas.pop(request_id, None)

    def step(self) -> list[Delta]:
        """Compute one step of the engine, with ctrl-c deferred. Return the deltas of requests that are not streamed.

        The deltas of streamed requests are kept for their callers in `run`. An exception of the engine that ended
        requests is stored in their outputs. It is raised only if it ended no request, or if the engine cannot continue.
        """
        with self._lock, deferred_interrupt():
            num_groups = len(self.engine.requests.groups)
            try:
                deltas = self.engine.step()
            except Exception as error:
                if isinstance(error, MinillmError) or len(self.engine.requests.groups) == num_groups:
                    raise
                deltas = self.engine.take_undelivered()
            return self._keep(deltas)

    def _keep(self, deltas: list[Delta]) -> list[Delta]:
        """Keep the deltas of streamed requests for their callers in `run`. Return the others."""
        others: list[Delta] = []
        for delta in deltas:
            self._deltas.get(delta.request_id, others).append(delta)
        return others

    def _add(self, request: Request) -> SequenceGroup:
        request = replace(request, request_id=request.request_id or f"request-{next(self._numbers)}")
        with self._lock:
            group = self.engine.add(request)
            if request.streamed:
                self._deltas[request.request_id] = deque()
        return group
