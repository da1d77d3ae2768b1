"""The number of threads follows the cores that others leave free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.models import write_tiny_model
from minillm import LLM
from minillm.loading import engine as load
from minillm.loading import threads
from minillm.loading.threads import FreeCores, follows_free_cores
from minillm.progress import Progress


class Machine:
    """Four cores, and other programs that keep some of them busy."""

    def __init__(self) -> None:
        self.others = 0.0  # cores
        self.now = 100.0  # seconds
        self.own = 0.0
        self.busy = 0.0

    def go_on(self, seconds: float = 1.0) -> None:
        own = min(torch.get_num_threads(), 4 - self.others) * seconds
        self.now += seconds
        self.own += own
        self.busy += own + self.others * seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine, before = Machine(), torch.get_num_threads()
    monkeypatch.setattr(time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(time, "process_time", lambda: machine.own)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "quota", lambda: 4)
    monkeypatch.setattr(FreeCores, "_ours", 0)
    monkeypatch.setattr(FreeCores, "_most", 1)
    torch.set_num_threads(4)
    yield machine
    torch.set_num_threads(before)


def after(cores: FreeCores, machine: Machine, others: float, idle: float = 0.0) -> int:
    """The number of threads after a step of a second, and another one begun, with ``idle`` seconds between them."""
    machine.others = others
    machine.go_on()
    cores.end()
    machine.now += idle
    machine.busy += others * idle
    cores.begin(None)  # type: ignore[arg-type]
    return torch.get_num_threads()


def test_threads_follow_the_load_of_others_both_ways(machine: Machine) -> None:
    cores = FreeCores(lambda: machine.busy)
    loads = [0.0, 0.2, 1.0, 2.0, 3.0, 4.0, 2.0, 0.5, 0.0]
    assert [after(cores, machine, load) for load in loads] == [4, 4, 3, 2, 1, 1, 2, 3, 4]


def test_the_load_while_the_engine_was_idle_does_not_count(machine: Machine) -> None:
    cores = FreeCores(lambda: machine.busy)
    assert after(cores, machine, 3.0, idle=10.0) == 4
    assert after(cores, machine, 3.0) == 1
    assert after(cores, machine, 0.0, idle=10.0) == 1
    assert after(cores, machine, 0.0) == 4


def test_weights_are_loaded_with_as_many_threads_as_cores_are_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The free cores are measured while the tokenizer is read, and then at each layer."""
    for name in threads._USERS_OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_busy_seconds", lambda: machine.busy)
    describe, used = load.describe, []

    def slow(*arguments: Any) -> Any:
        machine.others = 3.0
        machine.go_on()
        return describe(*arguments)

    def progress(made: Progress) -> None:
        if made.unit == "layers":
            used.append(torch.get_num_threads())
        machine.others = 1.0
        machine.go_on()

    monkeypatch.setattr(load, "describe", slow)
    LLM(str(write_tiny_model(tmp_path)), device="cpu", on_progress=progress, num_blocks=16).close()
    assert used[0] == 1
    assert set(used[1:]) == {3}


def test_a_number_that_somebody_else_sets_stays(machine: Machine) -> None:
    cores = FreeCores(lambda: machine.busy)
    assert after(cores, machine, 1.0) == 3
    torch.set_num_threads(2)
    assert [after(cores, machine, load) for load in (0.0, 3.0)] == [2, 2]


def test_an_engine_takes_the_cores_that_another_engine_left_to_others(machine: Machine) -> None:
    first = FreeCores(lambda: machine.busy)
    assert after(first, machine, 3.0) == 1
    second = FreeCores(lambda: machine.busy)
    assert after(second, machine, 1.0) == 3
    assert [after(first, machine, 0.0) for _ in range(2)] == [3, 4]  # its first measurement begins before the other's
    assert [after(second, machine, 2.0) for _ in range(2)][-1] == 2


def test_it_never_takes_more_threads_than_torch_had(machine: Machine) -> None:
    torch.set_num_threads(2)
    cores = FreeCores(lambda: machine.busy)
    assert [after(cores, machine, load) for load in (0.0, 3.0, 0.0)] == [2, 1, 2]


def test_it_looks_now_and_then_only(machine: Machine) -> None:
    looks: list[float] = []

    def read() -> float:
        looks.append(machine.now)
        return machine.busy

    cores = FreeCores(read)
    for _ in range(100):
        machine.go_on(0.01)
        cores.end()
        cores.begin(None)  # type: ignore[arg-type]
    assert 3 <= len(looks) <= 5


def test_the_systems_own_count_goes_on_and_the_users_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threads._busy_seconds()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    assert threads._busy_seconds() > began
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    assert follows_free_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not follows_free_cores()
