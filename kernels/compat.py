"""Where Triton's compiler and its interpreter (``TRITON_INTERPRET=1``) differ, and nothing else.

The interpreter keeps bfloat16 as raw 16-bit integers: casts work, arithmetic does not. Element-wise arithmetic in our
kernels is float32 anyway; matrix products go through `dot`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, out):
    """``a @ b + out`` in float32; full precision where the operands are float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, out, input_precision="ieee")
