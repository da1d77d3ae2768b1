"""Share items such as threads or open streams fairly, so that no tenant can take all of them."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def leaves_some(own: int, count: int, free: int, times: int = 1) -> bool:
    """Return whether a tenant that has ``own`` items may take ``count`` more of the ``free`` items.

    After that, the tenant must have at most ``times`` times the number of items that are still free. So other tenants
    always find some free items (dynamic thresholds, Choudhury and Hahne 1998). A tenant that has no items may take any
    number.
    """
    return not own or own + count <= times * (free - count)


class SharedThreads:
    """A thread pool that no tenant can fill.

    When a thread is free, it runs the oldest job of the tenant with the fewest running jobs.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], object]]] = {}  # by tenant
        self._running: Counter[str] = Counter()

    def submit(self, tenant: str, job: Callable[[], object]) -> None:
        """Queue a job of a tenant."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(job)
        self._pool.submit(self._work)

    def shutdown(self) -> None:
        """Wait for all jobs and stop the threads."""
        self._pool.shutdown()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            tenant, job = taken
            try:
                job()
            except Exception as error:  # a bug ends one job, not the thread
                sys.stderr.write(f"job failed: {type(error).__name__}: {error}\n")
            with self._lock:
                self._running[tenant] -= 1

    def _take(self) -> tuple[str, Callable[[], object]] | None:
        """Return the next job and its tenant, and count the job as running. Return None if no job may run now."""
        with self._lock:
            free = self._count - self._running.total()
            able = [tenant for tenant in self._waiting if leaves_some(self._running[tenant], 1, free)]
            if not able:
                return None
            tenant = min(able, key=self._running.__getitem__)
            self._running[tenant] += 1
            job = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            return tenant, job
