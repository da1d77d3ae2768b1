"""Copy a step's results to the CPU asynchronously."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ToHost:
    """Start copying tensors that the device has computed, or is computing, to the CPU. `wait` returns their values."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if self._tensors[0].is_cuda:
            # Each result has its own pinned buffer, since the next step may start before it is read.
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in self._tensors]
            self._tensors = [host.copy_(each, non_blocking=True) for host, each in zip(hosts, tensors, strict=True)]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Any]:
        """Wait for the copies. Return the values of each tensor as nested lists."""
        return [each.tolist() for each in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Wait for the copies. Return them, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
