"""Objects that follow every step of a runner: a draft model, other ranks, meters."""

from minillm.runner.step import StepWork
from minillm.sequence import Schedule


class StepObserver:
    """Called at every step of a runner. Each method does nothing by default."""

    def prepare(self, schedule: Schedule, copies: list[tuple[int, int]]) -> None:
        """Follow the block moves and (source, destination) copies of a step; propose its optional tokens."""

    def begin(self, work: StepWork) -> None:
        """Note that the device is about to get ``work``."""

    def end(self) -> None:
        """Note that the device has got the step's work, or also its draws: it may be called twice for a step."""

    def prepare_ahead(self) -> bool:
        """See `Runner.prepare_ahead`."""
        return False

    def forget(self) -> None:
        """Discard what depends on the device's state: a step has failed."""

    def close(self) -> None:
        """Free everything that would outlive the runner."""
