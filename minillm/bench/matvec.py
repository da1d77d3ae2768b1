"""``matvec``: measure the tiles that `minillm.kernels.matvec.TILES` records, against cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch.nn import functional

from minillm.bench.ops import DEVICE, DTYPE, random
from minillm.bench.registry import NoOptions, shape
from minillm.bench.table import shown
from minillm.bench.timing import copies_for_cold_l2, graph_microseconds, read_bandwidth
from minillm.checks import integer
from minillm.errors import UsageError
from minillm.model.shapes import SHAPES
from minillm.model.shard import shard_of


@dataclass(frozen=True)
class Options(NoOptions):
    shape: str = shape("smollm2-135m", "of this model")
    tokens: int = integer(1, 1, 1 << 16, help="that are multiplied at once")
    tensor_parallel_size: int = integer(1, 1, 1 << 16, help="of the part that one of N ranks has")


@dataclass(frozen=True)
class MatvecResult:
    """One weight's shape, times in microseconds with a cold L2."""

    op: str = shown("op")
    features: int = shown("features", "d")
    columns: int = shown("columns", "d")
    floor: float = shown("floor us", ".1f")
    cublas: float = shown("cuBLAS us", ".1f")  # without the norm, the gate or the addition that our kernel has in it
    ours: float = shown("ours us", ".1f")
    tile: tuple[int, int, int] = shown("tile", "d", width=12)  # (rows, columns, warps)
    recorded: tuple[int, int, int] | None = shown("recorded", "d", width=12)  # in `TILES`


def measure(options: Options) -> Iterator[MatvecResult]:
    """Measure each of the five products of a model, or of a rank's part of it, over all sensible tiles.

    Raises:
        UsageError: there is no GPU, or our kernel does not take so many tokens.
    """
    if not torch.cuda.is_available():
        raise UsageError("bench matvec needs a GPU")
    from minillm.kernels import matvec  # which imports Triton

    whole = SHAPES[options.shape]
    if options.tokens > matvec.MOST_TOKENS:
        raise UsageError(f"tokens must be at most {matvec.MOST_TOKENS}, not {options.tokens}: cuBLAS multiplies more")
    c = shard_of(whole, 0, options.tensor_parallel_size).local(whole)
    bandwidth = read_bandwidth(DEVICE)
    for op, features, columns in (
        ("qkv", (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
        ("o", c.hidden_size, c.num_heads * c.head_dim),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size),
        ("down", c.hidden_size, c.intermediate_size),
        ("head", c.vocab_size, c.hidden_size),
    ):
        yield _measure(op, features, columns, options.tokens, bandwidth)


def _measure(op: str, features: int, columns: int, tokens: int, bandwidth: float) -> MatvecResult:
    from minillm.kernels import matvec

    size = features * columns * DTYPE.itemsize
    copies = copies_for_cold_l2(size)
    weights = [random(features, columns) * 0.02 for _ in range(copies)]
    x, gated, add = random(tokens, columns), op == "gate_up", op in ("o", "down")
    norm = None if add else (random(columns), 1e-5)
    out = random(tokens, features // 2 if gated else features)

    def microseconds(tile: tuple[int, int, int]) -> float:
        def launch(i: int) -> None:
            matvec.launch(out, x, weights[i % copies], None, norm, gated=gated, add=add, tile=tile)

        return graph_microseconds(launch, launches=12)

    ours, tile = min((microseconds(tile), tile) for tile in _tiles(columns, 2 if gated else 1, tokens))
    cublas = graph_microseconds(lambda i: functional.linear(x, weights[i % copies]))
    recorded = matvec.recorded_tile(tokens, features, columns)
    return MatvecResult(op, features, columns, size / bandwidth * 1e6, cublas, ours, tile, recorded)


def _tiles(columns: int, matrices: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    for rows, width, warps in product((2, 4, 8), (256, 512, 1024, 2048, 4096), (2, 4, 8)):
        per_thread = rows * width * matrices / (32 * warps)
        if width < 2 * columns and 8 <= per_thread <= (128 if tokens == 1 else 64):
            yield rows, width, warps
