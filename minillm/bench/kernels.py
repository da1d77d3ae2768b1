"""``kernels``: every op against the physical limit.

For each op and shape: microseconds (see `minillm.bench.timing`), the bytes and FLOPs that the op must move, the part of
the copy bandwidth or of the matmul rate measured in the same run that this amounts to, and the error against the
float64 reference. bfloat16, random data, shuffled block tables. The cases are in `minillm.bench.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minillm.bench.hardware import matmul_rate, read_bandwidth
from minillm.bench.ops import (
    DEVICE,
    Case,
    activation,
    blocks,
    chunked_prefill,
    decode_attention,
    norm,
    prefix_decode_attention,
    rotary,
    sampling,
    top_k,
)
from minillm.bench.timing import graph_microseconds
from minillm.errors import MinillmError, UsageError

OPS: dict[str, Callable[[], Iterator[Case]]] = {
    cases.__name__: cases
    for cases in (
        norm.rms_norm,
        activation.silu_mul,
        rotary.rotary_write_kv,
        decode_attention.paged_attention,
        prefix_decode_attention.prefix_attention,
        chunked_prefill.prefill_attention,
        blocks.block_copy,
        blocks.gather_blocks,
        blocks.scatter_blocks,
        sampling.sample,
        top_k.top_log_probabilities,
    )
}


@dataclass(frozen=True)
class KernelResult:
    """One op on one shape."""

    op: str
    shape: str
    microseconds: float
    bytes: int
    flops: int
    bound: str  # "memory" or "compute"
    fraction: float  # of the copy bandwidth or the matmul rate
    error: float | None  # relative error norm against float64; None where the result is not a number to compare


@dataclass(frozen=True)
class Limits:
    """The ceilings of this machine, measured."""

    copy_bandwidth: float  # bytes per second, read and written
    matmul_rate: float  # FLOPs per second, bfloat16


def measure_limits() -> Limits:
    """Measure the ceilings.

    Raises:
        MinillmError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    return Limits(read_bandwidth(DEVICE, 1 << 32), matmul_rate(DEVICE))


def run(limits: Limits, only: str | None = None) -> Iterator[KernelResult]:
    """Measure all ops, or the one named.

    Raises:
        UsageError: there is no such op.
    """
    if only is not None and only not in OPS:
        raise UsageError(f"unknown op {only!r}; known: {', '.join(OPS)}")
    torch.manual_seed(0)
    for name, cases in OPS.items():
        if only in (None, name):
            for case in cases():
                yield _measure(case, limits)


def _measure(case: Case, limits: Limits) -> KernelResult:
    error = case.check()
    microseconds = graph_microseconds(case.launch, case.launches)
    memory = case.bytes / (microseconds * 1e-6) / limits.copy_bandwidth
    compute = case.flops / (microseconds * 1e-6) / limits.matmul_rate
    bound = "compute" if compute > memory else "memory"
    return KernelResult(case.op, case.shape, microseconds, case.bytes, case.flops, bound, max(memory, compute), error)
