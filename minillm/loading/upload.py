"""Copy weights from memory to a GPU with several threads.

torch copies pageable memory, such as a memory-mapped file, with one thread. Here each thread copies a piece to its
pinned buffer, from which the GPU reads it while other threads fill their buffers. Kernels on many streams would make
every later graph slower, so the threads share one stream, and torch copies weights that need a conversion.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Copy = Callable[[Tensor, Tensor], object]

_THREADS = 8
_PIECE = 16 << 20  # bytes; torch keeps one pinned buffer of this size for each thread
_LEAST = 1 << 20  # bytes: smaller tensors gain nothing
_MOST_WAITING = 16  # pieces: they may keep tensors in memory that their source computed


@contextmanager
def uploads(device: torch.device) -> Iterator[Copy]:
    """Yield a function that copies its second tensor into its first one, which is contiguous and on ``device``.

    The second tensor may have another dtype, and rows of any stride. All copies are complete when the context ends.
    """
    if device.type != "cuda":
        yield Tensor.copy_
        return
    uploader = _Uploader(device)
    with uploader.pool:
        yield uploader.copy
        uploader.wait()


class _Uploader:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._thread = device, torch.cuda.Stream(device), threading.local()
        self._waiting: deque[Future[None]] = deque()
        self.pool = ThreadPoolExecutor(_THREADS, "upload", self._begin)

    def _begin(self) -> None:
        torch.cuda.set_device(self._device)
        self._thread.buffer = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        rows = _PIECE * len(source) // source.nbytes if source.nbytes else 0
        is_plain = source.dim() == 2 and source.stride(1) == 1 and source.dtype == target.dtype and not source.is_cuda
        if not is_plain or source.nbytes < _LEAST or not rows:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # it may still use the memory
        for start in range(0, len(source), rows):
            self.wait(_MOST_WAITING)
            piece = target[start : start + rows], source[start : start + rows]
            self._waiting.append(self.pool.submit(self._copy_piece, *piece))

    def wait(self, most: int = 0) -> None:
        """Wait until at most this many pieces wait to be copied."""
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _copy_piece(self, target: Tensor, source: Tensor) -> None:
        buffer = self._thread.buffer[: source.nbytes].view(len(source), -1)
        np.copyto(buffer.numpy(), source.view(torch.uint8).numpy())
        with torch.cuda.stream(self._stream):
            target.copy_(buffer.view(source.dtype), non_blocking=True)
        self._stream.record_event().synchronize()
