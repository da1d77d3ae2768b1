"""A bounded, fair queue in front of the engine. No tenant starves.

A seat is the right to run one sequence in the engine. A request needs a seat for each of its sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.service.sharing import leaves_some

_PATIENCE = 10.0  # seconds of waiting that count as much as one step of priority or one seat of the tenant
_TIMES = 7  # a tenant may have up to this many times the number of seats that stay free


class Full(Exception):
    """The queue is full. Try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the queue is full; try again later")
        self.retry_after = retry_after


def num_seats(params: Mapping[str, Any]) -> Any:
    """Return the number of sequences that sampling parameters ask for. The values are not checked."""
    depths = params.get("reasoning_depths")
    return params.get("beam_width") or (1 + len(depths) if isinstance(depths, list) else params.get("n") or 1)


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and later its seats."""

    tenant: str
    count: int
    priority: int
    since: float  # time at which it was queued; later, time at which it got its seats
    turn: asyncio.Future[None]
    is_free: bool = False  # the seats were freed


@dataclass
class FairQueue:
    """Admits sequences to the engine, at most ``total`` at a time. At most ``most_waiting`` requests wait.

    If several tenants share the seats, none gets all seats or fills the whole queue: some stay free for others. The
    tenant with the fewest seats is served next. Among its requests, the lowest ``priority`` is first, then the oldest
    request. With time, waiting outweighs both, so every request is served. If the next request does not fit yet, no
    other request overtakes it.
    """

    total: int
    most_waiting: int
    taken: Counter[str] = field(default_factory=Counter)
    waiting: list[Place] = field(default_factory=list)
    shared: bool = False
    _mean_seconds: float = 1.0  # moving average of the seconds that a request takes

    @property
    def num_taken(self) -> int:
        """Return the number of seats that are taken."""
        return self.taken.total()

    def check_space(self, tenant: str) -> None:
        """Raise Full if the queue has no space for another request of this tenant."""
        free = self.most_waiting - len(self.waiting)
        own = sum(each.tenant == tenant for each in self.waiting) if self.shared else 0
        if free <= 0 or not leaves_some(own, 1, free):
            raise Full(self.retry_after())

    @asynccontextmanager
    async def take(self, tenant: str, count: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait for ``count`` seats. Free them when the context closes. Raises Full if the queue has no space."""
        self.check_space(tenant)
        place = await self.wait(tenant, count, priority)
        try:
            yield
        finally:
            self.release(place)

    async def wait(self, tenant: str, count: int, priority: int = 0) -> Place:
        """Wait for ``count`` seats, however long the queue is. The caller must free them with `release`."""
        turn = asyncio.get_running_loop().create_future()
        place = Place(tenant, min(count, self.total), priority, time.monotonic(), turn)
        self.waiting.append(place)
        self._call()
        try:
            await turn
        except BaseException:
            if place in self.waiting:
                self.waiting.remove(place)
                self._call()
            elif not turn.cancelled():
                self.release(place)
            raise
        place.since = time.monotonic()
        return place

    def release(self, place: Place) -> None:
        """Free the seats of a place. Further calls do nothing."""
        if place.is_free:
            return
        place.is_free = True
        self._mean_seconds += 0.1 * (time.monotonic() - place.since - self._mean_seconds)
        self.taken[place.tenant] -= place.count
        if self.taken[place.tenant] <= 0:
            del self.taken[place.tenant]
        self._call()

    def retry_after(self) -> int:
        """Return the seconds until a queue of the current length has advanced by one request."""
        return max(1, min(60, round(self._mean_seconds * len(self.waiting) / max(1, self.total))))

    def _call(self) -> None:
        """Admit the next requests, as long as they fit."""
        while self.waiting:
            now = time.monotonic()
            able = [each for each in self.waiting if self._leaves_some(each)] if self.shared else self.waiting
            if not able:
                return
            first = min(able, key=lambda each: self._rank(each, now))
            if self.num_taken + first.count > self.total and not first.turn.done():
                return
            self.waiting.remove(first)
            if first.turn.done():  # cancelled, but its task has not run since
                continue
            self.taken[first.tenant] += first.count
            first.turn.set_result(None)

    def _leaves_some(self, each: Place) -> bool:
        free = self.total - self.num_taken
        return each.turn.done() or leaves_some(self.taken[each.tenant], each.count, free, _TIMES)

    def _rank(self, each: Place, now: float) -> tuple[int, int, float]:
        waited = int((now - each.since) / _PATIENCE)
        return self.taken[each.tenant] - waited, each.priority - waited, each.since
