"""The cases of ``minillm bench kernels``: for each op and shape, the inputs, a check of the result, bytes and FLOPs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import (
    AttentionShape,
    LayerCache,
    Pages,
    RotaryInputs,
    SamplingInputs,
    WorkList,
    plan_attention,
    reference,
)
from minillm.kernels.attention.plan import FREE, Costs
from minillm.kernels.streams import copies_for_cold_l2
from minillm.storage import kv_row_bytes

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
_BLOCK_SIZE = 16

Heads = tuple[int, int, int]  # query heads, kv heads, head dimension
_HEADS: tuple[Heads, ...] = ((32, 8, 128), (32, 8, 64), (32, 32, 128))


@dataclass(frozen=True)
class Case:
    """One op of `minillm.kernels` on one shape, with its inputs."""

    op: str
    shape: str
    inputs: list[tuple[Any, ...]]  # several sets of arguments; successive launches use them in turn
    bytes: int  # bytes that a launch reads and writes
    flops: int = 0  # floating-point operations of a launch
    launches: int = 24  # launches to time
    # Called with a function that launches the op on the first inputs. Returns the relative error. Without `check`,
    # `error` compares the whole result with the reference.
    check: Callable[[Callable[[], Any]], float] | None = None

    def launch(self, i: int = 0) -> Any:
        return getattr(kernels, self.op)(*self.inputs[i % len(self.inputs)])

    def error(self) -> float:
        """Return the relative error of one launch, compared with `minillm.kernels.reference` in float64."""
        if self.check is not None:
            return self.check(self.launch)
        double = (each.double() if isinstance(each, Tensor) else each for each in self.inputs[0])
        return _error(self.launch(), getattr(reference, self.op)(*double))


def random(*shape: int) -> Tensor:
    """Return normally distributed random numbers on the GPU, in bfloat16."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def _cache(num_blocks: int, block_size: int, kv_heads: int, dim: int, in_8_bits: bool) -> LayerCache:
    """Return a layer's cache with random K and V."""
    shape = (num_blocks, block_size, kv_heads, dim)
    if not in_8_bits:
        return LayerCache(random(*shape), random(*shape))
    k, v = (torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8) for _ in range(2))
    k_scales, v_scales = (0.01 + 0.01 * torch.rand(num_blocks, kv_heads, block_size, device=DEVICE) for _ in range(2))
    return LayerCache(k, v, k_scales, v_scales)


def _kv_bytes(tokens: int, kv_heads: int, dim: int, in_8_bits: bool) -> int:
    return 2 * tokens * kv_heads * kv_row_bytes(dim, 1 if in_8_bits else DTYPE.itemsize)


def _double(pages: Pages) -> Pages:
    """Convert K and V, or the scales of an 8-bit cache, to float64 for the reference."""
    if pages.k_scales is None or pages.v_scales is None:
        return pages._replace(k=pages.k.double(), v=pages.v.double())
    return pages._replace(k_scales=pages.k_scales.double(), v_scales=pages.v_scales.double())


def _copies(moved: int, *shape: int) -> list[Tensor]:
    """Return random tensors of ``shape``, one for each of several successive launches. A launch moves ``moved`` bytes.

    Together the tensors are larger than the L2 cache. So no tensor is still cached when its turn comes again.
    """
    return [random(*shape) for _ in range(copies_for_cold_l2(moved))]


def _error(got: Tensor, expected: Tensor) -> float:
    """Return ``|got - expected| / |expected|`` in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _rms_norm(rows: int, hidden: int) -> Case:
    moved, weight = 2 * rows * hidden * 2, random(hidden)
    inputs = [(x, weight, 1e-5) for x in _copies(moved, rows, hidden)]
    return Case("rms_norm", f"{rows} x {hidden}", inputs, moved)


def _silu_mul(rows: int, size: int) -> Case:
    moved = 3 * rows * size * 2
    return Case("silu_mul", f"{rows} x {size}", [(x,) for x in _copies(moved, rows, 2 * size)], moved)


def _rotary_write_kv(tokens: int, in_8_bits: bool = False) -> Case:
    heads, kv_heads, dim = _HEADS[0]
    moved = (2 * heads + 2 * kv_heads) * dim * tokens * 2 + _kv_bytes(tokens, kv_heads, dim, in_8_bits)
    packed = _copies(moved, tokens, heads + 2 * kv_heads, dim)
    angles = torch.randn(tokens, dim // 2, device=DEVICE)
    num_blocks = max(64, 2 * tokens // _BLOCK_SIZE)
    cache = _cache(num_blocks, _BLOCK_SIZE, kv_heads, dim, in_8_bits)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=DEVICE)[:tokens]
    rope = RotaryInputs(angles.cos(), angles.sin(), slots)
    inputs = [(*x.split((heads, kv_heads, kv_heads), dim=1), rope, cache) for x in packed]

    def check(launch: Callable[[], None]) -> float:
        k = packed[0][:, heads : heads + kv_heads].double()
        launch()
        got = cache.k.flatten(0, 1)[slots].double()
        if cache.k_scales is not None:
            got *= cache.k_scales.transpose(1, 2).flatten(0, 1)[slots][..., None]
        return _error(got, reference.rotary(k, rope.cos, rope.sin))

    name = f"{tokens} tokens, {heads}/{kv_heads} x {dim}{' int8' if in_8_bits else ''}"
    return Case("rotary_write_kv", name, inputs, moved, check=check)


def paged_attention(
    shape: Heads, seqs: int, context: int, block_size: int = 16, shuffled: bool = True, in_8_bits: bool = False
) -> Case:
    heads, kv_heads, dim = shape
    moved, scale = _kv_bytes(seqs * context, kv_heads, dim, in_8_bits), dim**-0.5
    blocks = context // block_size
    copies = copies_for_cold_l2(moved)
    num_blocks = copies * seqs * blocks
    q, cache = random(seqs, heads, dim), _cache(num_blocks, block_size, kv_heads, dim, in_8_bits)
    ids = torch.randperm(num_blocks, device=DEVICE) if shuffled else torch.arange(num_blocks, device=DEVICE)
    tables, lens = ids.int().view(copies, seqs, blocks), torch.full((seqs,), context, device=DEVICE, dtype=torch.int32)

    def check(launch: Callable[[], Tensor]) -> float:
        some = slice(0, min(seqs, 4))
        wanted = tables[0, some].long()
        renumbered = torch.arange(wanted.numel(), device=DEVICE).view_as(wanted)
        own = LayerCache(*(None if each is None else each[wanted.flatten()] for each in cache))  # type: ignore[arg-type]
        double = _double(own.pages(renumbered, lens[some]))
        return _error(launch()[some], reference.paged_attention(q[some].double(), double, scale))

    inputs = [(q, cache.pages(each, lens), scale) for each in tables]
    name = f"{heads}/{kv_heads} x {dim}, B{seqs} c{context}, block {block_size}{'' if shuffled else ' contiguous'}"
    name += " int8" if in_8_bits else ""
    launches = 24 if moved < 1 << 28 else 8
    return Case("paged_attention", name, inputs, moved, 4 * seqs * context * heads * dim, launches, check)


def prefix_attention(
    shape: Heads,
    seqs: int,
    prefix: int,
    tail: int,
    in_8_bits: bool = False,
    *,
    costs: Costs = FREE,
) -> Case:
    """Return the `Case` of attention for ``seqs`` sequences with a common prefix of ``prefix`` tokens.

    After the prefix, each sequence has ``tail`` own tokens.
    """
    heads, kv_heads, dim = shape
    shared, own = prefix // _BLOCK_SIZE, -(-tail // _BLOCK_SIZE)
    blocks = shared + seqs * own
    moved = _kv_bytes(blocks * _BLOCK_SIZE, kv_heads, dim, in_8_bits)
    copies = min(24, copies_for_cold_l2(moved))
    q, cache = random(seqs, heads, dim), _cache(copies * blocks, _BLOCK_SIZE, kv_heads, dim, in_8_bits)
    ids = torch.randperm(copies * blocks, device=DEVICE).int().view(copies, blocks)
    prefixes = ids[:, None, :shared].expand(copies, seqs, shared)
    tables = torch.cat((prefixes, ids[:, shared:].view(copies, seqs, own)), dim=2)
    chip = torch.cuda.get_device_properties(DEVICE)
    row = kv_row_bytes(dim, 1 if in_8_bits else DTYPE.itemsize)
    attention = AttentionShape(heads, kv_heads, dim, DTYPE.itemsize, chip.multi_processor_count, row)
    plan = plan_attention(tables[0].tolist(), [prefix + tail] * seqs, _BLOCK_SIZE, attention, costs=costs)
    assert plan is not None
    work = WorkList.allocate(seqs, attention, DEVICE).fill(plan)
    lens = torch.full((seqs,), prefix + tail, device=DEVICE, dtype=torch.int32)
    inputs = [(q, cache.pages(each, lens), dim**-0.5, work) for each in tables]

    def check(launch: Callable[[], Tensor]) -> float:
        return _error(launch(), kernels.paged_attention(*inputs[0][:3]))  # itself checked in float64

    name = f"{heads}/{kv_heads} x {dim}, B{seqs} {prefix}+{tail}{' int8' if in_8_bits else ''}"
    return Case("prefix_attention", name, inputs, moved, 4 * seqs * (prefix + tail) * heads * dim, check=check)


def prefill_attention(shape: Heads, n: int, chunk: int, cached: int, in_8_bits: bool = False) -> Case:
    heads, kv_heads, dim = shape
    context, scale = chunk + cached, dim**-0.5
    blocks = -(-context // _BLOCK_SIZE)
    q, cache = random(n * chunk, heads, dim), _cache(n * blocks, _BLOCK_SIZE, kv_heads, dim, in_8_bits)
    tables = torch.randperm(n * blocks, device=DEVICE).int().view(n, blocks)
    pages = cache.pages(tables, torch.full((n,), context, device=DEVICE, dtype=torch.int32))
    starts = torch.arange(0, n * chunk + 1, chunk, device=DEVICE, dtype=torch.int32)

    def check(launch: Callable[[], Tensor]) -> float:  # compares only the first query head of the first kv head
        one = pages._replace(k=pages.k[:, :, :1], v=pages.v[:, :, :1])
        if pages.k_scales is not None and pages.v_scales is not None:
            one = one._replace(k_scales=pages.k_scales[:, :1], v_scales=pages.v_scales[:, :1])
        return _error(launch()[:, :1], reference.prefill_attention(q[:, :1].double(), _double(one), starts, scale))

    name = f"{heads}/{kv_heads} x {dim}, {n} x {chunk} after {cached}{' int8' if in_8_bits else ''}"
    moved = 2 * q.nbytes + _kv_bytes(n * context, kv_heads, dim, in_8_bits)
    flops = 4 * n * (chunk * cached + chunk * (chunk + 1) // 2) * heads * dim
    return Case("prefill_attention", name, [(q, pages, starts, scale)], moved, flops, 8, check)


def _move_blocks(op: str) -> Case:
    layers, count, (_, kv_heads, dim) = 32, 256, _HEADS[0]
    pool = random(layers, 2, 1024, _BLOCK_SIZE, kv_heads, dim)
    staging = random(count, layers, 2, _BLOCK_SIZE, kv_heads, dim)
    lists = [torch.randperm(1024, device=DEVICE).view(2, -1)[:, :count].T.contiguous() for _ in range(4)]
    tensors = (pool,) if op == "block_copy" else (pool, staging)
    moves = lists if op == "block_copy" else [pairs[:, 0].contiguous() for pairs in lists]

    def check(launch: Callable[[], None]) -> float:
        exact = [each.clone() for each in tensors]
        launch()
        getattr(reference, op)(exact[0], moves[0], *exact[1:])
        return sum(map(_error, tensors, exact))

    name = f"{count} blocks of {_BLOCK_SIZE} x {kv_heads} x {dim}, {layers} layers"
    return Case(op, name, [(pool, each, *tensors[1:]) for each in moves], 2 * staging.nbytes, check=check)


_SETTINGS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "temperature + top-k": (0.8, 50, 1.0, 0.0),
    "temperature + top-k + top-p": (0.8, 50, 0.95, 0.0),
    "temperature + top-p": (0.8, 0, 0.95, 0.0),
    "temperature + min-p": (0.8, 0, 1.0, 0.05),
}


def _sample(size: tuple[int, int], label: str) -> Case:
    rows, vocab = size
    moved = rows * vocab * 4
    temperature, top_k, top_p, min_p = (torch.full((rows,), value, device=DEVICE) for value in _SETTINGS[label])
    counter = torch.arange(rows, device=DEVICE)
    how = SamplingInputs(temperature, top_k, top_p, min_p, counter, counter)
    inputs = [(torch.randn(size, device=DEVICE) * 3, how) for _ in range(min(8, copies_for_cold_l2(moved)))]

    def check(launch: Callable[[], tuple[Tensor, Tensor]]) -> float:
        logits, (tokens, logprobs) = inputs[0][0], launch()
        agree = (tokens == reference.sample(logits, how)).float().mean()
        return _error(logprobs, reference.log_probabilities(logits.double(), tokens)) + float(1 - agree)

    return Case("sample_with_logprobs", f"{rows} x {vocab}, {label}", inputs, moved, check=check)


def _top_log_probabilities(rows: int, vocab: int, count: int) -> Case:
    inputs = [(torch.randn(rows, vocab, device=DEVICE) * 3, count) for _ in range(8)]

    def check(launch: Callable[[], tuple[Tensor, Tensor]]) -> float:
        got, ids = launch()
        exact, exact_ids = reference.top_log_probabilities(inputs[0][0].double(), count)
        return _error(got, exact) + float((ids != exact_ids).float().mean())

    return Case("top_log_probabilities", f"{rows} x {vocab}, best {count}", inputs, rows * vocab * 4, check=check)


_FORMS = (False, True)  # whether the cache is in 8 bits
# Sizes for attention. Each begins with the number of sequences, followed by numbers of tokens. _PAGED: the context.
# _PREFIX: the shared prefix, each sequence's own part. _PREFILL: the chunk, the context before it.
_PAGED = tuple(
    (seqs, context, _BLOCK_SIZE, True)
    for seqs, context in (
        (1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 4096), (256, 1024),
    )
)  # fmt: skip
# The next two values of _PAGED and _PAGED_APART are the block size and whether the blocks are shuffled.
_PAGED_APART = ((64, 4096, 1), (64, 4096, 256), (64, 4096, 16, False))
_PREFIX = ((32, 1024, 64), (32, 2048, 64), (32, 4096, 64), (256, 1024, 128), (256, 2048, 128), (256, 8192, 128))
_PREFILL = ((1, 8192, 0), (1, 2048, 0), (1, 2048, 6144), (16, 512, 0), (32, 64, 2048))


# The name of an op -> a function that makes a case, and a tuple of its arguments for each case.
OPS: dict[str, tuple[Callable[..., Case], Iterable[tuple[Any, ...]]]] = {
    "rms_norm": (_rms_norm, ((1, 4096), (64, 4096), (8192, 4096))),
    "silu_mul": (_silu_mul, ((1, 14336), (64, 14336), (8192, 4096))),
    "rotary_write_kv": (_rotary_write_kv, list(product((1, 64, 8192), _FORMS))),
    "paged_attention": (
        paged_attention,
        [(heads, *size, form) for heads in _HEADS for size in _PAGED for form in _FORMS]
        + [(heads, *size) for heads in _HEADS for size in _PAGED_APART],
    ),
    "prefix_attention": (
        prefix_attention,
        [(heads, *size, form) for heads in _HEADS for size in _PREFIX for form in _FORMS],
    ),
    "prefill_attention": (
        prefill_attention,
        [(heads, *size, form) for heads in _HEADS for size in _PREFILL for form in _FORMS],
    ),
    **{op: (_move_blocks, ((op,),)) for op in ("block_copy", "gather_blocks", "scatter_blocks")},
    "sample": (_sample, list(product(((1, 128256), (64, 128256), (64, 49152)), _SETTINGS))),
    "top_log_probabilities": (_top_log_probabilities, ((64, 128256, 8), (64, 128256, 64))),
}
