"""`minillm.kernels.norm`."""

from __future__ import annotations

from collections.abc import Iterator

from minillm.bench.ops import Case, random, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import reference


def rms_norm() -> Iterator[Case]:
    for rows, hidden in ((1, 4096), (64, 4096), (8192, 4096)):
        yield _case(rows, hidden)


def _case(rows: int, hidden: int) -> Case:
    from minillm.kernels.norm import rms_norm

    moved = 2 * rows * hidden * 2
    inputs, weight = [random(rows, hidden) for _ in range(copies_for_cold_l2(moved))], random(hidden)

    def check() -> float:
        exact = reference.rms_norm(inputs[0].double(), weight.double(), 1e-5)
        return relative_error(rms_norm(inputs[0], weight, 1e-5), exact)

    return Case(
        "rms_norm", f"{rows} x {hidden}", moved, 0, lambda i: rms_norm(inputs[i % len(inputs)], weight, 1e-5), check
    )
