"""Copy weights from memory to a GPU with several threads.

torch copies pageable memory, such as a memory-mapped file, with one thread. Here each thread copies a piece to its
pinned buffer, from which the GPU reads it while other threads fill their buffers. The streams of these threads only
copy. A kernel on each, such as a conversion, would make every later graph slower: torch copies weights of other dtypes.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Copy = Callable[[Tensor, Tensor], object]

_THREADS = 8
_PIECE = 4 << 20  # bytes; torch keeps one pinned buffer of this size for each thread
_LEAST = 1 << 20  # bytes: smaller tensors gain nothing


@contextmanager
def uploads(device: torch.device) -> Iterator[Copy]:
    """Yield a function that copies its second tensor into its first one, which is contiguous and on ``device``.

    The function returns after the copy. The second tensor may have another dtype, and rows of any stride.
    """
    if device.type != "cuda":
        yield Tensor.copy_
        return
    uploader = _Uploader(device)
    with uploader.pool:
        yield uploader.copy


class _Uploader:
    def __init__(self, device: torch.device) -> None:
        self._device, self._thread = device, threading.local()
        self.pool = ThreadPoolExecutor(_THREADS, "upload", self._begin)

    def _begin(self) -> None:
        torch.cuda.set_device(self._device)
        self._thread.buffer = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
        self._thread.stream = torch.cuda.Stream(self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        rows = _PIECE * len(source) // source.nbytes if source.nbytes else 0
        is_plain = source.dim() == 2 and source.stride(1) == 1 and source.dtype == target.dtype and not source.is_cuda
        if not is_plain or source.nbytes < _LEAST or not rows:
            target.copy_(source)
            return
        allocated = torch.cuda.current_stream(self._device).record_event()  # earlier work may still use the memory
        starts = range(0, len(source), rows)
        pieces = [(target[start : start + rows], source[start : start + rows]) for start in starts]
        for done in [self.pool.submit(self._copy_piece, *piece, allocated) for piece in pieces]:
            done.result()

    def _copy_piece(self, target: Tensor, source: Tensor, allocated: torch.cuda.Event) -> None:
        stream, buffer = self._thread.stream, self._thread.buffer[: source.nbytes].view(len(source), -1)
        np.copyto(buffer.numpy(), source.view(torch.uint8).numpy())
        with torch.cuda.stream(stream):
            stream.wait_event(allocated)
            target.copy_(buffer.view(source.dtype), non_blocking=True)
        stream.synchronize()
