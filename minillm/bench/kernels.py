"""``kernels``: measure ops on a GPU in bfloat16 on random data, without a model."""

from dataclasses import dataclass
from typing import Any

import torch

from minillm.bench.meter import LoadLimits
from minillm.bench.ops import DEVICE, OPS, Case
from minillm.bench.table import NoOptions, shown, word
from minillm.errors import MinillmError, UsageError
from minillm.kernels.streams import graph_microseconds


@dataclass(frozen=True)
class KernelOptions(NoOptions):
    op: str | None = word(None, "measure only this op")


@dataclass(frozen=True)
class KernelResult:
    op: str = shown("op", width=22)
    shape: str = shown("shape", width=34)
    microseconds: float = shown("us", ".1f", width=7)
    bytes: int = shown("MB", ".1f", 1e-6, width=7)
    flops: int = shown("GFLOP", ".1f", 1e-9, width=7)
    bound: str = shown("limit", width=7)  # "memory" or "compute"
    fraction: float = shown("of it", ".0%", width=5)  # fraction of the copy bandwidth or of the matmul rate
    # relative error (norm) compared with a reference in float64; None if results cannot be compared
    error: float | None = shown("error", ".1e", width=8)


def measure(options: KernelOptions) -> dict[str, Any]:
    """Measure the GPU's bandwidth and matmul rate, then every op, or only the op named in ``options``.

    Raises UsageError if there is no such op, and MinillmError without a GPU.
    """
    if options.op is not None and options.op not in OPS:
        raise UsageError(f"unknown op {options.op!r}; known: {', '.join(OPS)}")
    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    limits = LoadLimits.measure(DEVICE, 1 << 32)
    torch.manual_seed(0)
    cases = ((op, make(*sizes)) for op, (make, each) in OPS.items() if options.op in (None, op) for sizes in each)
    return {"limits": limits, "results": (_measure(op, case, limits) for op, case in cases)}


def _measure(op: str, case: Case, limits: LoadLimits) -> KernelResult:
    error = case.error()
    microseconds = graph_microseconds(case.launch, case.launches)
    needed = {"memory": case.bytes / limits.copy_bandwidth, "compute": case.flops / limits.matmul_rate}  # seconds
    bound = max(needed, key=needed.__getitem__)
    fraction = needed[bound] / (microseconds * 1e-6)
    return KernelResult(op, case.shape, microseconds, case.bytes, case.flops, bound, fraction, error)
