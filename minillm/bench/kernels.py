"""``kernels``, ``chunk-attention``, ``matvec``: measure ops on a GPU in bfloat16 on random data, without a model."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from minillm import kernels
from minillm.bench.meter import LoadLimits, read_bandwidth
from minillm.bench.ops import DEVICE, DTYPE, OPS, Case, paged_attention, prefix_attention, random
from minillm.bench.table import NoOptions, computed, shape, shown, word
from minillm.checks import integer
from minillm.errors import MinillmError, UsageError
from minillm.kernels.streams import copies_for_cold_l2, graph_microseconds
from minillm.model.shapes import SHAPES
from minillm.model.shard import shard_of

# For chunk-attention: number of sequences; (query heads, kv heads, head dimension); number of times during the
# generation of a completion at which attention is measured.
_SEQS, _HEADS, _POINTS = 32, (32, 32, 128), 4


@dataclass(frozen=True)
class KernelOptions(NoOptions):
    op: str | None = word(None, "measure only this op")


@dataclass(frozen=True)
class KernelResult:
    op: str = shown("op", width=22)
    shape: str = shown("shape", width=34)
    microseconds: float = shown("us", ".1f", width=7)
    bytes: int = shown("MB", ".1f", 1e-6, width=7)
    flops: int = shown("GFLOP", ".1f", 1e-9, width=7)
    bound: str = shown("limit", width=7)  # "memory" or "compute"
    fraction: float = shown("of it", ".0%", width=5)  # fraction of the copy bandwidth or of the matmul rate
    # relative error (norm) compared with a reference in float64; None if results cannot be compared
    error: float | None = shown("error", ".1e", width=8)


def measure(options: KernelOptions) -> dict[str, Any]:
    """Measure the GPU's bandwidth and matmul rate, then every op, or only the op named in ``options``.

    Raises UsageError if there is no such op, and MinillmError without a GPU.
    """
    if options.op is not None and options.op not in OPS:
        raise UsageError(f"unknown op {options.op!r}; known: {', '.join(OPS)}")
    if not torch.cuda.is_available():
        raise MinillmError("bench kernels needs a CUDA GPU, and torch finds none here")
    limits = LoadLimits.measure(DEVICE, 1 << 32)
    torch.manual_seed(0)
    cases = ((op, make(*sizes)) for op, (make, each) in OPS.items() if options.op in (None, op) for sizes in each)
    return {"limits": limits, "results": (_measure(op, case, limits) for op, case in cases)}


def _measure(op: str, case: Case, limits: LoadLimits) -> KernelResult:
    error = case.error()
    microseconds = graph_microseconds(case.launch, case.launches)
    needed = {"memory": case.bytes / limits.copy_bandwidth, "compute": case.flops / limits.matmul_rate}  # seconds
    bound = max(needed, key=needed.__getitem__)
    fraction = needed[bound] / (microseconds * 1e-6)
    return KernelResult(op, case.shape, microseconds, case.bytes, case.flops, bound, fraction, error)


@dataclass(frozen=True)
class ChunkAttentionResult:
    """Times of decode attention for one pair of prompt and completion length.

    Times are in microseconds per step, averaged over several points of the generation.
    """

    prompt: int = shown("prompt", "d")  # tokens, the same for all sequences
    completion: int = shown("completion", "d")  # tokens that each sequence generates
    copied: float = shown("copied us", ".1f")  # the paged kernel; each sequence has its own copy of the prompt
    shared: float = shown("shared us", ".1f")  # the paged kernel; all sequences share the prompt's blocks
    ours: float = shown("prefix us", ".1f")  # the prefix kernel; all sequences share the prompt's blocks

    @computed("speed-up", ".1f")
    def speedup(self) -> float:
        return self.copied / self.ours

    @computed("over shared", ".1f")
    def speedup_over_shared(self) -> float:
        return self.shared / self.ours


def chunks(options: NoOptions) -> Iterator[ChunkAttentionResult]:
    """Measure the settings of the table in section 4.1 of the ChunkAttention paper (Ye et al. 2024).

    Raises MinillmError without a GPU.
    """
    if not torch.cuda.is_available():
        raise MinillmError("bench chunk-attention needs a CUDA GPU, and torch finds none here")
    for prompt, completion in product((1024, 2048, 4096), (512, 2048)):
        points = [_attention(prompt, completion * (2 * i + 1) // (2 * _POINTS)) for i in range(_POINTS)]
        copied, shared, ours = map(statistics.mean, zip(*points, strict=True))
        yield ChunkAttentionResult(prompt, completion, copied, shared, ours)


def _attention(prompt: int, generated: int) -> list[float]:
    apart = paged_attention(_HEADS, _SEQS, prompt + generated)
    behind = prefix_attention(_HEADS, _SEQS, prompt, generated, planned_tail=1)

    def shared(i: int) -> torch.Tensor:
        return kernels.paged_attention(*behind.inputs[i % len(behind.inputs)][:3])

    return [graph_microseconds(launch, 8) for launch in (apart.launch, shared, behind.launch)]


@dataclass(frozen=True)
class MatvecOptions(NoOptions):
    shape: str = shape("smollm2-135m", "dimensions of this model")
    tokens: int = integer(1, 1, 1 << 16, help="tokens per matmul")
    tensor_parallel_size: int = integer(1, 1, 1 << 16, help="measure the shard of one of N ranks")


@dataclass(frozen=True)
class MatvecResult:
    """The times of one weight's matmul in microseconds, with a cold L2 cache."""

    op: str = shown("op")
    features: int = shown("features", "d")
    columns: int = shown("columns", "d")
    floor: float = shown("floor us", ".1f")
    cublas: float = shown("cuBLAS us", ".1f")  # without the norm, gate or addition that our kernel fuses
    ours: float = shown("ours us", ".1f")
    tile: tuple[int, int, int] = shown("tile", "d", width=12)  # (rows, columns, warps)
    recorded: tuple[int, int, int] | None = shown("recorded", "d", width=12)  # the tile in `matvec.TILES`


def tiles(options: MatvecOptions) -> Iterator[MatvecResult]:
    """Measure all sensible tile sizes for the five matmuls of a model, or of one rank's shard with tensor parallelism.

    Raises UsageError without a GPU, or if the matrix-vector kernel does not support this number of tokens.
    """
    if not torch.cuda.is_available():
        raise UsageError("bench matvec needs a GPU")
    whole, most = SHAPES[options.shape], kernels.matvec.MOST_TOKENS
    if options.tokens > most:
        raise UsageError(f"tokens must be at most {most}, not {options.tokens}: cuBLAS computes larger ones")
    c = shard_of(whole, 0, options.tensor_parallel_size).local(whole)
    bandwidth = read_bandwidth(DEVICE)
    for op, features, columns in (
        ("qkv", (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
        ("o", c.hidden_size, c.num_heads * c.head_dim),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size),
        ("down", c.hidden_size, c.intermediate_size),
        ("head", c.vocab_size, c.hidden_size),
    ):
        yield _product(op, features, columns, options.tokens, bandwidth)


def _product(op: str, features: int, columns: int, tokens: int, bandwidth: float) -> MatvecResult:
    size = features * columns * DTYPE.itemsize
    copies = copies_for_cold_l2(size)
    weights = [random(features, columns) * 0.02 for _ in range(copies)]
    x, gated, add = random(tokens, columns), op == "gate_up", op in ("o", "down")
    norm = None if add else (random(columns), 1e-5)
    out = random(tokens, features // 2 if gated else features)

    def launch(i: int, tile: tuple[int, int, int]) -> None:
        kernels.matvec.launch(out, x, weights[i % copies], None, norm, gated=gated, add=add, tile=tile)

    candidates = _tiles(columns, 2 if gated else 1, tokens)
    ours, tile = min((graph_microseconds(partial(launch, tile=tile), launches=12), tile) for tile in candidates)
    cublas = graph_microseconds(lambda i: functional.linear(x, weights[i % copies]))
    floor, recorded = size / bandwidth * 1e6, kernels.matvec.recorded_tile(tokens, features, columns)
    return MatvecResult(op, features, columns, floor, cublas, ours, tile, recorded)


def _tiles(columns: int, matrices: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    for rows, width, warps in product((2, 4, 8), (256, 512, 1024, 2048, 4096), (2, 4, 8)):
        per_thread = rows * width * matrices / (32 * warps)
        if width < 2 * columns and 8 <= per_thread <= (128 if tokens == 1 else 64):
            yield rows, width, warps
