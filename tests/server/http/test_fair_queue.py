"""Test the queue in front of the engine: bounded, fair between tenants, and without starvation."""

from __future__ import annotations

import asyncio
import random

import pytest

from minillm.server.http.fair_queue import FairQueue, QueueFull

pytestmark = pytest.mark.anyio


async def come(queue: FairQueue, tenant: str, name: str, log: list[str], count: int = 1, priority: int = 0) -> None:
    async with queue.take(tenant, count, priority):
        log.append(name)
        await asyncio.sleep(0)


async def order(queue: FairQueue, *requests: tuple[str, str, int, int]) -> list[str]:
    """The order in which requests (tenant, name, count, priority) have their turns, after one that takes all slots."""
    log: list[str] = []
    async with queue.take("before", queue.total):
        tasks = []
        for tenant, name, count, priority in requests:
            tasks.append(asyncio.create_task(come(queue, tenant, name, log, count, priority)))
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert not queue.num_taken
    assert not queue.waiting
    return log


async def test_first_come_first_served() -> None:
    assert await order(FairQueue(1, 9), *(("a", str(i), 1, 0) for i in range(5))) == list("01234")


async def test_priority_among_a_tenants_requests() -> None:
    assert await order(FairQueue(1, 9), ("a", "x", 1, 5), ("a", "y", 1, 0), ("a", "z", 1, -3)) == list("zyx")


async def test_a_tenant_with_many_requests_does_not_keep_another_waiting() -> None:
    log: list[str] = []
    queue = FairQueue(2, 99)
    release = asyncio.Event()

    async def hold() -> None:
        async with queue.take("greedy", 1):
            await release.wait()

    holding = [asyncio.create_task(hold()) for _ in range(30)]
    await asyncio.sleep(0)
    other = asyncio.create_task(come(queue, "modest", "modest", log))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(other, *holding)
    turns = await order(FairQueue(1, 99), *(("greedy", f"g{i}", 1, 0) for i in range(9)), ("modest", "m", 1, 0))
    assert turns.index("m") == 9  # one slot: nobody has more than another, and the oldest is next


async def test_a_large_request_is_not_overtaken() -> None:
    queue, log = FairQueue(4, 9), []  # type: ignore[var-annotated]
    async with queue.take("a", 2):
        large = asyncio.create_task(come(queue, "a", "large", log, 4))
        await asyncio.sleep(0)
        small = asyncio.create_task(come(queue, "a", "small", log, 1))
        await asyncio.sleep(0)
        assert log == []
    await asyncio.gather(large, small)
    assert log == ["large", "small"]


async def test_more_seats_than_there_are_means_all() -> None:
    assert await order(FairQueue(4, 9), ("a", "x", 100, 0)) == ["x"]


async def test_a_full_queue_says_so() -> None:
    queue = FairQueue(1, 2)
    async with queue.take("a", 1):
        waiting = [asyncio.create_task(come(queue, "a", "", [])) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            async with queue.take("a", 1):
                pass
        assert 1 <= caught.value.retry_after <= 60
    await asyncio.gather(*waiting)


async def test_cancelled_at_any_moment() -> None:
    """Random arrivals and cancellations: at the end no slot is taken, and all that stayed had their turn."""
    dice = random.Random(1)
    queue, log = FairQueue(5, 10_000), []  # type: ignore[var-annotated]
    tasks: list[asyncio.Task[None]] = []
    kept = set()
    for number in range(2_000):
        tenant = dice.choice("abc")
        task = asyncio.create_task(come(queue, tenant, str(number), log, dice.randint(1, 5), dice.randint(-2, 2)))
        tasks.append(task)
        if dice.random() < 0.3:
            await asyncio.sleep(0)
        if dice.random() < 0.5:
            dice.choice(tasks).cancel()
    for number, result in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
        if not isinstance(result, BaseException):
            kept.add(str(number))
        else:
            assert isinstance(result, asyncio.CancelledError)
    assert kept <= set(log)
    assert not queue.num_taken
    assert not queue.waiting
