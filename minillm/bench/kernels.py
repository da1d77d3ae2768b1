"""``kernels``: every op against the physical limit.

For each op and shape: microseconds (see `minillm.bench.timing`), the bytes and FLOPs that the op must move, the part of
the copy bandwidth or of the matmul rate measured in the same run that this amounts to, and the error against the
float64 reference. bfloat16, random data, shuffled block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minillm.bench.hardware import matmul_rate, read_bandwidth
from minillm.bench.registry import Workload
from minillm.bench.table import Column
from minillm.bench.timing import copies_for_cold_l2, graph_microseconds
from minillm.checks import check_fields, custom
from minillm.errors import MinillmError, UsageError
from minillm.kernels import reference

_DEVICE = torch.device("cuda")
_DTYPE = torch.bfloat16
HEAD_SHAPES = ((32, 8, 128), (32, 8, 64), (32, 32, 128))  # query heads, kv heads, head dimension
# Sequences, tokens that all of them share, tokens of each one's own.
SHARED_CASES = ((32, 1024, 64), (32, 2048, 64), (32, 4096, 64), (256, 1024, 128), (256, 2048, 128), (256, 8192, 128))
DECODE_CASES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 4096), (256, 1024))


@dataclass(frozen=True)
class KernelResult:
    """One op on one shape."""

    op: str
    shape: str
    microseconds: float
    bytes: int
    flops: int
    bound: str  # "memory" or "compute"
    fraction: float  # of the copy bandwidth or the matmul rate
    error: float | None  # relative error norm against float64; None where the result is not a number to compare

    COLUMNS: ClassVar = (
        Column("op", lambda r: r.op, width=22),
        Column("shape", lambda r: r.shape, width=34),
        Column("us", lambda r: r.microseconds, ".1f", width=7),
        Column("MB", lambda r: r.bytes / 1e6, ".1f", width=7),
        Column("GFLOP", lambda r: r.flops / 1e9, ".1f", width=7),
        Column("limit", lambda r: r.bound, width=7),
        Column("of it", lambda r: r.fraction, ".0%", width=5),
        Column("error", lambda r: r.error, ".1e", width=8),
    )


@dataclass(frozen=True)
class Case:
    """How to run one op on one shape."""

    op: str
    shape: str
    bytes: int
    flops: int
    launch: Callable[[int], Any]  # on copy i of the inputs
    check: Callable[[], float | None]
    launches: int = 24


@dataclass(frozen=True)
class Limits:
    """The ceilings of this machine, measured."""

    copy_bandwidth: float  # bytes per second, read and written
    matmul_rate: float  # FLOPs per second, bfloat16

    COLUMNS: ClassVar = (
        Column("copy, TB/s", lambda r: r.copy_bandwidth / 1e12, ".2f"),
        Column("bfloat16 products, TFLOP/s", lambda r: r.matmul_rate / 1e12, ".0f"),
    )


@dataclass(frozen=True)
class KernelsOptions:
    op: str | None = custom(None, lambda name, value: value, metavar="NAME", help="only this op")

    def __post_init__(self) -> None:
        check_fields(self)


def measure(options: KernelsOptions) -> dict[str, Any]:
    """The ceilings, then every op, or the one asked for."""
    limits = measure_limits()
    return {"limits": limits, "results": run(limits, options.op)}


def measure_limits() -> Limits:
    """Measure the ceilings.

    Raises:
        MinillmError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    return Limits(read_bandwidth(_DEVICE, 1 << 32), matmul_rate(_DEVICE))


def run(limits: Limits, only: str | None = None) -> Iterator[KernelResult]:
    """Measure all ops, or the one named.

    Raises:
        UsageError: there is no such op.
    """
    if only is not None and only not in OPS:
        raise UsageError(f"unknown op {only!r}; known: {', '.join(OPS)}")
    torch.manual_seed(0)
    for name, cases in OPS.items():
        if only in (None, name):
            for case in cases():
                yield _measure(case, limits)


def _measure(case: Case, limits: Limits) -> KernelResult:
    error = case.check()
    microseconds = graph_microseconds(case.launch, case.launches)
    memory = case.bytes / (microseconds * 1e-6) / limits.copy_bandwidth
    compute = case.flops / (microseconds * 1e-6) / limits.matmul_rate
    bound = "compute" if compute > memory else "memory"
    return KernelResult(case.op, case.shape, microseconds, case.bytes, case.flops, bound, max(memory, compute), error)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``|got - expected| / |expected|`` in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=_DEVICE, dtype=_DTYPE)


# --- the ops ----------------------------------------------------------------------------------------------------------


def _norms(op: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        from minillm.kernels import norm

        for rows, hidden in ((1, 4096), (64, 4096), (8192, 4096)):
            moved = (2 if op == "rms_norm" else 4) * rows * hidden * 2
            inputs = [(_random(rows, hidden), _random(rows, hidden)) for _ in range(copies_for_cold_l2(moved))]
            weight = _random(hidden)

            def launch(i: int, inputs: list = inputs, weight: Tensor = weight) -> tuple[Tensor, ...]:
                x, residual = inputs[i % len(inputs)]
                if op == "rms_norm":
                    return (norm.rms_norm(x, weight, 1e-5),)
                return norm.add_rms_norm(x, residual, weight, 1e-5)

            def check(inputs: list = inputs, weight: Tensor = weight, launch: Any = launch) -> float:
                x, residual = (tensor.double() for tensor in inputs[0])
                # The sum is rounded before the norm sees it: part of the contract, so the reference rounds too.
                total = x if op == "rms_norm" else (x + residual).to(_DTYPE).double()
                return relative_error(launch(0)[0], reference.rms_norm(total, weight.double(), 1e-5))

            yield Case(op, f"{rows} x {hidden}", moved, 0, launch, check)

    return cases


def _silu_mul() -> Iterator[Case]:
    from minillm.kernels.activation import silu_mul

    for rows, size in ((1, 14336), (64, 14336), (8192, 4096)):
        moved = 3 * rows * size * 2
        inputs = [_random(rows, 2 * size) for _ in range(copies_for_cold_l2(moved))]

        def launch(i: int, inputs: list[Tensor] = inputs) -> Tensor:
            return silu_mul(inputs[i % len(inputs)])

        def check(inputs: list[Tensor] = inputs) -> float:
            return relative_error(silu_mul(inputs[0]), reference.silu_mul(inputs[0].double()))

        yield Case("silu_mul", f"{rows} x {size}", moved, 0, launch, check)


def _rotary() -> Iterator[Case]:
    from minillm.kernels.rotary import rotary_write_kv

    heads, kv_heads, dim, block_size = 32, 8, 128, 16
    for tokens in (1, 64, 8192):
        moved = 2 * (heads + 2 * kv_heads) * dim * tokens * 2
        packed = [_random(tokens, heads + 2 * kv_heads, dim) for _ in range(copies_for_cold_l2(moved))]
        angles = torch.randn(tokens, dim // 2, device=_DEVICE)
        cos, sin = angles.cos(), angles.sin()
        num_blocks = max(64, 2 * tokens // block_size)
        caches = [torch.zeros(num_blocks, block_size, kv_heads, dim, device=_DEVICE, dtype=_DTYPE) for _ in range(2)]
        slots = torch.randperm(num_blocks * block_size, device=_DEVICE)[:tokens]

        def launch(
            i: int,
            packed: list = packed,
            cos: Tensor = cos,
            sin: Tensor = sin,
            caches: list = caches,
            slots: Tensor = slots,
        ) -> None:
            q, k, v = packed[i % len(packed)].split((heads, kv_heads, kv_heads), dim=1)
            rotary_write_kv(q, k, v, cos, sin, caches[0], caches[1], slots)

        def check(
            packed: list = packed,
            cos: Tensor = cos,
            sin: Tensor = sin,
            caches: list = caches,
            slots: Tensor = slots,
            go: Any = launch,
        ) -> float:
            k = packed[0][:, heads : heads + kv_heads].double()
            go(0)
            return relative_error(caches[0].flatten(0, 1)[slots], reference.rotary(k, cos, sin))

        yield Case("rotary_write_kv", f"{tokens} tokens, {heads}/{kv_heads} x {dim}", moved, 0, launch, check)


def _decode_inputs(heads: int, kv_heads: int, dim: int, seqs: int, context: int, block_size: int):  # type: ignore[no-untyped-def]
    """q, caches, tables ``[copies, seqs, blocks]`` over one shuffled pool, lengths, and the bytes of one launch."""
    blocks = context // block_size
    moved = seqs * context * kv_heads * dim * 2 * 2
    copies = copies_for_cold_l2(moved)
    k, v = (_random(copies * seqs * blocks, block_size, kv_heads, dim) for _ in range(2))
    tables = torch.randperm(copies * seqs * blocks, device=_DEVICE).int().view(copies, seqs, blocks)
    lens = torch.full((seqs,), context, device=_DEVICE, dtype=torch.int32)
    return _random(seqs, heads, dim), k, v, tables, lens, moved


def _decode_case(heads: int, kv_heads: int, dim: int, seqs: int, context: int, block_size: int, order: str) -> Case:
    from minillm.kernels.decode_attention import paged_attention

    q, k, v, tables, lens, moved = _decode_inputs(heads, kv_heads, dim, seqs, context, block_size)
    if order == "contiguous":
        tables = torch.arange(tables.numel(), device=_DEVICE).int().view_as(tables)
    scale = dim**-0.5

    def check() -> float:
        some = slice(0, min(seqs, 4))
        got = paged_attention(q, k, v, tables[0], lens, scale)
        wanted = tables[0][some].long()
        renumbered = torch.arange(wanted.numel(), device=_DEVICE).view_as(wanted)
        double = [cache[wanted.flatten()].double() for cache in (k, v)]  # not the whole pool
        exact, _ = reference.paged_attention(q[some].double(), double[0], double[1], renumbered, lens[some], scale)
        return relative_error(got[some], exact)

    name = f"{heads}/{kv_heads} x {dim}, B{seqs} c{context}, block {block_size}"
    return Case(
        "paged_attention",
        name + (" contiguous" if order == "contiguous" else ""),
        moved,
        4 * seqs * context * heads * dim,
        lambda i: paged_attention(q, k, v, tables[i % len(tables)], lens, scale),
        check,
        launches=24 if moved < 1 << 28 else 8,
    )


def _paged_attention() -> Iterator[Case]:
    for heads in HEAD_SHAPES:
        for seqs, context in DECODE_CASES:
            yield _decode_case(*heads, seqs, context, 16, "shuffled")
        for block_size in (1, 256):
            yield _decode_case(*heads, 64, 4096, block_size, "shuffled")
        yield _decode_case(*heads, 64, 4096, 16, "contiguous")


def shared_inputs(  # type: ignore[no-untyped-def]
    heads: int, kv_heads: int, dim: int, seqs: int, prefix: int, tail: int, *, planned_tail: int | None = None
):
    """q, k, v, tables ``[copies, seqs, blocks]``, lengths, a filled work list, and the bytes of one launch.

    Args:
        planned_tail: tokens of the tails when the plan was made; by default as now.
    """
    from minillm.kernels import AttentionShape, WorkList, plan_attention
    from minillm.kernels.prefix_plan import FREE

    block_size = 16
    shared, own = prefix // block_size, -(-tail // block_size)
    blocks = shared + seqs * own
    moved = blocks * block_size * kv_heads * dim * 2 * 2
    copies = min(24, copies_for_cold_l2(moved))
    k, v = (_random(copies * blocks, block_size, kv_heads, dim) for _ in range(2))
    ids = torch.randperm(copies * blocks, device=_DEVICE).int().view(copies, blocks)
    prefixes = ids[:, None, :shared].expand(copies, seqs, shared)
    tables = torch.cat((prefixes, ids[:, shared:].view(copies, seqs, own)), dim=2)
    processors = torch.cuda.get_device_properties(_DEVICE).multi_processor_count
    shape = AttentionShape(heads, kv_heads, dim, _DTYPE.itemsize, processors)
    then = prefix + (tail if planned_tail is None else planned_tail)
    plan = plan_attention(tables[0].tolist(), [then] * seqs, block_size, shape, costs=FREE)  # of every copy alike
    assert plan is not None
    work = WorkList.allocate(seqs, shape, _DEVICE)
    work.fill(plan)
    lens = torch.full((seqs,), prefix + tail, device=_DEVICE, dtype=torch.int32)
    return _random(seqs, heads, dim), k, v, tables, lens, work, moved


def _prefix_attention() -> Iterator[Case]:
    from minillm.kernels.decode_attention import paged_attention
    from minillm.kernels.prefix_decode_attention import prefix_attention

    for heads, kv_heads, dim in HEAD_SHAPES:
        for seqs, prefix, tail in SHARED_CASES:
            q, k, v, tables, lens, work, moved = shared_inputs(heads, kv_heads, dim, seqs, prefix, tail)

            def launch(i: int, arguments: Any = (q, k, v, tables, lens, work), dim: int = dim) -> Tensor:
                q, k, v, tables, lens, work = arguments
                return prefix_attention(q, k, v, tables[i % len(tables)], lens, dim**-0.5, work)

            def check(go: Any = launch, arguments: Any = (q, k, v, tables[0], lens, dim**-0.5)) -> float:
                return relative_error(go(0), paged_attention(*arguments))  # which float64 has checked

            name = f"{heads}/{kv_heads} x {dim}, B{seqs} {prefix}+{tail}"
            flops = 4 * seqs * (prefix + tail) * heads * dim
            yield Case("prefix_attention", name, moved, flops, launch, check)


def _prefill_attention() -> Iterator[Case]:
    from minillm.kernels.chunked_prefill import prefill_attention

    block_size = 16
    for heads, kv_heads, dim in HEAD_SHAPES:
        for chunks, cached in (((8192,), 0), ((2048,), 0), ((2048,), 6144), ((512,) * 16, 0), ((64,) * 32, 2048)):
            context = chunks[0] + cached
            blocks = -(-context // block_size)
            k, v = (_random(len(chunks) * blocks, block_size, kv_heads, dim) for _ in range(2))
            tables = torch.randperm(len(chunks) * blocks, device=_DEVICE).int().view(len(chunks), blocks)
            lens = torch.full((len(chunks),), context, device=_DEVICE, dtype=torch.int32)
            starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], device=_DEVICE, dtype=torch.int32)
            q = _random(sum(chunks), heads, dim)
            scale = dim**-0.5
            visible = sum(n * cached + n * (n + 1) // 2 for n in chunks)
            arguments = (k, v, tables, lens, starts, scale)

            def launch(i: int, q: Tensor = q, arguments: Any = arguments) -> Tensor:
                return prefill_attention(q, *arguments)

            def check(q: Tensor = q, arguments: Any = arguments) -> float:
                k, v, *rest = arguments
                got = prefill_attention(q, *arguments)
                one = [tensor[:, :, :1].double() for tensor in (k, v)]  # the first kv head's first query head
                return relative_error(got[:, :1], reference.prefill_attention(q[:, :1].double(), *one, *rest))

            yield Case(
                "prefill_attention",
                f"{heads}/{kv_heads} x {dim}, {len(chunks)} x {chunks[0]} after {cached}",
                (q.numel() * 2 + len(chunks) * context * kv_heads * dim * 2) * 2,
                4 * visible * heads * dim,
                launch,
                check,
                launches=8,
            )


def _blocks(op: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        from minillm.kernels import blocks

        layers, count, block = 32, 256, (16, 8, 128)
        pool = _random(layers, 2, 1024, *block)
        lists = [torch.randperm(1024, device=_DEVICE).view(2, -1)[:, :count].T.contiguous() for _ in range(4)]
        staging = _random(count, layers, 2, *block)
        launch = {
            "block_copy": lambda i: blocks.block_copy(pool, lists[i % 4]),
            "gather_blocks": lambda i: blocks.gather_blocks(pool, lists[i % 4][:, 0].contiguous(), staging),
            "scatter_blocks": lambda i: blocks.scatter_blocks(pool, lists[i % 4][:, 0].contiguous(), staging),
        }[op]

        def check() -> float:
            exact, exact_staging = pool.clone(), staging.clone()
            launch(0)
            arguments = (lists[0],) if op == "block_copy" else (lists[0][:, 0], exact_staging)
            getattr(reference, op)(exact, *arguments)
            return relative_error(pool, exact) + relative_error(staging, exact_staging)

        moved = 2 * count * layers * 2 * 16 * 8 * 128 * 2
        yield Case(op, f"{count} blocks of 16 x 8 x 128, {layers} layers", moved, 0, launch, check)

    return cases


def _sample() -> Iterator[Case]:
    from minillm.kernels.sampling import sample

    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.8, 0, 1.0, 0.0),
        "temperature + top-k": (0.8, 50, 1.0, 0.0),
        "temperature + top-k + top-p": (0.8, 50, 0.95, 0.0),
        "temperature + top-p": (0.8, 0, 0.95, 0.0),
        "temperature + min-p": (0.8, 0, 1.0, 0.05),
    }
    for rows, vocab in ((1, 128256), (64, 128256), (64, 49152)):
        moved = rows * vocab * 4
        logits = [torch.randn(rows, vocab, device=_DEVICE) * 3 for _ in range(min(8, copies_for_cold_l2(moved)))]
        for label, (temperature, top_k, top_p, min_p) in settings.items():
            rest = (
                torch.full((rows,), temperature, device=_DEVICE),
                torch.full((rows,), top_k, device=_DEVICE),
                torch.full((rows,), top_p, device=_DEVICE),
                torch.full((rows,), min_p, device=_DEVICE),
                torch.arange(rows, device=_DEVICE),
                torch.arange(rows, device=_DEVICE),
            )

            def launch(i: int, logits: list = logits, rest: tuple = rest) -> Any:
                return sample(logits[i % len(logits)], *rest)

            def check(logits: list = logits, rest: tuple = rest) -> float:
                tokens, logprobs = sample(logits[0], *rest)
                agree = (tokens == reference.sample(logits[0], *rest)).float().mean()
                exact = reference.log_probabilities(logits[0].double(), tokens)
                return relative_error(logprobs, exact) + float(1 - agree)

            yield Case(
                "sample",
                f"{rows} x {vocab}, {label}",
                moved,
                0,
                launch,
                check,
            )


def _top_log_probabilities() -> Iterator[Case]:
    from minillm.kernels.sampling import top_log_probabilities

    for rows, vocab, count in ((64, 128256, 8), (64, 128256, 64)):
        logits = [torch.randn(rows, vocab, device=_DEVICE) * 3 for _ in range(8)]

        def launch(i: int, logits: list = logits, count: int = count) -> Any:
            return top_log_probabilities(logits[i % 8], count)

        def check(logits: list = logits, count: int = count) -> float:
            got, ids = top_log_probabilities(logits[0], count)
            exact, exact_ids = reference.top_log_probabilities(logits[0].double(), count)
            return relative_error(got, exact) + float((ids != exact_ids).float().mean())

        yield Case(
            "top_log_probabilities",
            f"{rows} x {vocab}, best {count}",
            rows * vocab * 4,
            0,
            launch,
            check,
        )


OPS: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": _norms("rms_norm"),
    "add_rms_norm": _norms("add_rms_norm"),
    "silu_mul": _silu_mul,
    "rotary_write_kv": _rotary,
    "paged_attention": _paged_attention,
    "prefix_attention": _prefix_attention,
    "prefill_attention": _prefill_attention,
    "block_copy": _blocks("block_copy"),
    "gather_blocks": _blocks("gather_blocks"),
    "scatter_blocks": _blocks("scatter_blocks"),
    "sample": _sample,
    "top_log_probabilities": _top_log_probabilities,
}

WORKLOADS = {"kernels": Workload(KernelsOptions, measure)}
