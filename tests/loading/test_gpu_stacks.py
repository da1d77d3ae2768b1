"""Test the limit of a GPU's stacks: minillm's own processes lower it, and it is restored. The driver is a fake."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from minillm.config import EngineConfig
from minillm.loading import gpu_stacks

GPU = torch.device("cuda", 0)


class Driver:
    """Keeps a limit, and notes what it is set to."""

    def __init__(self) -> None:
        self.limits = [1024]

    def cuCtxSetLimit(self, which: int, size: ctypes.c_size_t) -> int:
        self.limits.append(size.value)
        return 0

    def cuCtxGetLimit(self, size: Any, which: int) -> int:
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self.limits[-1]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(gpu_stacks, "_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1, 1))
    return driver


def test_a_process_of_one_gpu_keeps_small_stacks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_stacks.lower_stack_limit(GPU, EngineConfig(tensor_parallel_size=2))
    assert driver.limits == [1024], "NCCL's kernels do not say what they need"
    gpu_stacks.lower_stack_limit(GPU, EngineConfig())
    assert driver.limits == [1024, 128]


def test_what_is_given_back_leaves_the_limit(driver: Driver) -> None:
    gpu_stacks.free_stacks(GPU)
    assert driver.limits == [1024, 2048, 1024]


def test_what_goes_wrong_is_left_to_the_load(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError

    def no_memory(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("torch.cuda.mem_get_info", no_memory)
    gpu_stacks.lower_stack_limit(GPU, EngineConfig())
    monkeypatch.setattr(gpu_stacks, "_driver", no_driver)
    gpu_stacks.free_stacks(GPU)
    gpu_stacks.lower_stack_limit(torch.device("cpu"), EngineConfig())
    assert driver.limits == [1024]
