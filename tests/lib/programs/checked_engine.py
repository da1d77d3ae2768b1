"""Run the engine's process and check its bookkeeping after every step. An error ends it with exit code 1."""

from __future__ import annotations

import sys
from typing import Any

from lib.cache_checks import check, check_swap
from minillm.engine.engine import Engine
from minillm.service.__main__ import main

_step = Engine.step


def checked(self: Engine) -> Any:
    deltas = _step(self)
    check(self.cache)
    check_swap(self.scheduler.preemption.swap)
    return deltas


if __name__ == "__main__":
    Engine.step = checked  # type: ignore[method-assign]
    sys.exit(main())
