"""Test that tenants share threads, running requests and the queue."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.server import Engine
from minillm.server.answers import Frame
from minillm.server.completions.formatters import TextFormatter
from minillm.server.generating import GeneratedResponse, ParsedRequest
from minillm.server.http.fair_queue import FairQueue, QueueFull
from minillm.server.http.metrics import Metrics
from minillm.service.call_messages import Complete
from minillm.service.sharing import SharedThreads, leaves_some


@given(st.integers(1, 300), st.integers(1, 8), st.lists(st.integers(0, 3), max_size=400))
def test_a_tenant_that_has_nothing_finds_something_free(total: int, times: int, comers: list[int]) -> None:
    """A share stays free after tenants in any order, unless there are as many tenants as the shares allow."""
    taken = dict.fromkeys(range(4), 0)
    for tenant in comers:
        free = total - sum(taken.values())
        if free and leaves_some(taken[tenant], 1, free, times):
            taken[tenant] += 1
    assert sum(taken.values()) <= total
    if total >= (times + 1) ** 3 * 4:
        assert sum(taken.values()) < total
    if total > 1:
        assert max(taken.values()) < total, "none has everything"


def test_threads_are_shared() -> None:
    threads, goes_on = SharedThreads(4, "test"), threading.Event()
    begun: list[str] = []
    ran = threading.Semaphore(0)

    def job(name: str) -> Any:
        def run() -> None:
            begun.append(name)
            ran.release()
            goes_on.wait(60)
            if name in ("anna 0", "anna 1"):
                raise ValueError("a defect")

        return run

    for number in range(6):
        threads.submit("anna", job(f"anna {number}"))
    assert ran.acquire(timeout=60)
    assert ran.acquire(timeout=60)
    for tenant in ("ben", "carl"):
        threads.submit(tenant, job(tenant))
        assert ran.acquire(timeout=60), "it finds a thread at once"
    assert sorted(begun) == ["anna 0", "anna 1", "ben", "carl"], "one tenant has half of the threads"
    goes_on.set()
    threads.shutdown()
    assert sorted(begun) == [*(f"anna {number}" for number in range(6)), "ben", "carl"]
    assert [name for name in begun if name in ("anna 2", "anna 3", "anna 4", "anna 5")] == sorted(begun)[2:6]


@pytest.mark.anyio
async def test_seats_stay_free_for_another_tenant() -> None:
    queue = FairQueue(16, 99, shared=True)
    annas = [asyncio.create_task(queue.wait("anna", 1)) for _ in range(20)]
    await asyncio.sleep(0)
    assert queue.taken["anna"] == 14
    await asyncio.wait_for(queue.wait("ben", 1), 10)
    for _ in range(3):
        queue.release(annas[0].result())
    await asyncio.sleep(0)
    assert queue.taken["anna"] == 13, "a place is given back once"
    assert sum(task.done() for task in annas) == 14, "two slots stay free for the next tenant"
    for task in annas:
        task.cancel()
    lone = FairQueue(16, 99)
    for _ in range(16):
        await asyncio.wait_for(lone.wait("anna", 1), 10)


@pytest.mark.anyio
async def test_the_tenant_with_the_fewest_seats_is_next() -> None:
    queue = FairQueue(2, 99)
    places = [await queue.wait("anna", 1) for _ in range(2)]
    anna = asyncio.create_task(queue.wait("anna", 1))
    await asyncio.sleep(0)
    ben = asyncio.create_task(queue.wait("ben", 1))
    await asyncio.sleep(0)
    queue.release(places[0])
    await asyncio.sleep(0)
    assert ben.done(), "Anna's request is older, but she has a slot"
    assert not anna.done()
    anna.cancel()


@pytest.mark.anyio
async def test_the_queue_has_room_for_another_tenant() -> None:
    queue = FairQueue(1, 10, shared=True)
    await queue.wait("carl", 1)
    waiting = []
    for _ in range(5):
        queue.check_space("anna")
        waiting.append(asyncio.create_task(queue.wait("anna", 1)))
        await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        queue.check_space("anna")
    queue.check_space("ben")
    for task in waiting:
        task.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("streamed", [False, True])
async def test_prompts_of_one_request_take_seats_one_by_one(streamed: bool) -> None:
    """Another request has its turn as soon as one of the prompts has ended."""

    class Counted(Engine):
        most = 0

        def complete(self, call: Complete, news: asyncio.Event) -> Any:
            self.most = max(self.most, queue.num_taken)
            log.append(call.request_id)
            return super().complete(call, news)

    queue, log, engine, sent = FairQueue(2, 9), [], Counted(), []
    calls = [Complete(f"x-{number}", "anna", [1], {"max_tokens": 9}, streamed=streamed) for number in range(6)]
    form = TextFormatter(1, False, False)
    asked = ParsedRequest("anna", calls, Frame("x", "m", "text_completion"), form, streamed)
    answering = GeneratedResponse(asked, engine, queue, Metrics(queue, list), 60.0)  # type: ignore[arg-type]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def other() -> None:
        await asyncio.sleep(0.02)
        async with queue.take("ben", 1):
            log.append("ben")

    task = asyncio.create_task(other())
    await asyncio.wait_for(answering({"headers": []}, receive, send), 60)
    await task
    assert sorted(log) == ["ben", *(f"x-{number}" for number in range(6))]
    assert log.index("ben") <= 3
    assert engine.most <= 2
    assert not queue.num_taken
    assert not queue.waiting
    assert sent[0]["status"] == 200
    if streamed:
        assert b"".join(each.get("body", b"") for each in sent).endswith(b"data: [DONE]\n\n")
    assert len(engine.left) >= 6
