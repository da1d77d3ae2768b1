"""Time batch-invariant matmuls and attention on a GPU, compared with the ops of `FASTEST`.

    PYTHONPATH=tests python tests/kernels/linear/invariant_tiles.py products [TOKENS ...]
    PYTHONPATH=tests python tests/kernels/linear/invariant_tiles.py attention

``products``: the fastest tiles at the shapes of an 8B model, with the norm in front; `CANDIDATES` are compiled by 14
processes first. That all tiles give the same bits is a test: test_invariant_linear.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lib.invariant_candidates import CANDIDATES, randn
from minillm import kernels
from minillm.kernels import LinearWeight
from minillm.kernels.arguments import Pages
from minillm.kernels.attention import decode as decode_attention
from minillm.kernels.attention import invariant as invariant_attention
from minillm.kernels.attention import prefill as chunked_prefill
from minillm.kernels.linear.invariant import Tile, product
from minillm.kernels.streams import copies_for_cold_l2, graph_microseconds

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
_PROCESSES = 14


class Case:
    """One product of some tokens, with copies of its weight that no L2 holds."""

    def __init__(self, name: str, tokens: int, weights: list[LinearWeight]) -> None:
        self.name, self.weights = name, weights
        self.gated, self.add = name == "gate_up", name in ("o", "down")
        features, columns = SHAPES[name]
        self.x, self.norm = randn(tokens, columns), randn(columns)
        self.out = randn(tokens, features // 2 if self.gated else features)

    def usual(self, i: int) -> None:
        weight = self.weights[i % len(self.weights)]
        if self.gated:
            kernels.norm_gated_linear(self.x, self.norm, 1e-5, weight)
        elif self.add:
            kernels.linear_add(self.x, weight, self.out)
        else:
            kernels.norm_linear(self.x, self.norm, 1e-5, weight)

    def ours(self, tile: Tile | None, i: int) -> None:
        weight = self.weights[i % len(self.weights)].weight
        x = self.x if self.add else kernels.rms_norm(self.x, self.norm, 1e-5)
        product(x, weight, None, self.out, gated=self.gated, add=self.add, tile=tile)


def cases(counts: list[int], *, cold: bool) -> Iterator[tuple[int, Case, list[Tile]]]:
    for name, (features, columns) in SHAPES.items():
        copies = max(2, copies_for_cold_l2(features * columns * 2)) if cold else 1
        weights = [LinearWeight(randn(features, columns) * 0.02) for _ in range(copies)]
        for tokens in counts:
            fits = [tile for tile in CANDIDATES if tile.tokens < 2 * tokens or tile.tokens <= 16]
            yield tokens, Case(name, tokens, weights), [tile for tile in fits if tokens <= 16 or tile.tokens > 16]


def compile_share(number: int, counts: list[int]) -> None:
    jobs = [(case, tile) for _, case, tiles in cases(counts, cold=False) for tile in tiles]
    for case, tile in jobs[number::_PROCESSES]:
        try:
            case.ours(tile, 0)
        except OutOfResources:
            continue


def products(counts: list[int]) -> None:
    arguments = [sys.executable, __file__, "compile"]
    ahead = [subprocess.Popen([*arguments, str(i), *map(str, counts)]) for i in range(_PROCESSES)]
    for process in ahead:
        process.wait()
    for tokens, case, tiles in cases(counts, cold=True):
        launches = max(8, len(case.weights))
        times = []
        for tile in tiles:
            try:
                times.append((graph_microseconds(partial(case.ours, tile), launches), tuple(tile)))
            except OutOfResources:
                continue
        usual = graph_microseconds(case.usual, launches)
        chosen = graph_microseconds(partial(case.ours, None), launches)
        best = " ".join(f"{tile}: {us:.1f}" for us, tile in sorted(times)[:4])
        print(f"{case.name:8}{tokens:6} usual {usual:.1f}, invariant {chosen:.1f} | {best}", flush=True)


def pages_of(lengths: list[int], kv_heads: int, dim: int) -> Pages:
    blocks = [-(-length // 16) for length in lengths]
    order = torch.randperm(sum(blocks), device="cuda").int()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
    start = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[start : start + count]
        start += count
    k, v = (randn(sum(blocks), 16, kv_heads, dim) for _ in "kv")
    return Pages(k, v, tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def attention() -> None:
    for heads, kv_heads, dim in ((32, 8, 128), (32, 32, 128), (32, 8, 64)):
        scale = dim**-0.5
        for seqs, length in ((1, 512), (1, 1024), (1, 8192), (1, 32768), (8, 1024), (64, 1024), (64, 4096), (256, 512)):
            count = max(2, min(8, copies_for_cold_l2(seqs * length * kv_heads * dim * 4)))
            contexts, q = [pages_of([length] * seqs, kv_heads, dim) for _ in range(count)], randn(seqs, heads, dim)

            def decode(module: object, q: Tensor, contexts: list[Pages], scale: float, i: int) -> None:
                module.paged_attention(q, contexts[i % len(contexts)], scale)  # type: ignore[attr-defined]

            times = [
                graph_microseconds(partial(decode, module, q, contexts, scale), 16)
                for module in (decode_attention, invariant_attention)
            ]
            print(f"decode {heads}/{kv_heads} x {dim}, {seqs} x {length}: {times[0]:.1f} {times[1]:.1f}", flush=True)
        for chunk, cached in ((512, 0), (2048, 0), (8192, 0), (512, 7680), (256, 3840)):
            context, q = pages_of([chunk + cached], kv_heads, dim), randn(chunk, heads, dim)
            starts = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")

            def prefill(module: object, q: Tensor, context: Pages, starts: Tensor, scale: float, _i: int) -> None:
                module.prefill_attention(q, context, starts, scale)  # type: ignore[attr-defined]

            times = [
                graph_microseconds(partial(prefill, module, q, context, starts, scale), 8)
                for module in (chunked_prefill, invariant_attention)
            ]
            print(
                f"chunk {heads}/{kv_heads} x {dim}, {chunk} after {cached}: {times[0]:.1f} {times[1]:.1f}", flush=True
            )


def main() -> None:
    torch.manual_seed(0)
    what, *numbers = sys.argv[1:]
    if what == "compile":
        compile_share(int(numbers[0]), [int(each) for each in numbers[1:]])
    elif what == "products":
        products([int(each) for each in numbers] or [1, 16, 64, 256, 2048])
    else:
        attention()


if __name__ == "__main__":
    main()
