"""What the ranks that share a model do together: NCCL between GPUs, gloo between CPUs.

GPUs that reach each other's memory add up the small tensors of a decode step by `minillm.kernels.all_reduce`: over
NVLink that takes a quarter to a half of NCCL's time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, Store
from torch.distributed.distributed_c10d import AllgatherOptions

from minillm.parallel.peer_memory import PeerMemory, PeerMemoryError, export_memory

if torch.cuda.is_available():  # Triton is not imported where nothing can run it
    from minillm.kernels.all_reduce import WORDS, Exchange, all_reduce, inbox_words

# Whether the others are still there is seen by `minillm.parallel.channel`, within seconds. This only has to be longer
# than the slowest rank takes to load.
_TIMEOUT = timedelta(hours=6)
_PATIENCE = 5.0  # seconds
# Bytes of the largest sums that are formed so, on H200s: beyond them the next way is faster, NCCL's at last.
_ONE_SHOT_OF_TWO = 2 << 20  # between two ranks
_ONE_SHOT = 128 << 10  # between more
_TWO_SHOTS = 2 << 20


class Ranks:
    """This process among the ``size`` that share a model. All of them make the same calls in the same order.

    The process group is this object's own: nothing of `torch.distributed`'s global state is used, so a program may have
    one of its own, or several models one after another.

    Args:
        device: this rank's; all tensors lie on it.
        host: the address by which the others reach this process, where the group is gloo's.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = _new_group(store, rank, size, device, host)
        self._sums: PeerSums | None = None
        if device.type == "cuda":
            sums = _new_peer_sums(store, rank, size, device)
            if self.least(int(sums is not None)):  # all ranks or none
                self._sums = sums

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place, the same bits on each."""
        exchange = None if self._sums is None else self._sums.exchange_for(x)
        if exchange is not None:
            return all_reduce(x, exchange)
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
        if self._sums is not None:
            self._sums.end_waiting()
        if self.device.type == "cuda" and self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leave the group; no graph may hold one of its collectives any more. Its threads must not outlive Python."""
        if self.device.type == "cuda":
            # Unlike NCCL's orderly end this waits for no other rank; and if it did, it must not hold us up.
            ending = threading.Thread(target=self._end, daemon=True)
            ending.start()
            ending.join(_PATIENCE)
            if ending.is_alive():
                return
        self._group = self._sums = None

    def _end(self) -> None:
        self.abort()
        if self._sums is not None:
            self._sums.close()


@dataclass(frozen=True)
class PeerSums:
    """`minillm.kernels.all_reduce` among these ranks, in one shot or in two."""

    exchanges: list[Exchange]  # the first one that takes a tensor is the fastest; where none does, NCCL is
    stop: Tensor  # where a kernel that waits in the stream of the model looks, too
    stream: torch.cuda.Stream  # for a word to it
    inbox: Tensor
    peers: list[PeerMemory]  # the other ranks' inboxes

    def exchange_for(self, x: Tensor) -> Exchange | None:
        return next((exchange for exchange in self.exchanges if exchange.takes(x)), None)

    def end_waiting(self) -> None:
        """From any thread: sums under way come to an end, and to no result."""
        with torch.cuda.device(self.stop.device), torch.cuda.stream(self.stream):
            self.stop.copy_(torch.ones(1, dtype=torch.int32).pin_memory(), non_blocking=True)

    def close(self) -> None:
        """Let go of the other ranks' memory."""
        with contextlib.suppress(RuntimeError):  # what failed on the device has been said
            torch.cuda.synchronize(self.stop.device)
        for peer in self.peers:
            peer.close()


def _new_peer_sums(store: Store, rank: int, size: int, device: torch.device) -> PeerSums | None:
    """None where the ranks are on several hosts, or cannot reach each other's memory."""
    store.set(f"host/{rank}", socket.gethostname())
    if len({store.get(f"host/{each}") for each in range(size)}) > 1:
        return None
    in_one = (_ONE_SHOT_OF_TWO if size == 2 else _ONE_SHOT) // 4 // WORDS * WORDS
    in_two = 0 if size == 2 else _TWO_SHOTS // 4 // size // WORDS * WORDS  # of a slice
    words_in_one = inbox_words(size, in_one)
    inbox = torch.zeros(words_in_one + inbox_words(size, in_two, shots=2), dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)  # before anyone writes to it
    exported = b""
    with contextlib.suppress(PeerMemoryError):
        exported = export_memory(inbox)
    store.set(f"inbox/{rank}", exported.hex())
    inboxes = [bytes.fromhex(store.get(f"inbox/{each}").decode()) for each in range(size)]
    if not all(inboxes):
        return None
    try:
        with torch.cuda.device(device):
            peers = {each: PeerMemory(inboxes[each]) for each in range(size) if each != rank}
    except PeerMemoryError:
        return None
    addresses = [inbox.data_ptr() if each == rank else peers[each].address for each in range(size)]
    stop = torch.zeros(1, dtype=torch.int32, device=device)

    def exchange(first_word: int, capacity: int, shots: int) -> Exchange:
        begins = [address + first_word * inbox.itemsize for address in addresses]
        sums = torch.zeros(capacity // WORDS, dtype=torch.int32, device=device)
        return Exchange(rank, torch.tensor(begins, dtype=torch.int64, device=device), sums, stop, shots)

    exchanges = [exchange(0, in_one, 1)] + ([exchange(words_in_one, in_two, 2)] if in_two else [])
    return PeerSums(exchanges, stop, torch.cuda.Stream(device), inbox, list(peers.values()))


def _wait(work: Any) -> None:
    if work is not None:  # NCCL's is in the stream already
        work.wait()


def _new_group(store: Store, rank: int, size: int, device: torch.device, host: str) -> Any:
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return ProcessGroupNCCL(store, rank, size, options)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = _TIMEOUT
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, size, gloo)
