"""A bounded, fair queue in front of the engine. No tenant starves.

A slot is the right to run one sequence in the engine. A request needs a slot for each of its sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.server.http.sending import HTTPError
from minillm.service.sharing import leaves_some

_PATIENCE = 10.0  # seconds of waiting that count as much as one step of priority or one slot of the tenant
_TIMES = 7  # a tenant may have up to this many times the number of slots that stay free


class QueueFull(HTTPError):
    """The queue is full. Try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(429, "the queue is full; try again later", [(b"retry-after", str(retry_after).encode())])
        self.retry_after = retry_after


def num_slots(params: Mapping[str, Any]) -> Any:
    """Return the number of slots that a request needs: one for each of its sequences.

    ``params`` are the request's sampling parameters, which are not checked yet.
    """
    depths = params.get("reasoning_depths")
    return params.get("beam_width") or (1 + len(depths) if isinstance(depths, list) else params.get("n") or 1)


@dataclass(eq=False)
class Place:
    """A request in the queue. When the request gets its ``count`` slots, the future ``turn`` is done."""

    tenant: str
    count: int
    priority: int
    since: float  # time at which the request was queued; once it has its slots, time at which it got the slots
    turn: asyncio.Future[None]
    is_free: bool = False  # the slots were freed


@dataclass
class FairQueue:
    """Hands out ``total`` slots to requests. At most ``most_waiting`` requests wait.

    A slot is the right to run one sequence in the engine.

    The tenant with the fewest slots is served next. Of this tenant's requests, the one with the lowest ``priority`` is
    first. Among requests of equal priority, the oldest is first. The longer a request waits, the less the number of
    slots and the priority matter, so every request is served. If too few slots are free for the next request, no other
    request overtakes it.

    If ``shared``, several tenants use the server. Then no tenant gets all slots or fills the whole queue, so other
    tenants always find some free slots and some space in the queue.
    """

    total: int
    most_waiting: int
    taken: Counter[str] = field(default_factory=Counter)
    waiting: list[Place] = field(default_factory=list)
    shared: bool = False
    _mean_seconds: float = 1.0  # moving average of the seconds that a request takes

    @property
    def num_taken(self) -> int:
        """Return the number of slots that are taken."""
        return self.taken.total()

    def check_space(self, tenant: str) -> None:
        """Raise QueueFull if the queue has no space for another request of this tenant."""
        free = self.most_waiting - len(self.waiting)
        own = sum(each.tenant == tenant for each in self.waiting) if self.shared else 0
        if free <= 0 or not leaves_some(own, 1, free):
            raise QueueFull(self.retry_after())

    @asynccontextmanager
    async def take(self, tenant: str, count: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait for ``count`` slots, one per sequence. Free them when the context closes.

        Raises QueueFull if the queue has no space.
        """
        self.check_space(tenant)
        place = await self.wait(tenant, count, priority)
        try:
            yield
        finally:
            self.release(place)

    async def wait(self, tenant: str, count: int, priority: int = 0) -> Place:
        """Wait for ``count`` slots, one per sequence, however long the queue is. Return the place in the queue.

        The caller must free the slots with `release`.
        """
        turn = asyncio.get_running_loop().create_future()
        place = Place(tenant, min(count, self.total), priority, time.monotonic(), turn)
        self.waiting.append(place)
        self._admit()
        try:
            await turn
        except BaseException:
            if place in self.waiting:
                self.waiting.remove(place)
                self._admit()
            elif not turn.cancelled():
                self.release(place)
            raise
        place.since = time.monotonic()
        return place

    def release(self, place: Place) -> None:
        """Free the slots of ``place``. A second call for the same place does nothing."""
        if place.is_free:
            return
        place.is_free = True
        self._mean_seconds += 0.1 * (time.monotonic() - place.since - self._mean_seconds)
        self.taken[place.tenant] -= place.count
        if self.taken[place.tenant] <= 0:
            del self.taken[place.tenant]
        self._admit()

    def retry_after(self) -> int:
        """Estimate the seconds after which a rejected client should try again, from 1 to 60."""
        return max(1, min(60, round(self._mean_seconds * len(self.waiting) / max(1, self.total))))

    def _admit(self) -> None:
        """Give slots to waiting requests, in order, until the next request needs more slots than are free."""
        while self.waiting:
            now = time.monotonic()
            able = [each for each in self.waiting if self._leaves_some(each)] if self.shared else self.waiting
            if not able:
                return
            first = min(able, key=lambda each: self._rank(each, now))  # the first to come among equals
            if self.num_taken + first.count > self.total and not first.turn.done():
                return
            self.waiting.remove(first)
            if first.turn.done():  # canceled, but its task has not run since
                continue
            self.taken[first.tenant] += first.count
            first.turn.set_result(None)

    def _leaves_some(self, each: Place) -> bool:
        free = self.total - self.num_taken
        return each.turn.done() or leaves_some(self.taken[each.tenant], each.count, free, _TIMES)

    def _rank(self, each: Place, now: float) -> tuple[int, int]:
        waited = int((now - each.since) / _PATIENCE)
        return self.taken[each.tenant] - waited, each.priority - waited
