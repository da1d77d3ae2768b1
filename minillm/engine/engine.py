"""The engine: requests in, tokens out, one step at a time: schedule -> run -> launch -> (wait) -> conclude.

Where the device keeps drawn tokens itself, the next step is launched before the host waits for this one's: the
scheduler counts a token that is under way (`Sequence.num_pending`) like any other. A sequence that turns out to have
ended costs one wasted token then, which is discarded. Where the next draws need this step's tokens on the host, as
those of a grammar do, the next logits are computed ahead, and drawn from when this step is concluded. One thread
drives all but `Engine.abort`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minillm.engine.figures import Figures
from minillm.engine.requests import Request, Requests
from minillm.engine.scores import ScoreOnly, Scoring
from minillm.outputs import Delta, RequestOutput
from minillm.params import Params
from minillm.runner.runner import Runner
from minillm.sequence import Chunk, Flight, Method, Schedule, SequenceGroup, Stage


@dataclass(slots=True)
class Step:
    """A step that has been launched: its decisions, one flight for each method, are still to be concluded.

    Attributes:
        undecided: logits, and the chunks to be decided about, until the step in front has been concluded.
    """

    schedule: Schedule
    flights: list[Flight]
    undecided: tuple[Tensor, list[Chunk]] | None = None

    @property
    def is_wanted(self) -> bool:
        return any(flight.is_wanted for flight in self.flights)

    @property
    def may_run_ahead(self) -> bool:
        return bool(self.flights) and all(flight.may_run_ahead for flight in self.flights)

    @property
    def may_compute_ahead(self) -> bool:
        return bool(self.flights) and all(flight.may_compute_ahead for flight in self.flights)

    def discard(self) -> None:
        for flight in self.flights:
            flight.discard()


class Engine:
    """A model, its pool of blocks and the requests that run on it.

    Args:
        methods: the way of decoding for each kind of parameters.
        guard: entered around every step; it may turn a failure into another one.
        on_close: called by `close`.
        source: where the weights came from, for people.
        defaults: sampling parameters that the model itself asks for.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Requests,
        methods: Mapping[type[Params], Method],
        *,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_close: Callable[[], object] = lambda: None,
        source: str = "",
        defaults: Mapping[str, Any] = {},
    ) -> None:
        self.runner, self.requests, self.source, self.defaults = runner, requests, source, defaults
        self.tokenizer, self.max_model_len = requests.tokenizer, requests.max_model_len
        self.scheduler, self.cache = requests.scheduler, requests.scheduler.cache
        self.figures = Figures(self.scheduler)
        self._score_only = ScoreOnly(requests)
        self._methods, self._guard, self._on_close = methods, guard, on_close
        self._aborts: deque[str] = deque()
        self._under_way: Step | None = None
        self._undelivered: list[Delta] = []  # of requests that ended between two steps, or before a failure

    @property
    def has_work(self) -> bool:
        return bool(self.requests.groups)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request; raises UsageError for a bad prompt or an id in use, CapacityError if it can never fit."""
        method = self._methods[type(request.params)] if request.params.max_tokens else self._score_only
        return self.requests.add(request, method)

    def add_request(self, request_id: str, token_ids: SequenceOf[int], params: Params, **options: Any) -> SequenceGroup:
        """`add`, given the fields of a `Request`."""
        return self.add(Request(token_ids, params, request_id=request_id, **options))

    def abort(self, request_id: str) -> None:
        """End a request at the next step, wherever it is, and keep its output so far. Any thread may call this."""
        self._aborts.append(request_id)

    def carry_out_aborts(self) -> list[Delta]:
        """End the requests that `abort` named, without computing anything."""
        names = dict.fromkeys(self._aborts.popleft() for _ in range(len(self._aborts)))
        groups = self.requests.groups
        return self.requests.end([groups[name] for name in names if name in groups]) + self.requests.end_failed()

    def take_finished(self) -> list[RequestOutput]:
        """The requests that have finished since the last call, in the order in which they did."""
        return [self.requests.take(request_id) for request_id in list(self.requests.finished)]

    def close(self) -> None:
        """Let go of everything that would outlive the engine; nothing can be computed after that."""
        self._on_close()

    def step(self) -> list[Delta]:
        """Compute one step, and perhaps launch the next. Return its additions to each completion.

        A request whose method raises ends alone, with the error. If the device fails, every request that was part of
        the step ends with the error, its blocks are freed, and the exception is raised; the engine itself stays usable,
        unless its guard says otherwise.
        """
        with self._guard():
            began = time.monotonic()
            deltas = self.take_undelivered() + self.carry_out_aborts()
            step, self._under_way = self._under_way, None
            if step is None or not step.is_wanted:
                step = self._launch()
            if step is None:
                deltas += self.take_undelivered()
                assert deltas or not self.has_work, "no progress: there is work, and nothing of it can run"
                return deltas
            try:
                deltas += self._advance(step)
            except Exception:
                self._undelivered = deltas + self._undelivered
                raise
            self.figures.report(step.schedule, began)
            return deltas + self.take_undelivered()

    def take_undelivered(self) -> list[Delta]:
        """Return the additions that no step has returned, once: for callers of a step that has raised."""
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def _advance(self, step: Step) -> list[Delta]:
        """Launch the step behind ``step`` where that is possible, then conclude ``step``."""
        failure: Exception | None = None
        if step.may_run_ahead or step.may_compute_ahead:
            try:
                self._under_way = self._launch(decide=step.may_run_ahead)
            except Exception as error:
                failure = error  # that step's; this one has yet to be concluded
        try:
            deltas = self.conclude(step)
        except Exception as error:
            for each in (step, self._under_way):
                if each is not None:
                    self._fail_step(each, error)
            self._under_way = None
            raise
        if self._under_way is not None:
            try:
                self._decide(self._under_way)
            except Exception as error:
                self._fail_step(self._under_way, error)
                self._under_way, failure = None, error
        if failure is not None:
            self._undelivered += deltas
            raise failure
        if self._under_way is not None and not self._under_way.is_wanted:
            self._under_way.discard()
            self._under_way = None
        return deltas

    def _launch(self, *, decide: bool = True) -> Step | None:
        """Schedule a step and give it to the device; None where nothing can run. `_decide` may come later."""
        schedule = self.scheduler.schedule()
        self._undelivered += self.requests.end_failed()
        if not schedule.chunks:
            # A group that had to go while all others only wait for their last token: its blocks must be saved now.
            self.runner.move(schedule)
            return None
        self.figures.count_blocks()
        step, began = Step(schedule, []), time.monotonic()
        try:
            logits, sampled = self.runner.run(schedule, self.cache.take_copies())
            if (scored := self.runner.forward.take()) is not None:
                step.flights.append(Scoring.launched(self.requests, scored, schedule))
            self.note_computed(schedule)
            step.undecided = logits, sampled
            if decide:
                self._decide(step)
        except Exception as error:
            self._fail_step(step, error)
            raise
        self.figures.device_seconds += time.monotonic() - began
        return step

    def _decide(self, step: Step) -> None:
        """Have the methods decide about a step's sequences that have not ended meanwhile, unless they have done so."""
        if step.undecided is not None:
            (logits, sampled), step.undecided = step.undecided, None
            running = [c for c in sampled if c.sequence.finish_reason is None and c.group.error is None]
            self.launch_flights(step, logits, running)

    def launch_flights(self, step: Step, logits: Tensor, sampled: list[Chunk]) -> None:
        """Have each method decide about its own sequences."""
        parts: dict[Method, list[Chunk]] = {}
        for chunk in sampled:
            parts.setdefault(chunk.group.method, []).append(chunk)
        failed: set[SequenceGroup] = set()
        for method, chunks in parts.items():
            try:
                step.flights.append(method.launch(logits, chunks))
            except Exception as error:
                failed |= self._launch_others(step, method, logits, chunks, error)
                if failed.issuperset(chunk.group for chunk in step.schedule.chunks):
                    raise  # no request of the step goes on: the device has failed

    def _launch_others(
        self, step: Step, method: Method, logits: Tensor, chunks: list[Chunk], error: Exception
    ) -> set[SequenceGroup]:
        """Fail the group that a method cannot decide about, and launch the others'; all fail if there are several."""
        groups = dict.fromkeys(chunk.group for chunk in chunks)
        for culprit in groups if len(groups) > 1 else ():
            try:
                step.flights.append(method.launch(logits, [chunk for chunk in chunks if chunk.group is not culprit]))
            except Exception:
                continue
            groups = {culprit: None}
            break
        for group in groups:
            self.scheduler.fail(group, error)
        return set(groups)

    def note_computed(self, schedule: Schedule) -> None:
        """Note the computed tokens, make full blocks findable, and fork groups whose prompt is complete.

        The device writes in the order of the steps: later steps may rely on its writes before they are done.
        """
        size = self.cache.block_size
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            table = sequence.table
            assert table is not None
            computed = sequence.num_computed = sequence.num_computed + chunk.count
            if computed // size > len(table.nodes):
                self.cache.commit(table, sequence.token_ids, min(computed, len(sequence.token_ids)))
        for chunk in schedule.prefills:
            group, sequence = chunk.group, chunk.sequence
            if group.stage is Stage.PROMPT and sequence.num_computed == group.num_prompt_tokens:
                try:
                    group.method.prompt_computed(group, sequence)
                except Exception as error:
                    self.scheduler.fail(group, error)

    def conclude(self, step: Step) -> list[Delta]:
        """Wait for a step's decisions and let its sequences go on accordingly."""
        waited = time.monotonic()
        for flight in step.flights:
            flight.wait()
        self.figures.device_seconds += time.monotonic() - waited
        deltas: list[Delta] = []
        groups: dict[SequenceGroup, None] = {}
        for flight in step.flights:
            groups.update(dict.fromkeys(flight.groups))
            try:
                deltas += flight.conclude()
            except Exception as error:
                for group in flight.groups:
                    self.scheduler.fail(group, error)
        running = [group for group in groups if group.request_id in self.requests.groups]
        deltas += self.requests.end([group for group in running if group.error is not None])
        self.requests.retire([group for group in running if group.error is None and group.finished])
        return deltas + self.requests.end_failed()

    def _fail_step(self, step: Step, error: Exception) -> None:
        """End every request that was part of a step in which the device failed."""
        step.discard()
        self.runner.forget()
        groups: dict[str, SequenceGroup] = {}
        for chunk in step.schedule.chunks:
            if chunk.sequence.table is not None:
                self.cache.distrust(chunk.sequence.table)
            if chunk.group.request_id in self.requests.groups:
                groups[chunk.group.request_id] = chunk.group
                chunk.group.error = f"{type(error).__name__}: {error}"
        self.requests.end(list(groups.values()))
        for group in step.schedule.preempted:
            if group.stage is Stage.SAVED:
                self.scheduler.preemption.start_over(group)  # how much of it reached the host is unknown
