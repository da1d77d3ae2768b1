"""Attention over a cache in 8 bits on a GPU, beside 16 bits: is it right, how long does it take, in which tiles.

PYTHONPATH=. python tests/kernels/kv_tiles.py [SECONDS]

Random shapes are compared with the reference in float64. Then both forms are timed by turns, and decode attention by
lanes with other warps and splits than `decode_attention` chooses. What would begin after so many seconds (95) is left
out. Kernels are compiled ahead, by several processes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from minillm.bench.meter import read_bandwidth
from minillm.bench.ops import Case, Heads, paged_attention, prefill_attention, prefix_attention
from minillm.kernels import (
    AttentionShape,
    LayerCache,
    Pages,
    WorkList,
    chunked_prefill,
    decode_attention,
    plan_attention,
    reference,
)
from minillm.kernels import prefix_decode_attention as prefix_kernels
from minillm.kernels.prefix_plan import FREE
from minillm.kernels.staging import stage
from minillm.kernels.timing import graph_microseconds

BEGIN = time.time()
HEADS: tuple[Heads, ...] = ((32, 8, 128), (32, 8, 64), (32, 32, 128))
DECODE = ((64, 4096), (256, 1024), (8, 8192), (1, 32768), (1, 1024))
MORE = (((64, 8, 128), 64, 4096), ((9, 3, 64), 64, 4096), ((14, 2, 64), 64, 4096))
PREFIX = ((32, 1024, 64), (32, 4096, 64), (256, 1024, 128), (256, 2048, 128), (256, 8192, 128), (256, 8192, 16))
PREFILL = ((1, 512, 0), (1, 512, 7680), (1, 2048, 0), (1, 2048, 6144), (1, 8192, 0), (16, 512, 0), (1, 256, 3840))
SWEEP = (
    ((32, 8, 128), 64, 4096), ((32, 8, 128), 256, 1024), ((32, 8, 128), 1, 32768), ((32, 8, 128), 1, 1024),
    ((32, 8, 64), 64, 4096), ((32, 32, 128), 64, 1024),
)  # fmt: skip
WARPS = (1, 2, 4, 8)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def error(got: Tensor, exact: Tensor) -> float:
    """``|got - exact| / |exact|``; infinite where there is a NaN."""
    return float("inf") if got.isnan().any() else float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def random_pages(rng: random.Random, lens: list[int], kv_heads: int, dim: int, block_size: int) -> Pages:
    """Contexts in 8 bits in shuffled blocks. Slots that no context has hold anything, with a scale of NaN."""
    widths = [-(-length // block_size) for length in lens]
    blocks = sum(widths) + 2
    ids = iter(rng.sample(range(blocks), blocks))
    tables = [[next(ids) for _ in range(width)] + [1 << 30] * (max(widths) + 1 - width) for width in widths]
    k, v = (torch.randint(-127, 128, (blocks, block_size, kv_heads, dim), dtype=torch.int8) for _ in "kv")
    k_scales, v_scales = (torch.full((blocks, kv_heads, block_size), float("nan")) for _ in "kv")
    for table, length in zip(tables, lens, strict=True):
        for token in range(length):
            for scales in (k_scales, v_scales):
                scales[table[token // block_size], :, token % block_size] = torch.rand(kv_heads) * 0.03
    cache = LayerCache(k.cuda(), v.cuda(), k_scales.cuda(), v_scales.cuda())
    return cache.pages(torch.tensor(tables, dtype=torch.int32).cuda(), torch.tensor(lens).int().cuda())


def check(seed: int) -> str:
    """Compare all three ops with the reference on one random shape; a line about it, which says WRONG where it is."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, kv_heads = rng.choice([(4, 4), (9, 3), (32, 8), (16, 2), (14, 2), (6, 3), (5, 1)])
    dim, block_size = rng.choice([64, 128, 128]), rng.choice([1, 2, 4, 8, 16, 32, 256])
    dtype = rng.choice([torch.bfloat16, torch.float16])
    lens = [0, 1, rng.randint(2, 40), rng.randint(40, 300), rng.randint(300, 1500), rng.randint(1, 1500)]
    pages = random_pages(rng, lens, kv_heads, dim, block_size)
    assert pages.k_scales is not None
    assert pages.v_scales is not None
    wide = pages._replace(k_scales=pages.k_scales.double(), v_scales=pages.v_scales.double())
    q = torch.randn(len(lens), heads + 1, dim, device="cuda").to(dtype)[:, 1:]
    scale, found = dim**-0.5, {}
    for window, splits in ((None, 1), (None, 3), (200, 2)):
        exact = reference.paged_attention(q.double(), wide._replace(window=window), scale)
        got = decode_attention.paged_attention(q, pages._replace(window=window), scale, num_splits=splits)
        found[f"decode {window} {splits}"] = error(got, exact)
    # Every second sequence begins as another one does.
    tables, shared_lens = pages.tables.clone(), pages.lens.clone()
    shared = lens[4] // 2 // block_size
    for row in (3, 5):
        tables[row, :shared] = tables[4, :shared]
        shared_lens[row] = shared * block_size
    rows = [[each for each in row if each < 1 << 30] for row in tables.tolist()]
    for processors in (1 if seed % 2 else 132,):
        shape = AttentionShape(heads, kv_heads, dim, 2, processors)
        plan = plan_attention(rows, shared_lens.tolist(), block_size, shape, costs=FREE)
        if plan is not None:
            work = WorkList.allocate(len(lens), shape, torch.device("cuda"))
            work.fill(plan)
            exact = reference.paged_attention(q.double(), wide._replace(tables=tables, lens=shared_lens), scale)
            got = prefix_kernels.prefix_attention(q, pages._replace(tables=tables, lens=shared_lens), scale, work)
            found[f"prefix {processors}"] = error(got, exact)
    chunks = [0, 1, *(rng.randint(1, length) for length in lens[2:])]
    starts = torch.tensor([0, *chunks]).cumsum(0).int().cuda()
    q = torch.randn(sum(chunks), heads, dim, device="cuda").to(dtype)
    for window, capacity in ((None, 700), (150, sum(lens))):
        exact = reference.prefill_attention(q.double(), wide._replace(window=window), starts, scale)
        got = chunked_prefill.prefill_attention(q, pages._replace(window=window), starts, scale, capacity=capacity)
        found[f"prefill {window} {capacity}"] = error(got, exact)
    worst = max(found, key=found.__getitem__)
    said = "WRONG " if found[worst] > TOLERANCE[dtype] else ""
    about = f"{heads}/{kv_heads} x {dim}, block {block_size}, {str(dtype)[6:]}"
    return f"{said}{about}: {len(found)} checks, the largest error {found[worst]:.1e} ({worst})"


def compile_decode(heads: Heads, warps: int, splits: tuple[int, ...], in_8_bits: bool) -> None:
    decode_attention.LANES_WARPS = warps
    case = paged_attention(heads, 2, 512, in_8_bits=in_8_bits)
    for each in splits:
        decode_attention.paged_attention(*case.inputs[0], num_splits=each)


def compile_prefix(heads: Heads, in_8_bits: bool) -> None:
    for size in ((32, 1024, 64), (256, 1024, 128)):  # tails in parts or not
        prefix_attention(heads, *size, in_8_bits).launch()


def compile_prefill(heads: Heads, in_8_bits: bool) -> None:
    for tokens in (4096, 512):
        q, pages, starts, scale = prefill_attention(heads, 1, tokens, 0, in_8_bits).inputs[0]
        for capacity in (0, tokens) if in_8_bits else (None,):
            chunked_prefill.prefill_attention(q, pages, starts, scale, capacity=capacity)


def tasks() -> Iterator[Callable[[], str | None]]:
    """What is checked, and compiled ahead: what takes longest first."""
    for seed in range(6):
        yield partial(check, seed)
    for heads, in_8_bits in product((HEADS[0], HEADS[2]), (True, False)):
        yield partial(compile_prefill, heads, in_8_bits)
        yield partial(compile_prefix, heads, in_8_bits)
    for heads, in_8_bits in product((*HEADS, *(each[0] for each in MORE)), (True, False)):
        yield partial(compile_decode, heads, 4, (1, 8, 16, 66), in_8_bits)
    for heads, warps in product(HEADS, WARPS):
        if warps != 4:
            yield partial(compile_decode, heads, warps, (1, 2, 8, 16, 32, 66, 132), True)


def run_task(task: Callable[[], str | None]) -> str | None:
    try:
        said = task()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return said
    except Exception as failed:  # the others go on
        return f"WRONG {task}: {type(failed).__name__}: {str(failed)[-300:]}"


def late(limit: float) -> bool:
    return time.time() - BEGIN > limit


def by_turns(*launches: Callable[[int], object], count: int = 8) -> list[float]:
    """Microseconds of each, the medians of three turns."""
    times = [[graph_microseconds(launch, count, 5) for launch in launches] for _ in range(3)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 95.0
    workers = min(12, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for said in pool.imap_unordered(run_task, list(tasks()), chunksize=1):
            if said is not None:
                print(said, flush=True)
    bandwidth = read_bandwidth(torch.device("cuda")) * 1e-12
    print(
        f"{torch.cuda.get_device_name()}, reads {bandwidth:.2f} TB/s, ready after {time.time() - BEGIN:.0f} s",
        flush=True,
    )
    torch.manual_seed(0)

    print("\ndecode                             16 bits   8 bits  ratio  8 bits TB/s   error")
    for heads, seqs, context in (*((h, *size) for h in HEADS for size in DECODE), *MORE):
        if late(limit):
            break
        plain, narrow = (paged_attention(heads, seqs, context, in_8_bits=form) for form in (False, True))
        a, b = by_turns(plain.launch, narrow.launch)
        rate = narrow.bytes / b * 1e-6
        print(f"{plain.shape:34} {a:7.1f}  {b:7.1f}  {b / a:5.2f}  {rate:11.2f}  {narrow.error():.1e}", flush=True)

    print("\nprefill                            16 bits   8 bits  ratio   error   in 8 bits, nothing unpacked ahead")
    for heads, size in product((HEADS[0], HEADS[2]), PREFILL):
        if late(limit):
            break
        plain, narrow = (prefill_attention(heads, *size, form) for form in (False, True))
        packed = partial(chunked_prefill.prefill_attention, *narrow.inputs[0], capacity=0)
        a, b, c = by_turns(plain.launch, narrow.launch, lambda _: packed(), count=4)  # noqa: B023
        print(f"{plain.shape:34} {a:7.1f}  {b:7.1f}  {b / a:5.2f}  {narrow.error():.1e}  {c:7.1f}", flush=True)

    print("\nprefix                             16 bits   8 bits  ratio  error to decode")
    for heads, size in product((HEADS[0], HEADS[2]), PREFIX):
        if late(limit):
            break
        plain, narrow = (prefix_attention(heads, *size, form) for form in (False, True))
        a, b = by_turns(plain.launch, narrow.launch)
        print(f"{plain.shape:34} {a:7.1f}  {b:7.1f}  {b / a:5.2f}  {narrow.error():.1e}", flush=True)

    print("\nto unpack a context alone")
    for heads, tokens in product((HEADS[0], HEADS[2]), (1024, 8192)):
        q, pages, starts, _ = prefill_attention(heads, 1, tokens, 0, True).inputs[0]
        (a,) = by_turns(lambda _: stage(pages, starts, q.dtype, tokens))  # noqa: B023
        print(f"{heads} {tokens}: {a:.1f} us", flush=True)

    print("\ndecode in 8 bits by warps (1, 2, 4, 8) and splits")
    chosen = decode_attention.LANES_WARPS
    for heads, seqs, context in SWEEP:
        case = paged_attention(heads, seqs, context, in_8_bits=True)
        usual = decode_attention.num_splits_for(seqs, heads[1], context, torch.device("cuda"))
        for splits in sorted({max(1, usual // 2), usual, 2 * usual}):
            if late(limit):
                break
            times = []
            for warps in WARPS:
                decode_attention.LANES_WARPS = warps

                def launch(i: int, case: Case = case, splits: int = splits) -> Tensor:
                    return decode_attention.paged_attention(*case.inputs[i % len(case.inputs)], num_splits=splits)

                times.append(graph_microseconds(launch, 8, 7))
            said = "  ".join(f"{each:7.1f}" for each in times)
            print(f"{case.shape:34} {splits:4} {'*' if splits == usual else ' '} {said}", flush=True)
    decode_attention.LANES_WARPS = chosen
    print(f"\n{time.time() - BEGIN:.0f} s")


if __name__ == "__main__":
    main()
