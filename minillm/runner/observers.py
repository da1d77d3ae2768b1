"""Objects that a runner notifies of every step: a draft model, the other ranks, meters."""

from collections.abc import Sequence

from minillm.runner.step import StepWork
from minillm.sequence import Schedule


class StepObserver:
    """Base class of objects that a runner calls at every step. Each method does nothing by default."""

    def prepare(self, schedule: Schedule, copies: list[tuple[int, int]]) -> None:
        """Repeat the step's block moves and (source, destination) copies in the observer's own KV pool, if it has one.

        A draft model also proposes draft tokens for the step's chunks that have slots for them.
        """

    def begin(self, work: StepWork) -> None:
        """Handle the step's ``work`` before the device gets it, for example send it to other ranks."""

    def end(self) -> None:
        """Handle the end of a step, after its work has been launched. Called again after the step's draws if these come
        later.
        """

    def replace(self, blocks: Sequence[int]) -> None:
        """Handle new content of ``blocks`` of the pool, which was read from disk."""

    def prepare_ahead(self) -> bool:
        """See `Runner.prepare_ahead`."""
        return False

    def forget(self) -> None:
        """Discard everything derived from the device's state, because a step has failed."""

    def close(self) -> None:
        """Free resources that would outlive the runner."""
