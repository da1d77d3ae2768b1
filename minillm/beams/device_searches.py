"""On-device beam search: the device chooses the beams, and the CPU applies each choice one step later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.beams.candidates import BeamStep
from minillm.beams.choice import Choice
from minillm.beams.search import Candidate
from minillm.engine.failures import fail_nan
from minillm.engine.requests import Requests
from minillm.outputs import Delta
from minillm.runner.device.beams import Chosen
from minillm.sequence import Flight, SequenceGroup


@dataclass(slots=True)
class PendingSearches:
    """The pending decisions of one step's beam searches, as a `minillm.sequence.Flight`.

    At least one search runs on the device. ``on_cpu`` has the searches that the CPU runs in the same step; None without
    any.

    Attributes:
        apply_choice: the method `minillm.beams.method.Beams.apply_choice`.
        found: for each search on the device, the chosen continuations, as `Chosen.wait` returns them.
    """

    apply_choice: Callable[[BeamStep, list[Candidate]], list[Delta]]
    requests: Requests
    on_device: dict[SequenceGroup, int]  # group that the device has chosen for -> index of its search in ``chosen``
    chosen: Chosen
    on_cpu: Flight | None  # the CPU's searches in the same step, of other groups
    may_run_ahead: bool = field(init=False)
    may_compute_ahead: bool = field(init=False)
    found: list[list[tuple[float, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_run_ahead = self.may_compute_ahead = self.on_cpu is None

    @property
    def groups(self) -> list[SequenceGroup]:
        return [*self.on_device] if self.on_cpu is None else [*self.on_device, *self.on_cpu.groups]

    def wait(self) -> None:
        self.found = self.chosen.wait()
        if self.on_cpu is not None:
            self.on_cpu.wait()

    def conclude(self) -> list[Delta]:
        deltas: list[Delta] = []
        for group, number in self.on_device.items():
            for sequence in group.sequences:
                sequence.num_pending -= 1
            if group.finished or group.error is not None:
                continue
            try:
                deltas += self._apply_choice(group, self.found[number])
            except Exception as error:
                self.requests.scheduler.fail(group, error)
        return deltas if self.on_cpu is None else deltas + self.on_cpu.conclude()

    def _apply_choice(self, group: SequenceGroup, found: list[tuple[float, int, int]]) -> list[Delta]:
        if any(math.isnan(value) for value, _, _ in found):
            fail_nan(self.requests, group)
            return []
        # The device identifies a beam by its place among the group's sequences; a `Candidate` has the beam's rank.
        ranks = [sequence.index for sequence in group.sequences]
        candidates = [Candidate(value, ranks[place], token_id) for value, place, token_id in found]
        return self.apply_choice(BeamStep(group, [Choice(group, ranks, group.state.beams[0])]), candidates)

    def discard(self) -> None:
        for group in self.on_device:
            for sequence in group.sequences:
                sequence.num_pending = 0
        if self.on_cpu is not None:
            self.on_cpu.discard()
