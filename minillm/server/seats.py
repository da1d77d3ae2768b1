"""Who is next: a bounded queue before the engine, fair between tenants, that starves nobody."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.server.sharing import leaves_some

_PATIENCE = 10.0  # seconds of waiting that weigh as much as one step of priority, or one seat that a tenant has
_TIMES = 7  # as many seats as stay free may be one tenant's


class Full(Exception):
    """The queue is full; ``retry_after`` is the number of seconds after which there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the queue is full; try again later")
        self.retry_after = retry_after


def num_seats(params: Mapping[str, Any]) -> Any:
    """The sequences at a time that a prompt's sampling parameters ask for, as they were sent: nothing is checked."""
    return params.get("beam_width") or params.get("n") or 1


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and then its seats."""

    tenant: str
    count: int
    priority: int
    since: float  # when it came, and then when it got its seats
    turn: asyncio.Future[None]
    is_free: bool = False  # the seats are given back


@dataclass
class Seats:
    """``total`` sequences are in the engine's hands at a time, and ``most_waiting`` requests wait before it.

    Where several tenants share them, none takes all seats or the whole queue: some stay free for others.
    Next is the request of the tenant with the fewest seats. Among a tenant's requests the one with the lowest
    ``priority`` is next, then the oldest. Waiting makes up for both, so everybody's turn comes. A request that is next
    and does not fit yet is not overtaken.
    """

    total: int
    most_waiting: int
    taken: Counter[str] = field(default_factory=Counter)
    waiting: list[Place] = field(default_factory=list)
    shared: bool = False
    _mean_seconds: float = 1.0  # that a request takes

    @property
    def num_taken(self) -> int:
        return self.taken.total()

    def check_room(self, tenant: str) -> None:
        """Raise Full if one more request of this tenant would be told to come again."""
        free = self.most_waiting - len(self.waiting)
        own = sum(each.tenant == tenant for each in self.waiting) if self.shared else 0
        if free <= 0 or not leaves_some(own, 1, free):
            raise Full(self.retry_after())

    @asynccontextmanager
    async def take(self, tenant: str, count: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait for ``count`` seats and give them back afterwards. Raises Full."""
        self.check_room(tenant)
        place = await self.wait(tenant, count, priority)
        try:
            yield
        finally:
            self.give_back(place)

    async def wait(self, tenant: str, count: int, priority: int = 0) -> Place:
        """Wait for ``count`` seats, however long the queue is. They are to be given back."""
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
                self.give_back(place)
            raise
        place.since = time.monotonic()
        return place

    def give_back(self, place: Place) -> None:
        """Give seats back, once."""
        if place.is_free:
            return
        place.is_free = True
        self._mean_seconds += 0.1 * (time.monotonic() - place.since - self._mean_seconds)
        self.taken[place.tenant] -= place.count
        if self.taken[place.tenant] <= 0:
            del self.taken[place.tenant]
        self._call()

    def retry_after(self) -> int:
        """Seconds until a queue as long as this has moved on by a request."""
        return max(1, min(60, round(self._mean_seconds * len(self.waiting) / max(1, self.total))))

    def _call(self) -> None:
        """Let those whose turn it is go on."""
        while self.waiting:
            now = time.monotonic()
            able = [each for each in self.waiting if self._leaves_some(each)] if self.shared else self.waiting
            if not able:
                return
            first = min(able, key=lambda each: self._rank(each, now))
            if self.num_taken + first.count > self.total and not first.turn.done():
                return
            self.waiting.remove(first)
            if first.turn.done():  # cancelled, and its task has not run since
                continue
            self.taken[first.tenant] += first.count
            first.turn.set_result(None)

    def _leaves_some(self, each: Place) -> bool:
        free = self.total - self.num_taken
        return each.turn.done() or leaves_some(self.taken[each.tenant], each.count, free, _TIMES)

    def _rank(self, each: Place, now: float) -> tuple[int, int, float]:
        waited = int((now - each.since) / _PATIENCE)
        return self.taken[each.tenant] - waited, each.priority - waited, each.since
