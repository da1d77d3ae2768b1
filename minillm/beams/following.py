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
class Followed:
    """The pending decisions of one step's beam searches, as a `minillm.sequence.Flight`.

    At least one search runs on the device. ``hosted`` has the searches that the CPU runs in the same step; None without
    any.

    Attributes:
        follow: the method `minillm.beams.method.Beams.follow`, which applies the device's choice for a group.
        found: for each search on the device, the chosen continuations, as `Chosen.wait` returns them.
    """

    follow: Callable[[BeamStep, list[Candidate]], list[Delta]]
    requests: Requests
    following: dict[SequenceGroup, int]  # group that the device has chosen for -> index of its search in ``chosen``
    chosen: Chosen
    hosted: Flight | None  # the CPU's searches in the same step, of other groups
    may_run_ahead: bool = field(init=False)
    may_compute_ahead: bool = field(init=False)
    found: list[list[tuple[float, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_run_ahead = self.may_compute_ahead = self.hosted is None

    @property
    def groups(self) -> list[SequenceGroup]:
        return [*self.following] if self.hosted is None else [*self.following, *self.hosted.groups]

    def wait(self) -> None:
        self.found = self.chosen.wait()
        if self.hosted is not None:
            self.hosted.wait()

    def conclude(self) -> list[Delta]:
        deltas: list[Delta] = []
        for group, number in self.following.items():
            for sequence in group.sequences:
                sequence.num_pending -= 1
            if group.finished or group.error is not None:
                continue
            try:
                deltas += self._follow(group, self.found[number])
            except Exception as error:
                self.requests.scheduler.fail(group, error)
        return deltas if self.hosted is None else deltas + self.hosted.conclude()

    def _follow(self, group: SequenceGroup, found: list[tuple[float, int, int]]) -> list[Delta]:
        if any(math.isnan(value) for value, _, _ in found):
            fail_nan(self.requests, group)
            return []
        # The device identifies a beam by its place among the group's sequences; a `Candidate` has the beam's rank.
        ranks = [sequence.index for sequence in group.sequences]
        candidates = [Candidate(value, ranks[place], token_id) for value, place, token_id in found]
        return self.follow(BeamStep(group, [Choice(group, ranks, group.state.beams[0])]), candidates)

    def discard(self) -> None:
        for group in self.following:
            for sequence in group.sequences:
                sequence.num_pending = 0
        if self.hosted is not None:
            self.hosted.discard()
