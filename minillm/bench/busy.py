"""Processes that keep cores busy beside a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOOP = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let ``count`` other processes compute inside the ``with``.

    They end with it, and by themselves within milliseconds where this process ends in any other way.
    """
    command = [sys.executable, "-I", "-S", "-c", _LOOP, str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)
        )
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # from now on it computes
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
