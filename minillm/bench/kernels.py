"""``kernels``: every op against the physical limit.

For each op and shape: microseconds (see `graph_microseconds`), the bytes and FLOPs that the op must move, the part of
the copy bandwidth or of the matmul rate measured in the same run that this amounts to, and the error against the
float64 reference. bfloat16, random data, shuffled block tables. The cases are in `minillm.bench.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minillm.bench.ops import DEVICE, OPS, Case
from minillm.bench.registry import NoOptions, word
from minillm.bench.table import shown
from minillm.bench.timing import graph_microseconds, matmul_rate, read_bandwidth
from minillm.errors import MinillmError, UsageError


@dataclass(frozen=True)
class Options(NoOptions):
    op: str | None = word(None, "only this op")


@dataclass(frozen=True)
class KernelResult:
    """One op on one shape."""

    op: str = shown("op", width=22)
    shape: str = shown("shape", width=34)
    microseconds: float = shown("us", ".1f", width=7)
    bytes: int = shown("MB", ".1f", 1e-6, width=7)
    flops: int = shown("GFLOP", ".1f", 1e-9, width=7)
    bound: str = shown("limit", width=7)  # "memory" or "compute"
    fraction: float = shown("of it", ".0%", width=5)  # of the copy bandwidth or the matmul rate
    # relative error norm against float64; None where the result is not a number to compare
    error: float | None = shown("error", ".1e", width=8)


@dataclass(frozen=True)
class Limits:
    """The ceilings of this machine, measured."""

    copy_bandwidth: float = shown("copy, TB/s", ".2f", 1e-12)  # bytes per second, read and written
    matmul_rate: float = shown("bfloat16 products, TFLOP/s", ".0f", 1e-12)  # FLOPs per second


def measure(options: Options) -> dict[str, Any]:
    """Measure the ceilings, then every op, or the one asked for.

    Raises:
        MinillmError: there is no GPU.
        UsageError: there is no such op.
    """
    if options.op is not None and options.op not in OPS:
        raise UsageError(f"unknown op {options.op!r}; known: {', '.join(OPS)}")
    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    limits = Limits(read_bandwidth(DEVICE, 1 << 32), matmul_rate(DEVICE))
    torch.manual_seed(0)
    cases = ((op, make(*sizes)) for op, (make, each) in OPS.items() if options.op in (None, op) for sizes in each)
    return {"limits": limits, "results": (_measure(op, case, limits) for op, case in cases)}


def _measure(op: str, case: Case, limits: Limits) -> KernelResult:
    error = case.check()
    microseconds = graph_microseconds(case.launch, case.launches)
    memory = case.bytes / (microseconds * 1e-6) / limits.copy_bandwidth
    compute = case.flops / (microseconds * 1e-6) / limits.matmul_rate
    bound = "compute" if compute > memory else "memory"
    return KernelResult(op, case.shape, microseconds, case.bytes, case.flops, bound, max(memory, compute), error)
