"""Where Triton's compiler and its interpreter (``TRITON_INTERPRET=1``), or two generations of GPUs, differ.

The interpreter keeps bfloat16 as raw 16-bit integers: casts work, arithmetic does not. Element-wise arithmetic in our
kernels is float32 anyway; matrix products go through `dot`, FP8 through `widen` and `narrow`.
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
def finished(sums):
    """``sums``, once the product that they come from has ended.

    Triton 3.6 lets a product whose first operand is in registers run on while the loop's next turn already writes to
    those registers: sums were wrong by chance. Something has to use them in between.
    """
    if INTERPRETED:
        return sums
    else:
        return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def plain_operand(numbers):
    """``numbers``, as an operand that a product adds up in the order in which it takes any others.

    Where Triton sees that an operand was loaded in 8 bits, ``mma`` takes its columns in another order than ``wgmma``.
    """
    if INTERPRETED or numbers.dtype == tl.float32:  # whose products go by no matrix unit
        return numbers
    else:
        return tl.inline_asm_elementwise("", "=r,0", [numbers], dtype=numbers.dtype, is_pure=False, pack=2)


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


@triton.jit
def begin_part(PART: tl.constexpr, PDL: tl.constexpr):
    """`wait_for_inputs`, of a kernel that computes the part of a result of this number while others compute others.

    Each is launched for the same inputs. The first lets the second be brought in when they are there, so the others
    need not wait for them, nor for each other.
    """
    if PART == 1:
        wait_then_release(PDL)
    elif PART > 1:
        release(PDL)
    else:
        wait_for_inputs(PDL)


@triton.jit
def end_part(PART: tl.constexpr, PDL: tl.constexpr):
    """End after the parts in front have ended, so that the kernel that waits for the last one waits for all."""
    if PART > 1:
        wait(PDL)


@triton.jit
def call_into_l2(addresses):
    """Call the lines of 128 bytes at some addresses into the L2."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options: a kernel may be brought in before the one in front of it has ended, where the GPU can (9.0)."""
    if INTERPRETED.value or device.type != "cuda" or _capability(device.index or 0) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def widen(weights):
    """Weights in float32; those of FP8 come as `readable` has made them.

    The bits of FP8, put below a sign and an exponent of float16, are the same number times 2^-8.
    """
    if weights.dtype == tl.uint8:
        bits = weights.to(tl.uint16)
        halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        result = tl.where((bits & 0x7F) == 0x7F, float("nan"), halves.to(tl.float32) * 256)
    else:
        result = weights.to(tl.float32)
    return result


@triton.jit
def narrow(x):
    """Float32 numbers as float8_e4m3fn, to nearest. (The interpreter's own conversion cuts off, and loses NaN.)"""
    if INTERPRETED:
        size = tl.minimum(tl.abs(x), 448.0)
        exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
        steps = size * tl.exp2((3 - exponent).to(tl.float32)) + 8388608.0 - 8388608.0  # a whole number, 16 at most
        code = tl.where(x == x, (exponent + 6) * 8 + steps.to(tl.int32), 0x7F) | tl.where(x < 0, 0x80, 0)
        levels = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        levels = x.to(tl.float8e4nv)
    return levels


def readable(levels: torch.Tensor) -> torch.Tensor:
    """``levels`` of FP8 as kernels load them: as bytes where the GPU does not convert them (below 8.9)."""
    return levels if has_fp8(levels.device) else levels.view(torch.uint8)


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU computes with FP8 (8.9); on a CPU, where all is interpreted, there is none."""
    return device.type == "cuda" and _capability(device.index or 0) >= (8, 9)


def has_whole_products(device: torch.device) -> bool:
    """Whether a GPU's matrix unit multiplies 16 by 32 whole numbers of 8 bits (8.0); the interpreter does."""
    return device.type != "cuda" or _capability(device.index or 0) >= (8, 0)


def has_wgmma(device: torch.device) -> bool:
    """Whether four warps of a GPU use the matrix unit together (9.x); the interpreter does."""
    return INTERPRETED.value or (device.type == "cuda" and _capability(device.index or 0)[0] == 9)


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have more than 224 KiB of shared memory, as on data centres' GPUs from 9.0 on."""
    return device.type == "cuda" and (9, 0) <= _capability(device.index or 0) < (12, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; on a CPU, where all is interpreted, 2."""
    return torch.cuda.get_device_properties(device.index or 0).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def prepare_compiler() -> None:
    """Do ahead Triton's work before the first kernel of a process: half a second of hashing and importing."""
    from triton.runtime import cache

    cache.triton_key()
