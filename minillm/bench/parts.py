"""Measure the CPU time of an engine's steps, split into parts such as the scheduler.

If one part calls another part, the time of that call counts only for the called part.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from minillm.engine.engine import Engine
from minillm.engine.requests import Requests
from minillm.engine.samples import Samples
from minillm.engine.scheduler import Scheduler
from minillm.grammar.vocabulary import Vocabulary
from minillm.runner.runner import Runner
from minillm.runner.sampler import Drawn

WAIT = "waiting for the device"
_METHODS: tuple[tuple[type, str, str], ...] = (
    (Engine, "step", "the engine itself"),
    (Scheduler, "schedule", "scheduler and cache"),
    (Engine, "note_computed", "scheduler and cache"),
    (Requests, "advance", "matchers take tokens"),
    (Samples, "append", "texts and ends"),
    (Vocabulary, "fill", "masks: the library"),
)
_OF_RUNNER = ("run", "launching forward passes"), ("draw", "launching draws")
PARTS: tuple[str, ...] = (*dict.fromkeys(part for _, _, part in _METHODS), *(part for _, part in _OF_RUNNER), WAIT)


@contextmanager
def parts_of_steps(runner: type = Runner, drawn: type = Drawn) -> Iterator[dict[str, float]]:
    """Time all engine steps of this process inside the ``with``, by wrapping methods of the engine's classes.

    Yield a dictionary: part of `PARTS` -> seconds so far. Clear the dictionary to restart the measurement.

    Args:
        runner: the class of the runner.
        drawn: the class of the runner's drawn tokens. The time in its method `wait` counts as `WAIT`.
    """
    places = [*_METHODS, *((runner, name, part) for name, part in _OF_RUNNER), (drawn, "wait", WAIT)]
    seconds: dict[str, float] = defaultdict(float)
    within: list[float] = []  # for each timed call that is running, outermost first: the seconds of timed calls in it

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - began
                seconds[part] += taken - within.pop()
                if within:
                    within[-1] += taken

        return call

    own = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield seconds
    finally:
        for owner, name, function in own:
            if function is None:  # the class had inherited it
                delattr(owner, name)
            else:
                setattr(owner, name, function)
