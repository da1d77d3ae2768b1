"""Check and time attention over an 8-bit cache on a GPU, compared with 16 bits, and try its tile sizes.

PYTHONPATH=. python tests/kernels/attention/kv_tiles.py [SECONDS [PART ...]]

Parts: check, decode, prefix, sweep, prefill, stage; by default all. Random shapes are compared with the reference in
float64. Then both forms are timed by turns, shared blocks with the programs that a plan may choose and beside plain
decode attention too, and decode attention by lanes with other warps, splits and registers than `decode_attention`
chooses. What would begin after so many seconds (75) is left out. Kernels are compiled ahead, by several processes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from minillm.bench.meter import read_bandwidth
from minillm.bench.ops import Case, Heads, paged_attention, prefill_attention, prefix_attention
from minillm.kernels import AttentionShape, LayerCache, Pages, WorkList, plan_attention, reference
from minillm.kernels.attention import decode as decode_attention
from minillm.kernels.attention import int8_decode as attention_lanes
from minillm.kernels.attention import prefill as chunked_prefill
from minillm.kernels.attention import shared as prefix_kernels
from minillm.kernels.attention.int8_prefill import stage
from minillm.kernels.attention.plan import FREE
from minillm.kernels.streams import graph_microseconds
from minillm.storage import kv_row_bytes

BEGIN = time.time()
HEADS: tuple[Heads, ...] = ((32, 8, 128), (32, 8, 64), (32, 32, 128))
DECODE = ((1, 1024), (1, 32768), (64, 4096), (8, 8192), (256, 1024))
MORE = (((64, 8, 128), 64, 4096), ((9, 3, 64), 64, 4096), ((14, 2, 64), 64, 4096))
PREFIX = ((32, 1024, 64), (32, 4096, 64), (256, 1024, 128), (256, 2048, 128), (256, 8192, 128), (256, 8192, 16))
PREFILL = ((1, 512, 0), (1, 512, 7680), (1, 2048, 0), (1, 2048, 6144), (1, 8192, 0), (16, 512, 0), (1, 256, 3840))
# Heads, sequences, context, splits.
SWEEP = (
    ((32, 8, 128), 1, 1024, (8, 16, 32)), ((32, 8, 128), 8, 8192, (4, 8, 16)), ((32, 8, 128), 64, 4096, (1, 2)),
    ((32, 8, 128), 256, 1024, (1,)), ((32, 8, 128), 1, 32768, (33, 66, 132)), ((32, 8, 64), 64, 4096, (1,)),
    ((32, 8, 64), 1, 32768, (66, 132)),
)  # fmt: skip
WARPS, REGISTERS = (1, 2, 4), (None, 128)
# One item of 8 bits at a time on a multiprocessor, or two.
PROGRAMS = tuple(replace(FREE, **{what: 1e9}) for what in ("pair", "tile"))
PARTS = ("check", "decode", "prefix", "sweep", "prefill", "stage")
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


def check(seed: int, *, prefill: bool) -> str:
    """Compare all three ops, or two, with the reference on one random shape: a line, which says WRONG where it is."""
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
        shape = AttentionShape(heads, kv_heads, dim, 2, processors, kv_row_bytes(dim, 1))
        plan = plan_attention(rows, shared_lens.tolist(), block_size, shape, costs=FREE)
        if plan is not None:
            work = WorkList.allocate(len(lens), shape, torch.device("cuda")).fill(plan)
            exact = reference.paged_attention(q.double(), wide._replace(tables=tables, lens=shared_lens), scale)
            got = prefix_kernels.prefix_attention(q, pages._replace(tables=tables, lens=shared_lens), scale, work)
            found[f"prefix {processors}"] = error(got, exact)
    chunks = [0, 1, *(rng.randint(1, length) for length in lens[2:])]
    starts = torch.tensor([0, *chunks]).cumsum(0).int().cuda()
    q = torch.randn(sum(chunks), heads, dim, device="cuda").to(dtype)
    for window, capacity in ((None, 700), (150, sum(lens))) if prefill else ():
        exact = reference.prefill_attention(q.double(), wide._replace(window=window), starts, scale)
        got = chunked_prefill.prefill_attention(q, pages._replace(window=window), starts, scale, capacity=capacity)
        found[f"prefill {window} {capacity}"] = error(got, exact)
    worst = max(found, key=found.__getitem__)
    said = "WRONG " if found[worst] > TOLERANCE[dtype] else ""
    about = f"{heads}/{kv_heads} x {dim}, block {block_size}, {str(dtype)[6:]}"
    return f"{said}{about}: {len(found)} checks, the largest error {found[worst]:.1e} ({worst})"


def set_lanes(warps: int, registers: int | None) -> None:
    """Make 8-bit decode attention use these numbers of warps and registers."""
    decode_attention.lanes_tiling = lambda part: (32 * min(warps, 2), warps)
    attention_lanes.registers = lambda group: registers  # type: ignore[assignment,return-value]


def compile_sweep(heads: Heads, warps: int, registers: int | None) -> None:
    set_lanes(warps, registers)
    case = paged_attention(heads, 2, 512, in_8_bits=True)
    for splits in sorted({each for swept, _, _, choices in SWEEP if swept == heads for each in choices}):
        decode_attention.paged_attention(*case.inputs[0], num_splits=splits)


def compile_decode(heads: Heads, sizes: Sequence[tuple[int, ...]], in_8_bits: bool) -> None:
    for seqs, context in sizes:
        paged_attention(heads, seqs, context, in_8_bits=in_8_bits).launch()


def compile_prefix(heads: Heads, in_8_bits: bool) -> None:
    for size in ((32, 1024, 64), (256, 1024, 128)):  # tails in parts or not
        case = prefix_attention(heads, *size, in_8_bits)
        case.launch()
        decode_attention.paged_attention(*case.inputs[0][:3])


def compile_prefill(heads: Heads, in_8_bits: bool) -> None:
    for tokens in (4096, 512):
        q, pages, starts, scale = prefill_attention(heads, 1, tokens, 0, in_8_bits).inputs[0]
        for capacity in (0, tokens) if in_8_bits else (None,):
            chunked_prefill.prefill_attention(q, pages, starts, scale, capacity=capacity)


def tasks(parts: set[str]) -> Iterator[Callable[[], str | None]]:
    """Yield the checks and the kernels to compile ahead, the slowest first."""
    for seed in range(6) if "check" in parts else ():
        yield partial(check, seed, prefill="prefill" in parts)
    for heads, in_8_bits in product((HEADS[0], HEADS[2]), (True, False)):
        if "prefill" in parts:
            yield partial(compile_prefill, heads, in_8_bits)
        if "prefix" in parts:
            yield partial(compile_prefix, heads, in_8_bits)
    if "decode" in parts:
        for heads, in_8_bits in product(HEADS, (True, False)):
            yield partial(compile_decode, heads, DECODE, in_8_bits)
        for (heads, *size), in_8_bits in product(MORE, (True, False)):
            yield partial(compile_decode, heads, (tuple(size),), in_8_bits)
    if "sweep" in parts:
        for heads, warps, registers in product(sorted({each[0] for each in SWEEP}), WARPS, REGISTERS):
            yield partial(compile_sweep, heads, warps, registers)


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


def show_decode(limit: float) -> None:
    print("\ndecode                             16 bits   8 bits  ratio  8 bits TB/s   error")
    for heads, seqs, context in (*((h, *size) for h in HEADS for size in DECODE), *MORE):
        if late(limit):
            break
        plain, narrow = (paged_attention(heads, seqs, context, in_8_bits=form) for form in (False, True))
        a, b = by_turns(plain.launch, narrow.launch)
        rate = narrow.bytes / b * 1e-6
        print(f"{plain.shape:34} {a:7.1f}  {b:7.1f}  {b / a:5.2f}  {rate:11.2f}  {narrow.error():.1e}", flush=True)


def show_prefix(limit: float) -> None:
    print("\nprefix        16 bits: planned, plain;   8 bits: one item, two, planned, plain   ratio   error to decode")
    for heads, size in product((HEADS[0], HEADS[2]), PREFIX):
        if late(limit):
            break
        launches, planned = [], []
        for form in (False, True):
            each_costs = (*PROGRAMS, FREE) if form else (FREE,)
            cases = [prefix_attention(heads, *size, form, costs=costs) for costs in each_costs]
            planned.append(cases[-1])
            launches += [case.launch for case in cases]
            # Plain decode attention of so many shared bytes takes long: few launches tell enough.
            launches.append(partial(plain_decode, cases[-1]))
        times = by_turns(*launches, count=4)
        said = "  ".join(f"{each:7.1f}" for each in times)
        ratio = times[4] / times[0]
        print(f"{planned[0].shape:26} {said}  {ratio:5.2f}  {planned[1].error():.1e}", flush=True)


def plain_decode(case: Case, i: int) -> Tensor:
    return decode_attention.paged_attention(*case.inputs[i % len(case.inputs)][:3])


def show_prefill(limit: float) -> None:
    print("\nprefill                            16 bits   8 bits  ratio   error   in 8 bits, nothing unpacked ahead")
    for heads, size in product((HEADS[0], HEADS[2]), PREFILL):
        if late(limit):
            break
        plain, narrow = (prefill_attention(heads, *size, form) for form in (False, True))
        packed = partial(chunked_prefill.prefill_attention, *narrow.inputs[0], capacity=0)
        a, b, c = by_turns(plain.launch, narrow.launch, lambda _: packed(), count=4)  # noqa: B023
        print(f"{plain.shape:34} {a:7.1f}  {b:7.1f}  {b / a:5.2f}  {narrow.error():.1e}  {c:7.1f}", flush=True)


def show_stage(limit: float) -> None:
    print("\nto unpack a context alone")
    for heads, tokens in product((HEADS[0], HEADS[2]), (1024, 8192)):
        if late(limit):
            break
        q, pages, starts, _ = prefill_attention(heads, 1, tokens, 0, True).inputs[0]
        (a,) = by_turns(lambda _: stage(pages, starts, q.dtype, tokens))  # noqa: B023
        print(f"{heads} {tokens}: {a:.1f} us", flush=True)


def show_sweep(limit: float) -> None:
    print(f"\ndecode in 8 bits by splits, and warps {WARPS} x registers {REGISTERS}")
    for heads, seqs, context, choices in SWEEP:
        case = paged_attention(heads, seqs, context, in_8_bits=True)
        for splits in choices:
            if late(limit):
                break
            times = []
            for warps, registers in product(WARPS, REGISTERS):
                set_lanes(warps, registers)

                def launch(i: int, case: Case = case, splits: int = splits) -> Tensor:
                    return decode_attention.paged_attention(*case.inputs[i % len(case.inputs)], num_splits=splits)

                times.append(graph_microseconds(launch, 8, 5))
            said = "  ".join(f"{each:7.1f}" for each in times)
            print(f"{case.shape:34} {splits:4} {said}", flush=True)


SHOWN = {
    "decode": show_decode, "prefix": show_prefix, "prefill": show_prefill, "stage": show_stage, "sweep": show_sweep,
}  # fmt: skip


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 75.0
    parts = set(sys.argv[2:] or PARTS)
    workers = min(16, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for said in pool.imap_unordered(run_task, list(tasks(parts)), chunksize=1):
            if said is not None:
                print(said, flush=True)
    bandwidth = read_bandwidth(torch.device("cuda")) * 1e-12
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth:.2f} TB/s, ready after {time.time() - BEGIN:.0f} s",
        flush=True,
    )
    torch.manual_seed(0)
    for part in PARTS:
        if part in parts and part in SHOWN:
            SHOWN[part](limit)
    print(f"\n{time.time() - BEGIN:.0f} s")


if __name__ == "__main__":
    main()
