"""Test the processes that load the machine during a measurement: they compute, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.programs.warm import process_of
from lib.terminal import children, wait_until_gone
from minillm.bench.latency import busy

_HOLDS = """
import time
from minillm.bench.latency import busy
with busy(2):
    print("begun", flush=True)
    time.sleep(600)
"""


def processor_time(pid: int) -> int:
    """Return the time in ticks; the time of a process that has ended does not grow."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


@pytest.fixture
def holding(minillm_command: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that lets two others compute, and the ids of those two."""
    with subprocess.Popen(
        [*minillm_command, "-c", _HOLDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process, children(process_of(process.pid))
        finally:
            process.kill()


def test_they_compute_inside_the_with_and_end_with_it() -> None:
    before = set(children(os.getpid()))
    with busy(2):
        [*pids] = set(children(os.getpid())) - before
        assert len(pids) == 2
        for pid in pids:
            while processor_time(pid) <= 5:
                time.sleep(0.01)
    assert set(children(os.getpid())) <= before


def test_an_error_inside_ends_them() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ZeroDivisionError), busy(1):
        1 / 0  # noqa: B018
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_none_outlives_a_process_that_is_stopped(
    holding: tuple[subprocess.Popen[str], list[int]], number: signal.Signals
) -> None:
    process, others = holding
    assert len(others) == 2
    os.kill(process_of(process.pid), number)
    process.wait()
    for pid in others:
        wait_until_gone(pid)


def test_ctrl_c_on_a_terminal_reaches_all_of_them_at_once() -> None:
    """The whole group gets the signal: only the process that was told to sleep prints a traceback."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _HOLDS], **pipes, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        others = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert errors.count("Traceback") == 1
    for pid in others:
        wait_until_gone(pid)
