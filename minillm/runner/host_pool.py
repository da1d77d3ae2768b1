"""Host memory for the blocks of preempted sequences."""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minillm import kernels
from minillm.cache import HostMoves
from minillm.cache.runs import contiguous_runs
from minillm.kernels import KVCache

_STAGED_BLOCKS = 256  # blocks moved at a time; limits the size of the staging buffer on the device


class HostPool:
    """Host memory for ``num_blocks`` blocks of ``kv_cache``, allocated at first use. For a GPU, the memory is pinned.

    All moves between pinned memory and the GPU are queued on one stream. So each move sees earlier writes, and the CPU
    never waits. Without pinned memory, it waits for each move.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._tensors, self._num_blocks = kv_cache.tensors, num_blocks
        self._pools: list[Tensor] = []  # of each tensor, [num_blocks, layers, 2, ...]

    def carry_out(self, moves: HostMoves, copies: list[tuple[int, int]]) -> None:
        """Move blocks to and from host memory, then copy (source, destination) blocks within the device's pool."""
        self.save(moves.out)
        self.restore(moves.back)
        if copies:
            pairs = torch.tensor(copies, device=self._tensors[0].device)
            for tensor in self._tensors:
                kernels.block_copy(tensor, pairs)

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks from the device to host memory, given as (device block, host block) pairs."""
        if pairs and not self._pools:
            self._pools = host_memory(self._tensors, self._num_blocks, pinned=self._tensors[0].is_cuda)
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            blocks, hosts = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            for tensor, pool, staging in self._staged(len(blocks)):
                kernels.gather_blocks(tensor, torch.tensor(blocks, device=staging.device), staging)
                for first, host, count in contiguous_runs(hosts):
                    pool[host : host + count].copy_(staging[first : first + count], non_blocking=True)

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks from host memory to the device, given as (host block, device block) pairs."""
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            hosts, blocks = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            for tensor, pool, staging in self._staged(len(blocks)):
                for first, host, count in contiguous_runs(hosts):
                    staging[first : first + count].copy_(pool[host : host + count], non_blocking=True)
                kernels.scatter_blocks(tensor, torch.tensor(blocks, device=staging.device), staging)

    def _staged(self, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (tensor of the KV cache, its host memory, new device buffer for ``count`` blocks) for each tensor."""
        assert self._pools, "blocks return that were never saved"
        for tensor, pool in zip(self._tensors, self._pools, strict=True):
            yield tensor, pool, pool.new_empty((count, *pool.shape[1:]), device=tensor.device)


def host_memory(tensors: Sequence[Tensor], num_blocks: int, *, pinned: bool) -> list[Tensor]:
    """Return host memory ``[num_blocks, layers, 2, ...]`` for blocks of each tensor of a KV cache.

    If the system refuses to pin it, warn and return other memory. Raises RuntimeError if there is not enough.
    """
    shapes = [(num_blocks, *tensor.shape[:2], *tensor.shape[3:]) for tensor in tensors]
    try:
        return [
            torch.empty(shape, dtype=tensor.dtype, pin_memory=pinned)
            for shape, tensor in zip(shapes, tensors, strict=True)
        ]
    except RuntimeError as error:
        if not pinned:
            raise
        reason = str(error).partition("\n")[0]
        warnings.warn(f"host memory for blocks cannot be pinned, so moving them is slower: {reason}", stacklevel=2)
        return host_memory(tensors, num_blocks, pinned=False)
