"""``matvec``: measure the tiles that `minillm.kernels.matvec.TILES` records, against cuBLAS."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minillm.bench.hardware import read_bandwidth
from minillm.bench.registry import NoOptions, shape
from minillm.bench.table import shown
from minillm.bench.timing import copies_for_cold_l2, graph_microseconds
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
    """Each of the five products of a model, or of a rank's part of it, over all sensible tiles.

    Raises:
        UsageError: there is no GPU, or our kernel does not take so many tokens.
    """
    if not torch.cuda.is_available():
        raise UsageError("bench matvec needs a GPU")
    from minillm.kernels import matvec

    tokens, most, whole = options.tokens, matvec.MOST_TOKENS, SHAPES[options.shape]
    if tokens > most:
        raise UsageError(f"tokens must be at most {most}, not {tokens}: cuBLAS multiplies more")
    c = shard_of(whole, 0, options.tensor_parallel_size).local(whole)
    device, dtype = torch.device("cuda"), torch.bfloat16
    bandwidth = read_bandwidth(device)
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    for op, features, columns in (
        ("qkv", heads, c.hidden_size),
        ("o", c.hidden_size, c.num_heads * c.head_dim),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size),
        ("down", c.hidden_size, c.intermediate_size),
        ("head", c.vocab_size, c.hidden_size),
    ):
        size = features * columns * dtype.itemsize
        copies = copies_for_cold_l2(size)
        weights = [torch.randn(features, columns, device=device, dtype=dtype) * 0.02 for _ in range(copies)]
        x, norm = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((tokens, columns), (columns,)))
        gated, add = op == "gate_up", op in ("o", "down")
        out = torch.empty(tokens, features // 2 if gated else features, device=device, dtype=dtype)

        def launch(tile: tuple[int, int, int], i: int, bound: tuple = (weights, x, norm, out, gated, add)) -> None:
            weights, x, norm, out, gated, add = bound
            weight = weights[i % len(weights)]
            matvec.launch(out, x, weight, None, None if add else (norm, 1e-5), gated=gated, add=add, tile=tile)

        times = {}
        for tile in _tiles(columns, 2 if gated else 1, tokens):
            times[tile] = graph_microseconds(lambda i, tile=tile: launch(tile, i), launches=12)  # type: ignore[misc]
        best = min(times, key=lambda tile: times[tile])
        cublas = graph_microseconds(lambda i, w=weights, x=x: torch.nn.functional.linear(x, w[i % len(w)]))  # type: ignore[misc]
        recorded = matvec.recorded_tile(tokens, features, columns)
        yield MatvecResult(op, features, columns, size / bandwidth * 1e6, cublas, times[best], best, recorded)


def _tiles(columns: int, matrices: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    for rows, width, warps in itertools.product((2, 4, 8), (256, 512, 1024, 2048, 4096), (2, 4, 8)):
        per_thread = rows * width * matrices / (32 * warps)
        if width < 2 * columns and 8 <= per_thread <= (128 if tokens == 1 else 64):
            yield rows, width, warps
