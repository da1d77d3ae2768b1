"""``matvec``: measure the tiles that `minillm.kernels.matvec.TILES` records, against cuBLAS."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minillm.bench.hardware import read_bandwidth
from minillm.bench.timing import copies_for_cold_l2, graph_microseconds
from minillm.model.config import ModelConfig


@dataclass(frozen=True)
class MatvecResult:
    """One weight's shape, times in microseconds with a cold L2."""

    op: str
    features: int
    columns: int
    floor: float
    cublas: float  # without the norm, the gate or the addition that our kernel has in it
    ours: float
    tile: tuple[int, int, int]  # (rows, columns, warps)
    recorded: tuple[int, int, int] | None  # in `TILES`


def measure(config: ModelConfig, tokens: int = 1) -> Iterator[MatvecResult]:
    """Each of the five products of a model, or of a rank's part of it, over all sensible tiles.

    Args:
        tokens: up to `minillm.kernels.matvec.MOST_TOKENS`.
    """
    from minillm.kernels import matvec

    device, dtype, c = torch.device("cuda"), torch.bfloat16, config
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
