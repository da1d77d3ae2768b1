"""Run the engine's process and check its bookkeeping after every step. An error ends it with exit code 1."""

from __future__ import annotations

import sys
from typing import Any

from minillm.cache.stats import check
from minillm.engine.engine import Engine
from minillm.service.__main__ import main

_step = Engine.step


def checked(self: Engine) -> Any:
    deltas = _step(self)
    check(self.cache)
    self.scheduler.preemption.swap.check()
    return deltas


if __name__ == "__main__":
    Engine.step = checked  # type: ignore[method-assign]
    sys.exit(main())
