"""Who is next: a bounded queue before the engine, fair between tenants, that starves nobody."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

_PATIENCE = 10.0  # seconds of waiting that weigh as much as one step of priority, or one seat that a tenant has


class Full(Exception):
    """The queue is full; ``retry_after`` is the number of seconds after which there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the queue is full; try again later")
        self.retry_after = retry_after


def num_seats(params: Mapping[str, Any]) -> Any:
    """The sequences at a time that a prompt's sampling parameters ask for, as they were sent: nothing is checked."""
    return params.get("beam_width") or params.get("n") or 1


@dataclass(eq=False)
class _Waiter:
    tenant: str
    count: int
    priority: int
    since: float
    turn: asyncio.Future[None]


@dataclass
class Seats:
    """``total`` sequences are in the engine's hands at a time, and ``most_waiting`` requests wait before it.

    Next is the request of the tenant with the fewest seats. Among a tenant's requests the one with the lowest
    ``priority`` is next, then the oldest. Waiting makes up for both, so everybody's turn comes. A request that is next
    and does not fit yet is not overtaken.
    """

    total: int
    most_waiting: int
    taken: Counter[str] = field(default_factory=Counter)
    waiting: list[_Waiter] = field(default_factory=list)
    _mean_seconds: float = 1.0  # that a request takes

    @property
    def num_taken(self) -> int:
        return self.taken.total()

    def check_room(self) -> None:
        """Raise Full where one more would be told to come again."""
        if len(self.waiting) >= self.most_waiting:
            raise Full(self.retry_after())

    @asynccontextmanager
    async def take(self, tenant: str, count: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait for ``count`` seats, and give them back behind; raises Full."""
        count = min(count, self.total)
        self.check_room()
        waiter = _Waiter(tenant, count, priority, time.monotonic(), asyncio.get_running_loop().create_future())
        self.waiting.append(waiter)
        self._call()
        try:
            await waiter.turn
            began = time.monotonic()
            yield
            self._mean_seconds += 0.1 * (time.monotonic() - began - self._mean_seconds)
        finally:
            if waiter in self.waiting:
                self.waiting.remove(waiter)
            elif not waiter.turn.cancelled():
                self.taken[tenant] -= count
                if self.taken[tenant] <= 0:
                    del self.taken[tenant]
            self._call()

    def retry_after(self) -> int:
        """Seconds until a queue as long as this has moved on by a request."""
        return max(1, min(60, round(self._mean_seconds * len(self.waiting) / max(1, self.total))))

    def _call(self) -> None:
        """Let those whose turn it is go on."""
        while self.waiting:
            now = time.monotonic()
            first = min(self.waiting, key=lambda each: self._rank(each, now))
            if self.num_taken + first.count > self.total and not first.turn.done():
                return
            self.waiting.remove(first)
            if first.turn.done():  # cancelled, and its task has not run since
                continue
            self.taken[first.tenant] += first.count
            first.turn.set_result(None)

    def _rank(self, each: _Waiter, now: float) -> tuple[int, int, float]:
        waited = int((now - each.since) / _PATIENCE)
        return self.taken[each.tenant] - waited, each.priority - waited, each.since
