"""Test that running out of memory gives one line, whichever library reports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.cli import main as cli
from minillm.config import EngineConfig
from minillm.errors import CapacityError, memory_errors
from minillm.loading.engine import load_engine


def of_python() -> None:
    raise MemoryError


def of_the_cpu() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def of_the_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of …")


def of_cuda() -> None:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported …")


def of_cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def of_the_driver() -> None:
    raise RuntimeError("CUDA driver error: out of memory")


def of_triton() -> None:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def of_nccl() -> None:
    raise RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")


ON_GPU = [of_the_gpu, of_cuda, of_cublas, of_the_driver, of_triton, of_nccl]
ALL = [of_python, of_the_cpu, *ON_GPU]


@pytest.mark.parametrize("fails", ALL)
def test_memory_that_runs_out_is_one_line(fails, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    with pytest.raises(CapacityError, match="not enough memory") as caught, memory_errors():
        fails()
    assert "\n" not in str(caught.value)
    assert ("the GPU" in str(caught.value)) == (fails in ON_GPU)
    monkeypatch.setattr("minillm.cli.info.run", lambda arguments: fails())
    assert cli.main(["info"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("minillm: error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("fails", ALL)
def test_loading_says_it_too(fails, monkeypatch) -> None:
    monkeypatch.setattr("minillm.loading.engine.describe", lambda *arguments: fails())
    with pytest.raises(CapacityError, match="not enough memory"):
        load_engine("any", EngineConfig(device="cpu"))


def test_other_errors_stay(monkeypatch) -> None:
    with pytest.raises(ValueError, match="other"), memory_errors():
        raise ValueError("other")


def test_a_little_memory_has_a_unit_of_its_own(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1 << 30, 1 << 30])  # for the check of the weights and for the size of a step; then it is short
    monkeypatch.setattr("minillm.loading.pool_size.free_bytes", lambda device: next(free, 3000))
    with pytest.raises(CapacityError, match=r"one block takes 6\.0 KiB .*, 1\.5 KiB may be used"):
        load_engine(str(tiny_model), EngineConfig(device="cpu"))
