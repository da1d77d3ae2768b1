"""Inputs for kernel tests: pools with NaN in unused slots, shuffled tables, odd lengths.

On a GPU the tests run there, over more and larger shapes; elsewhere in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from math import nan
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.kernels import AttentionShape, Pages, SamplingInputs, WorkList, reference
from minillm.storage import kv_row_bytes

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Relative error norms against float64. The interpreter truncates a bfloat16 where hardware rounds: twice is 1.6e-2.
CPU_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TOLERANCE = {**CPU_TOLERANCE, torch.bfloat16: 1e-2 if ON_GPU else 2e-2}
DTYPES = list(TOLERANCE)
HEADS = [(1, 1, 32), (9, 3, 64), (6, 1, 80), (5, 5, 96), (4, 2, 256), ((32, 8, 128) if ON_GPU else (8, 2, 128))]

drawn = settings(
    max_examples=60 if ON_GPU else 12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
dtypes = st.sampled_from(DTYPES)
long = 5000 if ON_GPU else 70


def combined(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of choices on a GPU. In the interpreter, return fewer that have every pair of choices."""
    lists = [list(each) for each in choices]
    every = list(itertools.product(*(range(len(each)) for each in lists)))
    taken, met = (every, set[Any]()) if ON_GPU else ([], set[Any]())

    def meeting(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2)) - met

    while not ON_GPU and meeting(most := max(every, key=lambda case: len(meeting(case)))):
        taken.append(most)
        met |= meeting(most)
    return [tuple(each[at] for each, at in zip(lists, case, strict=True)) for case in sorted(taken)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``|got - expected| / |expected|``; a NaN fails. Digits lost below a type's normal numbers do not count."""
    assert not got.isnan().any(), "NaN"
    size = expected.double().norm().clamp(min=torch.finfo(got.dtype).tiny)
    return float((got.double() - expected.double()).norm() / size)


def make_pool(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    seed: int = 0,
    shuffled: bool = True,
    device: torch.device = DEVICE,
    in_8_bits: bool = False,
) -> Pages:
    """K and V of some sequences in blocks; every slot that no sequence owns holds NaN.

    There are three blocks more than needed. The unused entries of a table point at random blocks.

    Args:
        shuffled: the sequences' blocks lie in random order.
        in_8_bits: whole numbers with scales; in a slot that no sequence owns the scale is NaN.
    """
    rng = random.Random(seed)
    widths = [-(-length // block_size) for length in lengths]
    num_blocks = sum(widths) + 3
    order = rng.sample(range(num_blocks), num_blocks) if shuffled else list(range(num_blocks))
    columns = max([*widths, 1]) + 2
    tables = [[rng.randrange(num_blocks) for _ in range(columns)] for _ in lengths]
    slots: list[int] = []
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        own, order = order[:width], order[width:]
        tables[row][:width] = own
        slots += [own[i // block_size] * block_size + i % block_size for i in range(length)]
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(slots, dtype=torch.int64)
    pools = []
    for _ in range(2):
        flat = torch.full((num_blocks * block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
        flat[index] = torch.randn(len(slots), kv_heads, head_dim, generator=generator).to(dtype)
        pools.append(flat.view(num_blocks, block_size, kv_heads, head_dim).to(device))
    pages = Pages(
        pools[0],
        pools[1],
        torch.tensor(tables, dtype=torch.int32, device=device).view(len(lengths), columns),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    return rounded(pages) if in_8_bits else pages


def rounded(pages: Pages) -> Pages:
    """Return the same contexts in 8 bits. A slot with NaN gets NaN as its scale, and garbage."""
    caches = []
    for cache in (pages.k, pages.v):
        levels, scales = reference.quantize_rows(cache)
        garbage = torch.randint_like(levels, -128, 128)
        levels = torch.where(scales.isnan()[..., None], garbage, levels)
        caches.append((levels, scales.transpose(1, 2).contiguous()))
    (k, k_scales), (v, v_scales) = caches
    return pages._replace(k=k, v=v, k_scales=k_scales, v_scales=v_scales)


def without_hidden(pages: Pages) -> Pages:
    """Return the pages with NaN before each sequence's window. Attention of one query reads none of it."""
    if pages.window is None:
        return pages
    size, names = pages.k.shape[1], ("k", "v") if pages.k_scales is None else ("k_scales", "v_scales")
    hidden = {name: getattr(pages, name).clone() for name in names}
    for table, length in zip(pages.tables.tolist(), pages.lens.tolist(), strict=True):
        for token in range(length - pages.window):
            for cache in hidden.values():  # scales lie head by head
                (cache if pages.k_scales is None else cache.transpose(1, 2))[table[token // size], token % size] = nan
    return pages._replace(**hidden)


def parameters(rows: int, generator: torch.Generator) -> SamplingInputs:
    """Return random settings per row: greedy, plain, each filter alone, and all filters."""

    def some(probability: float) -> Tensor:
        return torch.rand(rows, generator=generator) < probability

    temperature = torch.rand(rows, generator=generator) * 2 * some(0.85)
    top_k = torch.randint(1, 60, (rows,), generator=generator) * some(0.4)
    top_p = torch.where(some(0.4), torch.rand(rows, generator=generator), 1.0).clamp(min=1e-3)
    min_p = torch.rand(rows, generator=generator) * some(0.2)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    return SamplingInputs(*(each.to(DEVICE) for each in (temperature, top_k, top_p, min_p, seeds, positions)))


def in_float64(pages: Pages) -> Pages:
    """Return the same pages in float64, dequantized if they have 8 bits."""
    if pages.k_scales is None or pages.v_scales is None:
        return pages._replace(k=pages.k.double(), v=pages.v.double())
    return pages._replace(k_scales=pages.k_scales.double(), v_scales=pages.v_scales.double())


def forked_tables(
    num_seqs: int, block_size: int, longest: int, rng: random.Random
) -> tuple[list[list[int]], list[int]]:
    """Block tables as forks make them, in random order: trees of any depth, lone sequences, and padding between them.

    A table may begin with any part of another's full blocks; the others are its own.
    """
    fresh = iter(rng.sample(range(10 * num_seqs * longest), num_seqs * (longest // block_size + 2)))
    rows: list[tuple[list[int], int]] = []
    for number in range(num_seqs):
        length = longest if number < 2 else 0 if rng.random() < 0.1 else rng.randint(1, longest)
        parent, parent_length = rng.choice(rows) if rows and (number == 1 or rng.random() < 0.8) else ([], 0)
        shared = min(parent_length, length) // block_size
        shared = shared if number == 1 else rng.choice((shared, rng.randint(0, shared)))
        own = -(-length // block_size) - shared
        rows.append((parent[:shared] + [next(fresh) for _ in range(own)], length))
    numbers = {block: number for number, block in enumerate(sorted({block for table, _ in rows for block in table}))}
    rng.shuffle(rows)
    return [[numbers[block] for block in table] for table, _ in rows], [length for _, length in rows]


def shape_of(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, processors: int = 4, in_8_bits: bool = False
) -> AttentionShape:
    row = kv_row_bytes(head_dim, 1 if in_8_bits else dtype.itemsize)
    return AttentionShape(num_heads, num_kv_heads, head_dim, dtype.itemsize, processors, row)


def attend_by_list(q: Tensor, pages: Pages, scale: float, work: WorkList) -> Tensor:
    """`prefix_attention`, token by token as the work list says: a list of other tables gives other tokens."""
    k_cache, v_cache, tables, lens = pages[:4]
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    for place, seq in enumerate(work.order.tolist()):
        runs = [
            (begin, end, lead)
            for count, lead, first, begin, end, _ in work.items[: int(work.counts[0])].tolist()
            if first <= place < first + count
        ]
        runs = sorted([*runs, (int(work.tails[place]), int(lens[seq]), seq)])
        slots = [int(tables[r, t // block_size]) * block_size + t % block_size for b, e, r in runs for t in range(b, e)]
        assert [t for begin, end, _ in runs for t in range(begin, end)] == list(range(int(lens[seq])))
        if slots:
            k, v = (cache.flatten(0, 1)[slots].double() for cache in (k_cache, v_cache))
            k, v = (each.repeat_interleave(q.shape[1] // k_cache.shape[2], dim=1) for each in (k, v))
            weights = torch.einsum("hd,thd->ht", q[seq].double() * scale, k).softmax(-1)
            out[seq] = torch.einsum("ht,thd->hd", weights, v).to(q.dtype)
    return out
