"""Differences between Triton's compiler and its interpreter (``TRITON_INTERPRET=1``), and between GPU generations.

The interpreter keeps bfloat16 as raw 16-bit integers: casts work, arithmetic does not. Kernels therefore do
element-wise arithmetic in float32. They use `dot` for matmuls, `widen` and `narrow` for FP8. Versions such as (9.0) are
compute capabilities.
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
    """Return ``a @ b + out`` in float32. float32 operands are multiplied in full precision."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, out, input_precision="ieee")


@triton.jit
def finished(sums):
    """Return ``sums``, the result of a matmul, after making sure that the matmul has finished.

    With a first operand in registers, Triton 3.6 lets a matmul continue while the loop's next iteration already writes
    to those registers: sums were sometimes wrong. An instruction that uses the sums prevents this.
    """
    if INTERPRETED:
        return sums
    else:
        return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def plain_operand(numbers):
    """Return ``numbers`` as a matmul operand, and hide from Triton how they were loaded.

    If Triton sees that an operand was loaded in 8 bits, it orders the operand's columns differently for ``mma`` than
    for ``wgmma``. The order of summation would then differ between these instructions.
    """
    if INTERPRETED or numbers.dtype == tl.float32:  # computed without tensor cores
        return numbers
    else:
        return tl.inline_asm_elementwise("", "=r,0", [numbers], dtype=numbers.dtype, is_pure=False, pack=2)


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start (programmatic dependent launch).

    The next kernel starts once all programs of this kernel have called this function or ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their results are visible.

    A program must not read results of those kernels before the wait. A program that never waits must not overwrite
    their inputs.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the results of all earlier kernels are visible, then let the next kernel start.

    So at most two kernels run at a time, and the next kernel can read the results of the earlier kernels, and overwrite
    their inputs, even before it waits for this kernel. In the reverse order, the GPU starts a row of small kernels long
    before their inputs exist, and all steps take longer.
    """
    wait(PDL)
    release(PDL)


@triton.jit
def begin_part(PART: tl.constexpr, PDL: tl.constexpr):
    """Begin the kernel of part PART (from 1) of a result that several kernels compute, one part each.

    All parts have the same inputs. The kernel of part 1 waits for these inputs, and only then lets the kernel of part 2
    start. So the kernels of later parts need not wait. PART is 0 if one kernel computes the whole result.
    """
    if PART > 1:
        release(PDL)
    else:
        wait_for_inputs(PDL)


@triton.jit
def end_part(PART: tl.constexpr, PDL: tl.constexpr):
    """Wait at the end of a kernel until the kernels of earlier parts have ended: see `begin_part`.

    A later kernel that waits for the last part thus waits for all parts.
    """
    if PART > 1:
        wait(PDL)


@triton.jit
def prefetch_l2(addresses):
    """Prefetch the 128-byte cache lines at ``addresses`` into the L2."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return launch options for programmatic dependent launch (PDL), with which a kernel may start before the previous
    one has ended.

    PDL is off on GPUs below compute capability 9.0, which do not support it.
    """
    if INTERPRETED.value or device.type != "cuda" or _capability(device.index or 0) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def widen(weights):
    """Return ``weights`` in float32. uint8 weights are the bits of FP8 numbers: see `readable`.

    The sign, exponent and mantissa of an FP8 number are copied to a float16. A float16 has one more exponent bit and
    another exponent bias, so the copy is the number times 2^-8. Multiplying by 256 corrects this.
    """
    if weights.dtype == tl.uint8:
        bits = weights.to(tl.uint16)
        float16 = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        result = tl.where((bits & 0x7F) == 0x7F, float("nan"), float16.to(tl.float32) * 256)
    else:
        result = weights.to(tl.float32)
    return result


@triton.jit
def narrow(x):
    """Round float32 numbers to the nearest float8_e4m3fn.

    The interpreter's own conversion truncates and loses NaN. Under the interpreter, the bits are computed here instead.
    """
    if INTERPRETED:
        size = tl.minimum(tl.abs(x), 448.0)
        exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
        steps = size * tl.exp2((3 - exponent).to(tl.float32)) + 8388608.0 - 8388608.0  # an integer, at most 16
        code = tl.where(x == x, (exponent + 6) * 8 + steps.to(tl.int32), 0x7F) | tl.where(x < 0, 0x80, 0)
        levels = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        levels = x.to(tl.float8e4nv)
    return levels


def readable(levels: torch.Tensor) -> torch.Tensor:
    """Return FP8 ``levels`` in the dtype that kernels load.

    GPUs below compute capability 8.9 cannot convert FP8, so kernels load the levels as bytes there.
    """
    return levels if has_fp8(levels.device) else levels.view(torch.uint8)


def has_fp8(device: torch.device) -> bool:
    """Return whether a GPU computes with FP8, as from compute capability 8.9 on. Without a GPU, return False."""
    return device.type == "cuda" and _capability(device.index or 0) >= (8, 9)


def has_int8_mma(device: torch.device) -> bool:
    """Return whether tensor cores multiply 16 x 32 int8 matrices, as from compute capability 8.0 on.

    Without a GPU, kernels are interpreted, and the result is True.
    """
    return device.type != "cuda" or _capability(device.index or 0) >= (8, 0)


def has_wgmma(device: torch.device) -> bool:
    """Return whether a GPU has warp-group matmuls (compute capability 9.x). Under the interpreter, return True."""
    return INTERPRETED.value or (device.type == "cuda" and _capability(device.index or 0)[0] == 9)


def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a program may use more than 224 KiB of shared memory.

    Data center GPUs from compute capability 9.0 on have that much.
    """
    return device.type == "cuda" and (9, 0) <= _capability(device.index or 0) < (12, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. On a CPU, where kernels are interpreted, return 2."""
    return torch.cuda.get_device_properties(device.index or 0).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def prepare_compiler() -> None:
    """Do the work that Triton would do before a process's first kernel: half a second of hashing and importing."""
    from triton.runtime import cache

    cache.triton_key()
