"""Test the error of peer memory without CUDA's driver. On GPUs `gpu_check.py` uses it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from minillm.parallel import collectives
from minillm.parallel.collectives import PeerMemory, PeerMemoryError, export_memory


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    collectives._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(PeerMemoryError, match=r"libcuda\.so\.1"):
        export_memory(torch.zeros(4))
    with pytest.raises(PeerMemoryError, match=r"libcuda\.so\.1"):
        PeerMemory(bytes(72))
    collectives._driver.cache_clear()


def test_a_handle_carries_the_place_within_its_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake driver, the opened address has the offset of the exported one in its allocation."""
    x = torch.zeros(16, dtype=torch.int64)
    base = x.data_ptr() - 4096

    class Driver:
        def cuMemGetAddressRange_v2(self, found: object, size: object, address: int) -> int:
            ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = base  # type: ignore[arg-type]
            return 0

        def cuIpcGetMemHandle(self, handle: object, address: ctypes.c_uint64) -> int:
            ctypes.memmove(handle, bytes(range(64)), 64)  # type: ignore[arg-type]
            return 0

        def cuIpcOpenMemHandle_v2(self, found: object, handle: ctypes.Structure, flags: int) -> int:
            assert bytes(handle) == bytes(range(64))
            ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = 1 << 40  # type: ignore[arg-type]
            return 0

    monkeypatch.setattr(collectives, "_driver", Driver)
    exported = export_memory(x)
    assert len(exported) == 72
    assert PeerMemory(exported).address == (1 << 40) + 4096
    monkeypatch.setattr(Driver, "cuIpcOpenMemHandle_v2", lambda *arguments: 201)
    with pytest.raises(PeerMemoryError, match="cuIpcOpenMemHandle_v2 gives CUDA error 201"):
        PeerMemory(exported)
