"""The stacks of a GPU's threads, which the driver keeps as local memory for every thread that can run.

It keeps as much for each as any kernel has had, 1,024 bytes at least: 277 MB of an H100's memory, and some 700 more
behind kernels that spill, as a few do whose times are compared. A kernel whose need is known when it is compiled gets
more at its launch, whatever the limit is (`cuCtxSetLimit`). NCCL's is not known.
"""

import ctypes
import sys
from contextlib import suppress

import torch

from minillm.config import EngineConfig
from minillm.parallel.launch import Torchrun

_STACK_SIZE = 0  # CUDA's name for the limit
_SMALL = 128  # bytes


def keep_small(device: torch.device, config: EngineConfig) -> None:
    """Lower the limit of the GPU that this process is going to use, whose kernels are all our own and torch's."""
    if device.type == "cuda" and config.tensor_parallel_size == 1 and Torchrun.from_environment() is None:
        # Whatever goes wrong here, loading meets it again, and says it.
        with suppress(OSError, RuntimeError), torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes CUDA's context
            _set_limit(_SMALL)


def give_back(device: torch.device) -> None:
    """Give memory back that kernels have needed which will not run again; the limit stays as it is."""
    with suppress(OSError), torch.cuda.device(device):
        before = ctypes.c_size_t()
        if not _driver().cuCtxGetLimit(ctypes.byref(before), _STACK_SIZE):
            _set_limit(2 * before.value)  # one that it has already would change nothing
            _set_limit(before.value)


def _set_limit(size: int) -> None:
    """Set the current context's limit; the driver waits for what is running."""
    _driver().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size))


def _driver() -> ctypes.CDLL:
    """CUDA's driver. Raises OSError where there is none by this name."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
