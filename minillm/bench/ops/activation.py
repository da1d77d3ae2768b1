"""`minillm.kernels.activation`."""

from __future__ import annotations

from collections.abc import Iterator

from minillm.bench.ops import Case, random, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import reference


def silu_mul() -> Iterator[Case]:
    for rows, size in ((1, 14336), (64, 14336), (8192, 4096)):
        yield _case(rows, size)


def _case(rows: int, size: int) -> Case:
    from minillm.kernels.activation import silu_mul

    moved = 3 * rows * size * 2
    inputs = [random(rows, 2 * size) for _ in range(copies_for_cold_l2(moved))]

    def check() -> float:
        return relative_error(silu_mul(inputs[0]), reference.silu_mul(inputs[0].double()))

    return Case("silu_mul", f"{rows} x {size}", moved, 0, lambda i: silu_mul(inputs[i % len(inputs)]), check)
