"""What the ranks that share a model do together: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, Store
from torch.distributed.distributed_c10d import AllgatherOptions

# Whether the others are still there is seen by `minillm.parallel.channel`, within seconds. This only has to be longer
# than the slowest rank takes to load.
_TIMEOUT = timedelta(hours=6)
_PATIENCE = 5.0  # seconds


class Ranks:
    """This process among the ``size`` that share a model. All of them make the same calls in the same order.

    The process group is this object's own: nothing of `torch.distributed`'s global state is used, so a program may have
    one of its own, or several models one after another.

    Args:
        device: this rank's; all tensors lie on it.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = _new_group(store, rank, size, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place, the same bits on each."""
        options = AllreduceOptions()
        options.asyncOp = False  # on the current stream: nothing to wait for, and a graph sees a plain kernel
        _wait(self._group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """``[size, *x.shape]``: every rank's ``x``."""
        options = AllgatherOptions()
        options.asyncOp = False
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _wait(self._group._allgather_base(gathered, x.contiguous(), options))
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _wait(self._group.broadcast([x], options))
        return x

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = ReduceOp(ReduceOp.MIN), False
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        _wait(self._group.allreduce([values], options))
        return int(values.item())

    def abort(self) -> None:
        """Give up whatever is under way, so that nothing on the device waits for a rank that is gone."""
        if self.device.type == "cuda" and self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leave the group; no graph may hold one of its collectives any more. Its threads must not outlive Python."""
        if self.device.type == "cuda":
            # Unlike NCCL's orderly end this waits for no other rank; and if it did, it must not hold us up.
            ending = threading.Thread(target=self.abort, daemon=True)
            ending.start()
            ending.join(_PATIENCE)
            if ending.is_alive():
                return
        self._group = None


def _wait(work: Any) -> None:
    if work is not None:  # NCCL's is in the stream already
        work.wait()


def _new_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return ProcessGroupNCCL(store, rank, size, options)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, _TIMEOUT)
