"""Collectives of the ranks that share a model: NCCL between GPUs, gloo between CPUs.

GPUs with peer access add up the small tensors of a decode step with `minillm.kernels.all_reduce`. Over NVLink this
takes a quarter to a half of NCCL's time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, Store, distributed_c10d

if torch.cuda.is_available():  # Triton is imported only if a GPU can run it
    from minillm.kernels.all_reduce import WORDS, Exchange, all_reduce, inbox_words

# Longer than the slowest rank takes to load. `minillm.parallel.channel` notices within seconds if a rank dies.
_TIMEOUT = timedelta(hours=6)
_PATIENCE = 5.0  # seconds
# Maximum bytes of each kind of sum, measured on H200s. Above, the next kind is faster, and finally NCCL.
_ONE_SHOT_OF_TWO = 2 << 20  # between two ranks
_ONE_SHOT = 128 << 10  # between more
_TWO_SHOTS = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1  # CUDA's constant


class Ranks:
    """Collectives among the ``size`` processes that share a model. This process is rank ``rank``, on ``device``.

    All ranks must make the same calls in the same order. No global state of `torch.distributed` is used, so a program
    may have its own process group, or several models one after another.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = _new_group(store, rank, size, device)
        self._sums: PeerSums | None = None
        self._in_order = False
        if device.type == "cuda":
            sums = _new_peer_sums(store, rank, size, device)
            self._sums = sums if self.least(int(sums is not None)) else None  # all ranks or none

    def keep_order(self) -> None:
        """Make `all_reduce` add in rank order from now on, for tensors of any size. All ranks must call this."""
        self._in_order = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over all ranks, bitwise the same on each rank, and return it."""
        if self._in_order:
            return self._all_reduce_in_order(x)
        exchange = None if self._sums is None else self._sums.exchange_for(x)
        if exchange is not None:
            return all_reduce(x, exchange)
        _run(self._group.allreduce, [x], AllreduceOptions())
        return x

    def _all_reduce_in_order(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over all ranks, added in rank order.

        With peer access, pieces of ``x`` are added one after another; otherwise all ranks' tensors are gathered first.
        """
        if not x.numel():
            return x
        if self._sums is None:
            total = torch.zeros_like(x, dtype=torch.float32)
            for part in self.all_gather(x):
                total += part
            return x.copy_(total)
        for piece in x.view(-1).split(self._sums.most_bytes // x.itemsize):
            exchange = self._sums.exchange_for(piece)
            if exchange is None:
                raise ValueError(f"ordered sums need whole words, not {tuple(piece.shape)} {piece.dtype}")
            all_reduce(piece, exchange)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return ``[size, *x.shape]``: every rank's ``x``."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _run(self._group._allgather_base, gathered, x.contiguous(), distributed_c10d.AllgatherOptions())
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace ``x`` by rank 0's ``x``, and return it."""
        _run(self._group.broadcast, [x], BroadcastOptions())  # rank 0's is the default
        return x

    def least(self, value: int) -> int:
        """Return the minimum of the ranks' values."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        _run(self._group.allreduce, [values], options)
        return int(values.item())

    def abort(self) -> None:
        """Abort all pending collectives, so that nothing on the device waits for a dead rank."""
        if self._sums is not None:
            self._sums.end_waiting()
        if self.device.type == "cuda" and self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leave the group before Python ends, since the group's threads must not outlive Python.

        The caller must have discarded all CUDA graphs that contain the group's collectives.
        """
        if self.device.type == "cuda":
            # Unlike NCCL's orderly shutdown, this does not wait for other ranks. The thread limits the time in case it
            # still blocks.
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


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class PeerMemoryError(RuntimeError):
    """The CUDA driver cannot share memory between these processes.

    Possible reasons: different hosts, GPUs without peer access, or memory that was not allocated by ``cudaMalloc``.
    """


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


def _call_driver(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise PeerMemoryError(f"{function} gives CUDA error {status}")


def export_memory(tensor: Tensor) -> bytes:
    """Return a handle with which other processes on this host can open ``tensor``. Keep ``tensor`` while they do."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), tensor.data_ptr())
    _call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
    offset = tensor.data_ptr() - (base.value or 0)
    return offset.to_bytes(8, "little") + bytes(handle.bytes)


class PeerMemory:
    """Another process's tensor, mapped for kernels on the current device at ``address``.

    `torch.distributed`'s symmetric memory does the same, but counts its exchanges per process. So a process that
    creates a second model would not find that model's ranks. Three calls of the CUDA driver are enough here.
    """

    def __init__(self, exported: bytes) -> None:
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(exported[8:])
        _call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_ENABLE_PEER_ACCESS)
        self._base = base.value or 0
        self.address = self._base + int.from_bytes(exported[:8], "little")

    def close(self) -> None:
        """Unmap the memory. No kernel may use it afterwards."""
        _driver().cuIpcCloseMemHandle(self._base)


@dataclass(frozen=True)
class PeerSums:
    """The buffers of `minillm.kernels.all_reduce` for these ranks' GPUs, for one-shot sums and for two-shot sums."""

    exchanges: list[Exchange]  # fastest first; if none takes a tensor, NCCL adds it
    stop: Tensor  # waiting kernels in the model's stream poll it
    stream: torch.cuda.Stream  # for writes to ``stop``
    inbox: Tensor
    peers: list[PeerMemory]  # the other ranks' inboxes

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a tensor that these buffers can add up."""
        return max(exchange.most_bytes for exchange in self.exchanges)

    def exchange_for(self, x: Tensor) -> Exchange | None:
        return next((exchange for exchange in self.exchanges if exchange.takes(x)), None)

    def end_waiting(self) -> None:
        """Stop sums that wait for another rank. Their results are undefined. Any thread may call this."""
        with torch.cuda.device(self.stop.device), torch.cuda.stream(self.stream):
            self.stop.copy_(torch.ones(1, dtype=torch.int32).pin_memory(), non_blocking=True)

    def close(self) -> None:
        """Unmap the other ranks' memory."""
        with contextlib.suppress(RuntimeError):  # a failure on the device was already reported
            torch.cuda.synchronize(self.stop.device)
        for peer in self.peers:
            peer.close()


def _new_peer_sums(store: Store, rank: int, size: int, device: torch.device) -> PeerSums | None:
    """Exchange memory handles with the other ranks. Return None if any two ranks have no peer access."""
    in_one = (_ONE_SHOT_OF_TWO if size == 2 else _ONE_SHOT) // 4 // WORDS * WORDS
    in_two = 0 if size == 2 else _TWO_SHOTS // 4 // size // WORDS * WORDS  # words of a slice
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


def _run(collective: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective on the current stream, so that a CUDA graph captures it like a kernel.

    The last argument is the collective's options.
    """
    arguments[-1].asyncOp = False
    work = collective(*arguments)
    if work is not None:  # NCCL's work is already in the stream
        work.wait()


def _new_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        if not torch.distributed.is_initialized():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # on one host only the loopback interface needs to listen
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return distributed_c10d.ProcessGroupNCCL(store, rank, size, options)
    gloo = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = _TIMEOUT
    gloo._devices = [distributed_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed_c10d.ProcessGroupGloo(store, rank, size, gloo)
