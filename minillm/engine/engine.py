"""The engine turns requests into tokens, one step at a time.

A step is scheduled, and the runner starts its forward pass. Each decoding method then launches its decisions, such as
drawing tokens. To conclude the step, the CPU waits for these decisions and applies them to the sequences.

If drawn tokens stay on the device, the next step is launched before the CPU waits for this step's tokens. The scheduler
counts a pending token (`Sequence.num_pending`) like any other. If the sequence turns out to have ended, the next step's
token is discarded. Some draws, with a grammar for example, need this step's tokens on the CPU. Then only the next
logits are computed ahead, and tokens are drawn from them after this step is concluded. All calls except `Engine.abort`
come from one thread.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minillm.engine.failures import end_requests_of, launch_each
from minillm.engine.figures import Figures
from minillm.engine.requests import Request, Requests
from minillm.engine.scores import ScoreOnly, Scoring
from minillm.outputs import Delta, RequestOutput
from minillm.params import Params, SamplingParams
from minillm.runner.runner import Runner
from minillm.sequence import Chunk, Flight, Method, Schedule, SequenceGroup, Stage

_READ_SECONDS = 0.01  # maximum wait for a disk; then the engine looks for new requests and aborts


@dataclass(slots=True)
class Step:
    """A step that was launched, but is not applied to the sequences yet (`Engine.conclude` does this).

    Attributes:
        flights: the pending decisions of each decoding method, such as the tokens that the device draws.
        undecided: the step's logits, and the chunks that have logits, until the decoding methods get them. Then None.
    """

    schedule: Schedule
    flights: list[Flight]
    undecided: tuple[Tensor, list[Chunk]] | None = None

    @property
    def is_wanted(self) -> bool:
        return any(not group.finished for flight in self.flights for group in flight.groups)

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
        methods: the decoding method for each type of parameters.
        guard: returns a context manager, in which every step runs. The context manager may replace an exception by
            another.
        on_close: called by `close`.
        source: where the weights came from, for display.
        defaults: sampling parameters from the model's own configuration.
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

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's own configuration."""
        return SamplingParams(**self.defaults)

    @property
    def has_work(self) -> bool:
        return bool(self.requests.groups)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. Raise UsageError for a bad prompt or an id in use, CapacityError if it can never fit."""
        method = self._methods[type(request.params)] if request.params.max_tokens else self._score_only
        group = self.requests.add(request, method)
        while request.request_id in self._aborts:  # of an earlier request that had ended
            self._aborts.remove(request.request_id)
        return group

    def add_request(self, request_id: str, token_ids: SequenceOf[int], params: Params, **options: Any) -> SequenceGroup:
        """Queue a request, given the fields of a `Request`."""
        return self.add(Request(token_ids, params, request_id=request_id, **options))

    def abort(self, request_id: str) -> None:
        """End a request at the next step and keep its output so far. Any thread may call this."""
        self._aborts.append(request_id)

    def carry_out_aborts(self) -> list[Delta]:
        """End the requests that `abort` named, without computing anything. Return their last deltas."""
        names = dict.fromkeys(self._aborts.popleft() for _ in range(len(self._aborts)))
        groups = self.requests.groups
        return self.requests.end([groups[name] for name in names if name in groups]) + self.requests.end_failed()

    def take_finished(self) -> list[RequestOutput]:
        """Return the outputs of requests that finished since the last call, in the order in which they finished."""
        return [self.requests.take(request_id) for request_id in list(self.requests.finished)]

    def close(self) -> None:
        """Free resources that would outlive the engine. The engine cannot compute anything afterwards."""
        self._on_close()

    def step(self) -> list[Delta]:
        """Compute one step, and launch the next if possible. Return the additions to each completion.

        If a decoding method raises for a request, only that request ends, with the error. If the device fails, all
        requests of the step end with the error, their blocks are freed, and the exception is raised. The engine stays
        usable, unless the constructor's ``guard`` replaced the exception by another one.
        """
        with self._guard():
            began = time.monotonic()
            deltas = self.take_undelivered() + self.carry_out_aborts()
            step, self._under_way = self._under_way, None
            if step is None or not step.is_wanted:
                step = self._launch()
            if step is None:
                deltas += self.take_undelivered()
                waited = self.scheduler.admission.wait_for_reads(_READ_SECONDS)
                assert deltas or waited or not self.has_work, "no progress: there is work, and nothing of it can run"
                return deltas
            try:
                deltas += self._advance(step)
            except Exception:
                self._undelivered = deltas + self._undelivered
                raise
            self.figures.report(step.schedule, began)
            return deltas + self.take_undelivered()

    def take_undelivered(self) -> list[Delta]:
        """Return the deltas that no `step` has returned, for example because the step raised. Each is returned once."""
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def _advance(self, step: Step) -> list[Delta]:
        """Launch the step after ``step`` if possible, then conclude ``step`` and return its deltas."""
        failure: Exception | None = None
        if step.may_run_ahead or step.may_compute_ahead:
            try:
                self._under_way = self._launch(decide=step.may_run_ahead)
            except Exception as error:
                failure = error  # the launch of the next step failed; ``step`` is still to be concluded
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
        """Schedule a step and run it on the device; return None if nothing can run.

        If ``decide`` is false, the caller must call `_decide` later.
        """
        schedule = self.scheduler.schedule()
        self._undelivered += self.requests.end_failed()
        step, began = Step(schedule, []), time.monotonic()
        try:
            if not schedule.chunks:
                # A group was preempted while all others only wait for their last token: move its blocks now.
                self.runner.move(schedule)
                return None
            self.figures.count_blocks()
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
        """Give a step's logits to the decoding methods, once per step. Leave out sequences that have ended."""
        if step.undecided is not None:
            (logits, sampled), step.undecided = step.undecided, None
            running = [c for c in sampled if c.sequence.finish_reason is None and c.group.error is None]
            self.launch_flights(step, logits, running)

    def launch_flights(self, step: Step, logits: Tensor, sampled: list[Chunk]) -> None:
        """Start each decoding method (for example, draw tokens) for the chunks of its own requests."""
        parts: dict[Method, list[Chunk]] = {}
        for chunk in sampled:
            parts.setdefault(chunk.group.method, []).append(chunk)
        launch_each(parts, logits, step.flights, step.schedule, self.scheduler)

    def note_computed(self, schedule: Schedule) -> None:
        """Count a step's tokens as computed. Add full blocks to the prefix cache, and fork prompts that are complete.

        The device may still be computing. It executes steps in order, so later steps can already use these tokens.
        """
        size = self.cache.block_size
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            table = sequence.table
            assert table is not None
            computed = sequence.num_computed = sequence.num_computed + chunk.count
            if computed // size > len(table.nodes):
                self.requests.commit(chunk.group, sequence, computed)
        for chunk in schedule.prefills:
            group, sequence = chunk.group, chunk.sequence
            if group.stage is Stage.PROMPT and sequence.num_computed == group.num_prompt_tokens:
                try:
                    group.method.prompt_computed(group, sequence)
                except Exception as error:
                    self.scheduler.fail(group, error)

    def conclude(self, step: Step) -> list[Delta]:
        """Wait for a step's decisions and apply them to its sequences. Return the additions to each completion."""
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
        running = [group for group in groups if self.requests.has(group)]
        deltas += self.requests.end([group for group in running if group.error is not None])
        self.requests.retire([group for group in running if group.error is None and group.finished])
        return deltas + self.requests.end_failed()

    def _fail_step(self, step: Step, error: Exception) -> None:
        step.discard()
        self.runner.forget()
        end_requests_of(step.schedule, error, self.requests)
