"""Limit the memory for the stacks of a GPU's threads.

The driver reserves a stack in local memory for every thread that can run at the same time. Its size is that of the
largest stack of any kernel so far, and at least a limit of 1,024 bytes. On an H100 this takes 277 MB. It takes some
700 MB more after kernels that spill registers, as a few tuning candidates do.

This module lowers the limit (`cuCtxSetLimit`). A kernel with a known stack size gets its memory at launch, even above
the limit. The stack sizes of NCCL's kernels are unknown, so the limit stays if several ranks run.
"""

import ctypes
import sys
from contextlib import suppress

import torch

from minillm.config import EngineConfig
from minillm.parallel.launch import Torchrun

_STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE
_SMALL = 128  # bytes


def lower_stack_limit(device: torch.device, config: EngineConfig) -> None:
    """Lower the stack limit of the GPU that this process will use. Do nothing on a CPU or with several ranks."""
    if device.type == "cuda" and config.tensor_parallel_size == 1 and Torchrun.from_environment() is None:
        # Errors are ignored here, because loading the model will fail with the same error.
        with suppress(OSError, RuntimeError), torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # creates CUDA's context
            _set_limit(_SMALL)


def free_stacks(device: torch.device) -> None:
    """Free the stack memory that earlier kernels needed. The stack limit does not change.

    If a kernel that needs a large stack runs again, the driver allocates the memory again.
    """
    with suppress(OSError), torch.cuda.device(device):
        before = ctypes.c_size_t()
        if not _driver().cuCtxGetLimit(ctypes.byref(before), _STACK_SIZE):
            _set_limit(2 * before.value)  # the driver only reallocates stacks if the limit changes
            _set_limit(before.value)


def _set_limit(size: int) -> None:
    """Set the stack limit of the current CUDA context, in bytes per thread. Waits for running kernels."""
    _driver().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size))


def _driver() -> ctypes.CDLL:
    """Load CUDA's driver. Raises OSError if it is missing."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
