"""Blocks on the host: the bytes of sequences that had to leave the device."""

import torch
from torch import Tensor

from minillm import kernels
from minillm.cache.runs import contiguous_runs

_STAGED_BLOCKS = 256  # moved at a time: the room that it takes on the device


class HostPool:
    """Room for ``num_blocks`` blocks of ``kv_cache``, taken when it is first needed; pinned where there is a GPU.

    All moves are queued on one stream, between pinned memory and the device: each sees the writes before it, and the
    host waits for none.
    """

    def __init__(self, kv_cache: Tensor, num_blocks: int) -> None:
        self._kv_cache, self._num_blocks = kv_cache, num_blocks
        self._pool: Tensor | None = None  # [num_blocks, layers, 2, block_size, kv heads, head_dim]

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (block, host block) pairs to the host."""
        if pairs and self._pool is None:
            shape = (self._num_blocks, *self._kv_cache.shape[:2], *self._kv_cache.shape[3:])
            self._pool = torch.empty(shape, dtype=self._kv_cache.dtype, pin_memory=self._kv_cache.is_cuda)
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            blocks, hosts = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            pool, staging = self._staging(len(blocks))
            kernels.gather_blocks(self._kv_cache, torch.tensor(blocks, device=staging.device), staging)
            for first, host, count in contiguous_runs(hosts):
                pool[host : host + count].copy_(staging[first : first + count], non_blocking=True)

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, block) pairs to the device."""
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            hosts, blocks = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            pool, staging = self._staging(len(blocks))
            for first, host, count in contiguous_runs(hosts):
                staging[first : first + count].copy_(pool[host : host + count], non_blocking=True)
            kernels.scatter_blocks(self._kv_cache, torch.tensor(blocks, device=staging.device), staging)

    def _staging(self, count: int) -> tuple[Tensor, Tensor]:
        """The pool, and room for ``count`` of its blocks on the device."""
        assert self._pool is not None, "blocks return that were never saved"
        return self._pool, self._pool.new_empty((count, *self._pool.shape[1:]), device=self._kv_cache.device)
