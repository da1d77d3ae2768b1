"""Turn a blocking generator into an asynchronous generator."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")


async def in_threads(items: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Yield the items of a blocking generator, which runs in worker threads.

    Closing the asynchronous generator also closes the blocking one.
    """
    lock = threading.Lock()  # the thread of a cancelled task must end before the generator is closed

    def locked(step: Callable[[], Item | None]) -> Item | None:
        with lock:
            return step()

    try:
        while (item := await asyncio.to_thread(locked, partial(next, items, None))) is not None:
            yield item
    finally:
        await asyncio.shield(asyncio.to_thread(locked, items.close))
