"""``kernels``: every op against the physical limit.

For each op and shape: microseconds (see `minillm.bench.timing`), the bytes and FLOPs that the op must move, the part of
the copy bandwidth or of the matmul rate measured in the same run that this amounts to, and the error against the
float64 reference. bfloat16, random data, shuffled block tables. The cases are in `minillm.bench.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from minillm.bench.registry import Workload
from minillm.bench.table import Column
from minillm.checks import check_fields, custom
from minillm.errors import MinillmError, UsageError

if TYPE_CHECKING:
    from minillm.bench.ops import Case


@dataclass(frozen=True)
class KernelsOptions:
    op: str | None = custom(None, lambda name, value: value, metavar="NAME", help="only this op")

    def __post_init__(self) -> None:
        check_fields(self)


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

    COLUMNS: ClassVar = (
        Column("op", lambda r: r.op, width=22),
        Column("shape", lambda r: r.shape, width=34),
        Column("us", lambda r: r.microseconds, ".1f", width=7),
        Column("MB", lambda r: r.bytes / 1e6, ".1f", width=7),
        Column("GFLOP", lambda r: r.flops / 1e9, ".1f", width=7),
        Column("limit", lambda r: r.bound, width=7),
        Column("of it", lambda r: r.fraction, ".0%", width=5),
        Column("error", lambda r: r.error, ".1e", width=8),
    )


@dataclass(frozen=True)
class Limits:
    """The ceilings of this machine, measured."""

    copy_bandwidth: float  # bytes per second, read and written
    matmul_rate: float  # FLOPs per second, bfloat16

    COLUMNS: ClassVar = (
        Column("copy, TB/s", lambda r: r.copy_bandwidth / 1e12, ".2f"),
        Column("bfloat16 products, TFLOP/s", lambda r: r.matmul_rate / 1e12, ".0f"),
    )


def measure(options: KernelsOptions) -> dict[str, Any]:
    """The ceilings, then every op, or the one asked for.

    Raises:
        MinillmError: there is no GPU.
        UsageError: there is no such op.
    """
    import torch

    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    ops = _ops()
    if options.op is not None and options.op not in ops:
        raise UsageError(f"unknown op {options.op!r}; known: {', '.join(ops)}")
    wanted = [cases for name, cases in ops.items() if options.op in (None, name)]
    limits = _limits()
    torch.manual_seed(0)
    return {"limits": limits, "results": (_measure(case, limits) for cases in wanted for case in cases())}


def _ops() -> dict[str, Callable[[], Iterator[Case]]]:
    from minillm.bench.ops import (
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

    return {
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


def _limits() -> Limits:
    from minillm.bench.hardware import matmul_rate, read_bandwidth
    from minillm.bench.ops import DEVICE

    return Limits(read_bandwidth(DEVICE, 1 << 32), matmul_rate(DEVICE))


def _measure(case: Case, limits: Limits) -> KernelResult:
    from minillm.bench.timing import graph_microseconds

    error = case.check()
    microseconds = graph_microseconds(case.launch, case.launches)
    memory = case.bytes / (microseconds * 1e-6) / limits.copy_bandwidth
    compute = case.flops / (microseconds * 1e-6) / limits.matmul_rate
    bound = "compute" if compute > memory else "memory"
    return KernelResult(case.op, case.shape, microseconds, case.bytes, case.flops, bound, max(memory, compute), error)


WORKLOADS = {"kernels": Workload(KernelsOptions, measure)}
