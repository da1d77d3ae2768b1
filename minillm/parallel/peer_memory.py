"""The memory of another process's GPU in this one's address space, by CUDA's inter-process handles.

`torch.distributed`'s symmetric memory does this, too, but counts its exchanges per process: a process that makes its
second model does not find ranks that were started for it. What is needed here is three calls of the CUDA driver.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch import Tensor

_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class PeerMemoryError(RuntimeError):
    """The driver will not hand out or open memory: another host, no way between the GPUs, another allocator."""


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(str(error)) from None
    pointer = ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = (ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t), pointer)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (pointer,)
    return driver


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise PeerMemoryError(f"{function} gives CUDA error {status}")


def export_memory(tensor: Tensor) -> bytes:
    """What another process of this host needs to open ``tensor``, which must outlive that."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), tensor.data_ptr())
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    offset = tensor.data_ptr() - (base.value or 0)
    return offset.to_bytes(8, "little") + bytes(handle.bytes)


class PeerMemory:
    """Another process's tensor, for kernels on the current device; ``address`` is where they find it."""

    def __init__(self, exported: bytes) -> None:
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(exported[8:])
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_ENABLE_PEER_ACCESS)
        self._base = base.value or 0
        self.address = self._base + int.from_bytes(exported[:8], "little")

    def close(self) -> None:
        """No kernel may use it any more."""
        _driver().cuIpcCloseMemHandle(self._base)
