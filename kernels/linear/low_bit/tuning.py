"""Tune the tile sizes of low-bit matmuls on this card: time candidates for each number of tokens.

The built-in tiles of `one_token` and `few_tokens` were measured on an H200. Another card has another ratio of bandwidth
to instructions, fewer registers and smaller caches. So on this card, a few variations of the built-in tiles are timed,
and also a matmul that dequantizes the matrix first. Compiling takes most of the time, so the candidates share kernels:
the number of programs per multiprocessor does not change the kernel, and 32 and 64 tokens share the tiles of 32.

The measurement runs the same matmuls as a model, from 16-bit activations on, with the matrices of its layers in turn.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from minillm.kernels.arguments import next_power_of_2
from minillm.kernels.linear.low_bit import choose as linear
from minillm.kernels.linear.low_bit import few_tokens as matmul
from minillm.kernels.linear.low_bit import one_token as matvec
from minillm.kernels.linear.low_bit.layouts import GROUP, UNPACKED, Layout, LowBit
from minillm.kernels.streams import graph_microseconds

Tile = tuple[int, ...]
Place = Literal["norm", "gated", "add"]  # a matmul after a norm, after a norm with a gate, or before an addition
Clock = Callable[[Callable[[int], object], int], float]  # launch, number of launches -> microseconds per launch
OnCount = Callable[[int, int], None]  # reports progress: done, total
_UNFIT = (OutOfResources, PTXASError, torch.OutOfMemoryError)  # the tile is too large for this card


@dataclass(frozen=True)
class Product:
    """A kind of matmul: a layout, a shape, and the operation that the matmul is fused with (`Place`).

    All matrices of one kind in a model use the same tiles.
    """

    layout: Layout
    shape: tuple[int, int]
    place: Place

    def __str__(self) -> str:
        layout, (out, width) = self.layout, self.shape
        table = " table" if layout.table else ""
        return f"{layout.bits} bits {layout.scales} {layout.group}{table}, {out} x {width}, {self.place}"

    @property
    def num_rows(self) -> int:
        return self.shape[0] // 2 if self.place == "gated" else self.shape[0]


class Job(NamedTuple):
    """A candidate tile to measure for a kind of matmul and a number of tokens."""

    product: Product
    tokens: int  # a `bucket`
    tile: Tile

    @property
    def kernel(self) -> object:
        """A key of the compiled kernel: jobs with equal keys share one kernel."""
        product, is_matvec = self.product, self.tokens <= matvec.MOST_TOKENS
        cut = (self.tokens, self.tile[:2], next_power_of_2(product.shape[1])) if is_matvec else self.tile
        return product.layout, product.place, cut


class Timed(NamedTuple):
    """The fastest tile for a kind of matmul and a number of tokens."""

    product: Product
    tokens: int
    tile: Tile
    microseconds: float


def buckets(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of tokens (buckets) to tune tiles for. ``dtype`` is that of the activations."""
    return (1, 2, 8, 16, 32, 64) if dtype.itemsize == 2 else (1, 2)


def candidates(product: Product, tokens: int) -> list[Tile]:
    """Return the tiles to measure. The first is the built-in tile, which is fastest on an H200."""
    features, columns = product.shape
    if tokens <= matvec.MOST_TOKENS:
        groups = columns // GROUP
        lanes = next_power_of_2(groups)
        found = [matvec.tile_for(tokens, product.layout, groups, product.num_rows)]
        for rows, share in ((2, 64), (2, 128), (4, 128), (8, 256)):  # groups per warp
            warps = min(16, max(1, rows * lanes // share))
            found += [(rows, warps, max(1, 12 // warps)), (rows, warps, max(1, 16 // warps))]
        return list(dict.fromkeys(found))
    few = {8: ((4, 2, 1, 1), (16, 1, 1, 1), (8, 1, 1, 2), (4, 1, 1, 2)),
           16: ((4, 2, 2, 1), (8, 1, 2, 2), (8, 1, 2, 1), (4, 1, 2, 1))}  # fmt: skip
    more = ((4, 2, 4, 1), (8, 2, 4, 1), (4, 1, 4, 1), (2, 2, 4, 1))
    return list(dict.fromkeys((tuple(matmul.tile_for(tokens, features, columns)), *few.get(tokens, more), UNPACKED)))


def launcher(job: Job, matrices: Sequence[LowBit], dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Return a function ``launch(i)`` that launches the job's matmul with matrix ``i % len(matrices)``."""
    place, (features, columns) = job.product.place, job.product.shape
    cut = [(replace(each, tiles={job.tokens: job.tile}),) for each in matrices]
    x = torch.linspace(-1, 1, job.tokens * columns, device=matrices[0].device).view(-1, columns).to(dtype)
    norm = torch.ones_like(x[0]), 1e-5
    out = x.new_zeros(job.tokens, features)
    if place == "gated":
        return lambda i: linear.product(x, cut[i % len(cut)], None, None, norm, gated=True)
    if place == "add":
        return lambda i: linear.product(x, cut[i % len(cut)], None, out, add=True)
    return lambda i: linear.product(x, cut[i % len(cut)], None, out, norm)


def prepared(
    products: Mapping[Product, Sequence[LowBit]], dtype: torch.dtype, on_count: OnCount = lambda done, total: None
) -> list[Job]:
    """Compile all candidate tiles of all matmuls in parallel. Return a job to time for each candidate that fits this
    card.

    ``on_count`` is called with the number of compiled kernels and their total.
    """
    jobs = [
        Job(each, tokens, tile) for each in products for tokens in buckets(dtype) for tile in candidates(each, tokens)
    ]
    kernels = {job.kernel: job for job in jobs if job.tile}  # cuBLAS would reserve memory for every thread

    def rehearse(job: Job) -> bool:
        matrix = products[job.product][0]
        if matrix.device.type == "cuda":
            torch.cuda.set_device(matrix.device)  # for this thread
        try:
            with torch.inference_mode():
                launcher(job, [matrix], dtype)(0)
        except _UNFIT:
            return False
        return True

    runs = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # on ctrl-c, `map` cancels jobs that have not started
        for done, (kernel, fits) in enumerate(zip(kernels, pool.map(rehearse, kernels.values()), strict=True), 1):
            runs[kernel] = fits
            on_count(done, len(kernels))
    return [job for job in jobs if runs.get(job.kernel, True)]


@torch.inference_mode()
def fastest(
    jobs: Iterable[Job],
    products: Mapping[Product, Sequence[LowBit]],
    dtype: torch.dtype,
    clock: Clock = graph_microseconds,
    on_count: OnCount = lambda done, total: None,
) -> Iterator[Timed]:
    """Time all candidate tiles. Yield the fastest tile for each kind of matmul and number of tokens, once it is known.

    ``on_count`` is called with the number of timed candidates and their total.
    """
    jobs, done = list(jobs), 0
    rivals: dict[tuple[Product, int], list[Job]] = {}
    for job in jobs:
        rivals.setdefault((job.product, job.tokens), []).append(job)
    for (product, tokens), group in rivals.items():
        matrices, times = _rotation(products[product]), []
        for job in group:
            times.append(clock(launcher(job, matrices, dtype), len(matrices)))
            done += 1
            on_count(done, len(jobs))
        best = min(range(len(group)), key=times.__getitem__)  # the first of equals, possibly the H200's
        yield Timed(product, tokens, group[best].tile, times[best])


def _rotation(matrices: Sequence[LowBit]) -> list[LowBit]:
    """Return enough matrices to exceed the L2 cache, so that a timing loop reads each one from memory.

    A small model has too few: its first matrix is copied.
    """
    first, device = matrices[0], matrices[0].device
    cold = 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    count = min(64, max(4, -(-cold // first.nbytes)))
    rows = torch.arange(first.shape[0], device=device)
    return [*matrices[:count], *(first.rows(rows) for _ in range(count - len(matrices)))]


def measure(
    products: Mapping[Product, Sequence[LowBit]],
    dtype: torch.dtype,
    on_compiled: OnCount,
    on_timed: OnCount,
) -> Iterator[Timed]:
    """Compile and time all candidate tiles of all matmuls. Yield the fastest tiles: see `prepared` and `fastest`."""
    yield from fastest(prepared(products, dtype, on_compiled), products, dtype, on_count=on_timed)
