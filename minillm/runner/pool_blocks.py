"""Copy blocks between the KV cache and buffers in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm import kernels
from minillm.runner.host_pool import host_memory
from minillm.runner.to_host import ToHost

Buffers = list[memoryview]  # one block's bytes, in order
# By data type: an unsigned integer of the same size, and the exponent bits, which are all set for inf and NaN.
_EXPONENTS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: (np.uint64, 0x7FF0 << 48),
    torch.float32: (np.uint32, 0x7F80 << 16),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
}


@dataclass
class Incoming:
    """Host memory into which blocks are read; `PoolBlocks.put` then copies them to the pool.

    On a CPU, ``buffers`` are the pool's own memory, and nothing is copied.
    """

    blocks: list[int]
    buffers: list[Buffers]  # of each block
    staging: list[Tensor] = field(default_factory=list)  # of each tensor of the pool, [blocks, layers, 2, ...], pinned


class PoolBlocks:
    """The blocks of a KV cache's ``tensors``, each ``[layers, 2, num_blocks, ...]``, as bytes."""

    def __init__(self, tensors: Sequence[Tensor], block_size: int) -> None:
        self._tensors, self._block_size = tensors, block_size
        self._on_cpu = not tensors[0].is_cuda
        self._planes: list[NDArray[np.uint8]] = []  # on a CPU: of each tensor, [layers * 2, num_blocks, bytes]
        if self._on_cpu:
            for tensor in tensors:
                planes = tensor.view(torch.uint8).numpy()
                self._planes.append(planes.reshape(planes.shape[0] * 2, planes.shape[2], -1))
        # Each plane's bytes in one view, since slices of a view are made much faster than views of arrays.
        self._views = [(memoryview(a.reshape(-1)), a.shape[2]) for planes in self._planes for a in planes[:, None]]
        per_block = [tensor[:, :, :1].numel() * tensor.element_size() for tensor in tensors]
        self.num_bytes = sum(per_block)  # of one block

    def snapshot(self, blocks: Sequence[int], valid: int | None = None) -> Callable[[], list[Buffers] | None]:
        """Copy blocks out of the pool, as they are after the work that has been launched so far.

        Args:
            valid: how many of a block's first slots hold tokens; the other slots become zero in the copy. None: all.

        Returns:
            A function that waits for the copies and returns their bytes; any thread may call it. It returns None if a
            number is not finite.
        """
        if self._on_cpu:
            # One array for each block: small arrays come from the heap. Its pages are mapped already.
            copies = [[planes[:, block].copy() for planes in self._planes] for block in blocks]
            return lambda: self._checked(copies, valid)
        copies_of_tensors = ToHost(self._gathered(blocks))

        def fetch() -> list[Buffers] | None:
            hosts = copies_of_tensors.tensors()
            arrays = [host.view(torch.uint8).numpy().reshape(len(blocks), host.shape[1] * 2, -1) for host in hosts]
            return self._checked([[array[number] for array in arrays] for number in range(len(blocks))], valid)

        return fetch

    def incoming(self, blocks: list[int]) -> Incoming:
        """Return host memory to read ``blocks`` into."""
        if self._on_cpu:
            return Incoming(blocks, [[v[block * n : block * n + n] for v, n in self._views] for block in blocks])
        staging = host_memory(self._tensors, len(blocks), pinned=True)
        arrays = [host.view(torch.uint8).numpy().reshape(len(blocks), -1) for host in staging]
        buffers = [[memoryview(array[number]) for array in arrays] for number in range(len(blocks))]
        return Incoming(blocks, buffers, staging)

    def put(self, incoming: Incoming) -> None:
        """Copy the blocks from ``incoming`` to the pool. Work that is launched later sees the new content."""
        device = self._tensors[0].device
        self._scatter(incoming.blocks, [host.to(device, non_blocking=True) for host in incoming.staging])

    def _gathered(self, blocks: Sequence[int]) -> list[Tensor]:
        """Return copies of blocks on the device, of each tensor of the pool: ``[blocks, layers, 2, ...]``."""
        copies = [tensor.new_empty((len(blocks), *tensor.shape[:2], *tensor.shape[3:])) for tensor in self._tensors]
        ids = torch.tensor(list(blocks), device=self._tensors[0].device)
        for tensor, copy in zip(self._tensors, copies, strict=True):
            kernels.gather_blocks(tensor, ids, copy)
        return copies

    def _scatter(self, blocks: Sequence[int], copies: Sequence[Tensor]) -> None:
        """Write ``copies`` into blocks of the pool: the inverse of `_gathered`."""
        for tensor, copy in zip(self._tensors, copies, strict=False):
            kernels.scatter_blocks(tensor, torch.tensor(list(blocks), device=tensor.device), copy)

    def _checked(self, copies: list[list[NDArray[np.uint8]]], valid: int | None) -> list[Buffers] | None:
        for arrays in copies:
            for array, tensor in zip(arrays, cycle(self._tensors), strict=False):
                if valid is not None:
                    self._clear_after(array, valid, is_scales=tensor.dim() == 5)
                if tensor.dtype in _EXPONENTS:
                    integer, exponent = _EXPONENTS[tensor.dtype]
                    mask = integer(exponent)
                    if (array.view(integer) & mask == mask).any():
                        return None
        return [[memoryview(array.reshape(-1).data) for array in arrays] for arrays in copies]

    def _clear_after(self, array: NDArray[np.uint8], valid: int, *, is_scales: bool) -> None:
        """Set one block's slots to zero, except the first ``valid`` slots. ``array``: ``[layers * 2, bytes]``."""
        if is_scales:  # [heads, block_size] float32
            array.view(np.uint32).reshape(len(array), -1, self._block_size)[:, :, valid:] = 0
        else:
            array.reshape(len(array), self._block_size, -1)[:, valid:] = 0
