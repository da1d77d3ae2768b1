"""Where Triton's compiler and its interpreter (``TRITON_INTERPRET=1``), or two generations of GPUs, differ.

The interpreter keeps bfloat16 as raw 16-bit integers: casts work, arithmetic does not. Element-wise arithmetic in our
kernels is float32 anyway; matrix products go through `dot`.
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, out):
    """``a @ b + out`` in float32; full precision where the operands are float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, out, input_precision="ieee")


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel be brought in (programmatic dependent launch) once all programs say so or have ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all kernels in front of this one have ended and their results are there.

    Reads before the wait must not depend on those kernels; a program that never waits must not overwrite their inputs.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel be brought in already, and wait: everything behind this sees all earlier work done."""
    release(PDL)
    wait(PDL)


@triton.jit
def wait_then_release(PDL: tl.constexpr):
    """`wait_for_inputs` the other way round: the next kernel is brought in when all earlier work is done.

    So before it waits for this kernel, the next one may read the results of that work and overwrite its inputs.
    """
    wait(PDL)
    release(PDL)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options: a kernel may be brought in before the one in front of it has ended, where the GPU can (9.0)."""
    if INTERPRETED.value or device.type != "cuda" or _capability(device.index or 0) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def prepare_compiler() -> None:
    """Do ahead Triton's work before the first kernel of a process: half a second of hashing and importing."""
    from triton.runtime import cache

    cache.triton_key()
