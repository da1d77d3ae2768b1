"""Every Triton kernel against the reference in float64: in the interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shapes import DEVICE, DTYPES, ON_GPU, TOLERANCE, make_pool, randn, relative_error
from torch import Tensor

from minillm import kernels
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels import activation, blocks, matvec, norm, rotary, sampling, top_k
from minillm.kernels.chunked_prefill import prefill_attention
from minillm.kernels.decode_attention import num_splits_for, paged_attention

drawn = settings(
    max_examples=60 if ON_GPU else 12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
dtypes = st.sampled_from(DTYPES)
long = 5000 if ON_GPU else 70


# --- norms and activation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 33), (0, 8), (5, 4096), (2, 8191)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, hidden = shape
    x = randn(rows, hidden + 3, dtype=dtype)[:, :hidden]  # strided rows
    weight = randn(hidden, dtype=dtype)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_error(norm.rms_norm(x, weight, 1e-5), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (0, 8), (2, 1536), (7, 5000)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = randn(shape[0], 2 * shape[1] + 5, dtype=dtype)[:, : 2 * shape[1]]
    assert relative_error(activation.silu_mul(gate_up), reference.silu_mul(gate_up.double())) < TOLERANCE[dtype]


def test_norms_cast_as_llama_does() -> None:
    """Normalise in float32, round, then multiply: almost every bit as in transformers' module."""
    for dtype in (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,):
        x, weight = randn(4, 576, dtype=dtype), randn(576, dtype=dtype)
        variance = x.float().pow(2).mean(-1, keepdim=True)
        expected = (x.float() * torch.rsqrt(variance + 1e-5)).to(dtype) * weight
        got = norm.rms_norm(x, weight, 1e-5)
        # The order of the sum may move the variance by an ulp and with it a rounding here and there.
        assert (got != expected).float().mean() < 0.005


# --- rotary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 1, 1, 32, 32),
        (5, 9, 3, 64, 64),
        (3, 32, 8, 128, 128),
        (4, 6, 2, 80, 80),
        (4, 6, 2, 96, 64),
        (2, 17, 1, 256, 8),
    ],
)
def test_rotary_write_kv(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    packed = randn(tokens, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)
    q, k, v, _ = packed.clone().split((heads, kv_heads, kv_heads, 1), dim=1)
    angles = randn(tokens, rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    pool = make_pool([0], kv_heads, head_dim, dtype, 4)
    slots = torch.randperm(12, device=DEVICE)[:tokens]
    slots[tokens // 2] = -1
    exact_q = reference.rotary(q.double(), cos, sin)
    exact_k, exact_v = (torch.full_like(pool.k, float("nan"), dtype=torch.float64) for _ in range(2))
    reference.write_kv(reference.rotary(k.double(), cos, sin), v.double(), exact_k, exact_v, slots)
    rotary.rotary_write_kv(q, k, v, cos, sin, pool.k, pool.v, slots)
    assert relative_error(q, exact_q) < TOLERANCE[dtype]
    for got, exact in ((pool.k, exact_k), (pool.v, exact_v)):
        assert torch.equal(got.isnan(), exact.isnan()), "padding or a slot of nobody was written"
        if tokens > 1:
            assert relative_error(got[~got.isnan()], exact[~exact.isnan()]) < TOLERANCE[dtype]
    assert torch.equal(k, packed[:, heads : heads + kv_heads]), "k itself is left as it was"
    rotary.rotary_write_kv(q[:0], k[:0], v[:0], cos[:0], sin[:0], pool.k, pool.v, slots[:0])


# --- attention --------------------------------------------------------------------------------------------------------

HEADS = [(1, 1, 32), (9, 3, 64), (6, 1, 80), (5, 5, 96), (4, 2, 256), ((32, 8, 128) if ON_GPU else (8, 2, 128))]


def check_decode(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, lengths: list[int], splits: int | None, seed: int
) -> None:
    num_heads, kv_heads, head_dim = heads
    pool = make_pool(lengths, kv_heads, head_dim, dtype, block_size, seed=seed)
    q = randn(len(lengths), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]  # not contiguous
    scale = head_dim**-0.5
    exact = reference.paged_attention(q.double(), pool.k.double(), pool.v.double(), pool.tables, pool.lens, scale)
    out = paged_attention(q, pool.k, pool.v, pool.tables, pool.lens, scale, num_splits=splits)
    assert relative_error(out, exact) < TOLERANCE[dtype]
    assert not out[pool.lens == 0].any(), "an empty context gives zeros"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_paged_attention_at_the_edges_of_blocks(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    for block_size in (1, 4, 16, 256) if ON_GPU else (1, 16):
        lengths = [1, block_size, block_size + 1, 0, 2 * block_size - 1, 37]
        lengths += [4095] if ON_GPU else []
        check_decode(dtype, heads, block_size, lengths, None, 1)


@drawn
@given(
    dtype=dtypes,
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    lengths=st.lists(st.integers(0, long), min_size=1, max_size=5),
    splits=st.sampled_from([None, 1, 2, 3, 7, 16]),
    seed=st.integers(0, 99),
)
def test_paged_attention(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    lengths: list[int],
    splits: int | None,
    seed: int,
) -> None:
    check_decode(dtype, heads, block_size, lengths, splits, seed)


def test_tables_that_several_sequences_share() -> None:
    pool = make_pool([23, 23, 23], 2, 64, torch.float32, 4)
    shared = pool.tables.clone()
    shared[1, :5], shared[2, :3] = shared[0, :5], shared[0, :3]
    q = randn(3, 4, 64)
    exact = reference.paged_attention(q.double(), pool.k.double(), pool.v.double(), shared, pool.lens, 0.1)
    got = paged_attention(q, pool.k, pool.v, shared, pool.lens, 0.1)
    assert relative_error(got, exact) < 1e-5


def test_an_empty_batch_launches_nothing() -> None:
    pool = make_pool([4], 2, 64, torch.float32, 4)
    q = randn(0, 4, 64)
    out = paged_attention(q, pool.k, pool.v, pool.tables[:0], pool.lens[:0], 0.1)
    assert out.shape == (0, 4, 64)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert prefill_attention(q, pool.k, pool.v, pool.tables[:0], pool.lens[:0], starts, 0.1).shape == (0, 4, 64)


def check_prefill(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, chunks: list[tuple[int, int]], seed: int
) -> None:
    """``chunks`` lists (tokens of the chunk, tokens cached before it)."""
    num_heads, kv_heads, head_dim = heads
    lengths = [count + cached if count else cached for count, cached in chunks]
    pool = make_pool(lengths, kv_heads, head_dim, dtype, block_size, seed=seed)
    counts = [count for count, _ in chunks]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q = randn(sum(counts), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    arguments = (pool.tables, pool.lens, starts, head_dim**-0.5)
    exact = reference.prefill_attention(q.double(), pool.k.double(), pool.v.double(), *arguments)
    assert relative_error(prefill_attention(q, pool.k, pool.v, *arguments), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_attention_of_mixed_chunks(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    chunks = [(1, 0), (5, 0), (16, 24), (0, 9), (66, 1), (1, 40)]
    chunks += [(1000, 0), (130, 3000), (4095, 0)] if ON_GPU else []
    for block_size in (1, 4, 16, 256) if ON_GPU else (16,):
        check_prefill(dtype, heads, block_size, chunks, 2)


@drawn
@given(
    dtype=dtypes,
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([1, 2, 8, 16, 64, 256]),
    chunks=st.lists(st.tuples(st.integers(0, long // 2), st.integers(0, long // 2)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_prefill_attention(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, chunks: list[tuple[int, int]], seed: int
) -> None:
    if sum(count for count, _ in chunks):
        check_prefill(dtype, heads, block_size, chunks, seed)


# --- blocks -----------------------------------------------------------------------------------------------------------


@drawn
@given(
    dtype=dtypes,
    layers=st.integers(1, 3),
    block=st.sampled_from([(1, 1, 2), (4, 2, 8), (16, 3, 64), (16, 8, 128), (256, 1, 32)]),
    seed=st.integers(0, 99),
)
def test_blocks_move_whole_and_alone(dtype: torch.dtype, layers: int, block: tuple[int, int, int], seed: int) -> None:
    rng = random.Random(seed)
    pool = randn(layers, 2, 7, *block, dtype=dtype)
    ids = rng.sample(range(7), 7)
    copies = torch.tensor(
        [[ids[0], ids[1]], [ids[0], ids[2]], [ids[3], ids[4]]][: rng.randint(0, 3)], dtype=torch.int64
    )
    copies = copies.view(-1, 2).to(DEVICE)
    expected = pool.clone()
    reference.block_copy(expected, copies)
    blocks.block_copy(pool, copies)
    assert torch.equal(pool, expected)
    chosen = torch.tensor(ids[: rng.randint(0, 5)], dtype=torch.int64, device=DEVICE)
    staging, expected_staging = (torch.zeros(6, layers, 2, *block, dtype=dtype, device=DEVICE) for _ in range(2))
    reference.gather_blocks(pool, chosen, expected_staging)
    blocks.gather_blocks(pool, chosen, staging)
    assert torch.equal(staging, expected_staging)
    target, expected_target = torch.zeros_like(pool), torch.zeros_like(pool)
    reference.scatter_blocks(expected_target, chosen, staging)
    blocks.scatter_blocks(target, chosen, staging)
    assert torch.equal(target, expected_target)


@pytest.mark.gpu
def test_blocks_move_to_and_from_pinned_host_memory() -> None:
    pool = randn(4, 2, 9, 16, 2, 64, dtype=torch.bfloat16)
    ids = torch.tensor([7, 2, 5], device=DEVICE)
    staging = torch.empty(3, 4, 2, 16, 2, 64, dtype=torch.bfloat16, pin_memory=True)
    blocks.gather_blocks(pool, ids, staging)
    torch.cuda.synchronize()
    assert torch.equal(staging, pool[:, :, ids].movedim(2, 0).cpu())
    target = torch.zeros_like(pool)
    blocks.scatter_blocks(target, ids, staging)
    torch.cuda.synchronize()
    assert torch.equal(target[:, :, ids], pool[:, :, ids])
    assert not target[:, :, [0, 1, 3, 4, 6, 8]].any()


# --- sampling ---------------------------------------------------------------------------------------------------------


def parameters(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Random settings per row: greedy, plain, every cut alone and together."""

    def some(probability: float) -> Tensor:
        return torch.rand(rows, generator=generator) < probability

    temperature = torch.rand(rows, generator=generator) * 2 * some(0.85)
    top_k = torch.randint(1, 60, (rows,), generator=generator) * some(0.4)
    top_p = torch.where(some(0.4), torch.rand(rows, generator=generator), 1.0).clamp(min=1e-3)
    min_p = torch.rand(rows, generator=generator) * some(0.2)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    return tuple(tensor.to(DEVICE) for tensor in (temperature, top_k, top_p, min_p, seeds, positions))


@pytest.mark.parametrize("vocab", [1, 7, 32, 50, 5000, *([49152, 128256] if ON_GPU else [])])
@pytest.mark.parametrize("grid", [None, 0.5], ids=["distinct", "many-ties"])
def test_sampling_draws_what_the_reference_draws(vocab: int, grid: float | None) -> None:
    generator = torch.Generator().manual_seed(vocab)
    different = total = 0
    for spread in (0.1, 3.0, 30.0):
        rows = 64 if ON_GPU else 6
        logits = torch.randn(rows, vocab + 1, generator=generator)[:, :vocab] * spread  # strided rows
        if grid:
            logits = (logits / grid).round() * grid
        if vocab > 7:
            logits[:, 3] = float("-inf")
        logits = logits.to(DEVICE)
        settings = parameters(rows, generator)
        tokens, logprobs = sampling.sample(logits, *settings)
        expected = reference.sample(logits, *settings)
        different += int((tokens != expected).sum())
        total += rows
        exact = reference.log_probabilities(logits.double(), tokens)
        assert (logprobs - exact).abs().max() < 1e-4
        assert ((tokens >= 0) & (tokens < vocab)).all()
        if vocab > 7:
            assert (tokens != 3).all(), "a forbidden token was drawn"
    # A cut by mass can fall on either side of a token where two sums differ in the last bit.
    assert different <= total // 100


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (1000, 1.0), (3000, 0.8), (0, 0.999), (0, 1e-6), (5000, 1.0), (0, 0.5)]
)
def test_cuts_that_the_candidates_cannot_decide(top_k: int, top_p: float) -> None:
    rows, vocab = (8, 128256) if ON_GPU else (2, 6000)
    generator = torch.Generator().manual_seed(top_k)
    full = torch.full((rows,), 1.0, device=DEVICE)
    for logits in (
        torch.randn(rows, vocab, generator=generator) * 0.01,  # nearly flat
        torch.zeros(rows, vocab),  # all equal
        torch.randn(rows, vocab, generator=generator).round(),
    ):
        logits = logits.to(DEVICE)
        settings = (
            full,
            torch.full((rows,), top_k, device=DEVICE),
            full * top_p,
            full * 0,
            torch.arange(rows, device=DEVICE),
            torch.arange(rows, device=DEVICE) + 9,
        )
        tokens, _ = sampling.sample(logits, *settings)
        expected = reference.sample(logits, *settings)
        kept = reference_support(logits, top_k, top_p)
        assert all(bool(kept[row, token]) for row, token in enumerate(tokens.tolist()))
        assert (tokens != expected).sum() <= 1


def reference_support(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """A little more than what may be drawn: sums of float32 decide the last token either way."""
    values, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = rank < (top_k or logits.shape[1])
    weights = values.softmax(-1) * kept
    weights /= weights.sum(-1, keepdim=True)
    kept = kept & ((weights.cumsum(-1) - weights < top_p + 1e-5) | (rank == 0))
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, kept)


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (50, 50), (300, 16), (5000, 7), (6000, 200)])
def test_top_log_probabilities(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(3, vocab, generator=generator) * 3
    for logits in (normal, normal.round(), normal * 0, torch.where(normal > 0, normal, float("-inf"))):
        logits = logits.to(DEVICE)
        if not bool(torch.isfinite(logits).any(-1).all()):
            continue
        logprobs, ids = top_k.top_log_probabilities(logits, count)
        exact, exact_ids = reference.top_log_probabilities(logits.double(), count)
        finite = torch.isfinite(exact)
        assert torch.equal(ids[finite], exact_ids[finite])
        assert (logprobs[finite] - exact[finite]).abs().max() < 1e-4
    assert top_k.top_log_probabilities(normal[:0].to(DEVICE), count)[0].shape == (0, count)


# --- contracts --------------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bits_ten_times() -> None:
    pool = make_pool([300, 64, 17], 2, 64, torch.float16, 16)
    q, chunk = randn(3, 8, 64, dtype=torch.float16), randn(40, 8, 64, dtype=torch.float16)
    starts = torch.tensor([0, 20, 30, 40], dtype=torch.int32, device=DEVICE)
    logits = randn(3, 1000)
    settings = parameters(3, torch.Generator().manual_seed(0))
    x, weight = randn(5, 576, dtype=torch.float16), randn(576, dtype=torch.float16)

    def everything() -> list[Tensor]:
        return [
            paged_attention(q, pool.k, pool.v, pool.tables, pool.lens, 0.1, num_splits=5),
            prefill_attention(chunk, pool.k, pool.v, pool.tables, pool.lens, starts, 0.1),
            norm.rms_norm(x, weight, 1e-5),
            *sampling.sample(logits, *settings),
            *top_k.top_log_probabilities(logits, 9),
        ]

    first = everything()
    for _ in range(10 if ON_GPU else 2):
        for got, expected in zip(everything(), first, strict=True):
            assert torch.equal(got, expected)


def test_splits_follow_from_shapes_alone() -> None:
    for seqs in (1, 8, 64, 256):
        for kv_heads in (1, 8, 32):
            splits = num_splits_for(seqs, kv_heads, 8192, DEVICE)
            assert 1 <= splits <= 128
    assert num_splits_for(1, 1, 64, DEVICE) == 1


BAD: list[tuple[str, Any]] = [
    ("rows", lambda: norm.rms_norm(randn(4, 4).T, randn(4), 1e-5)),
    ("weight", lambda: norm.rms_norm(randn(4, 4), randn(5), 1e-5)),
    ("weight", lambda: norm.rms_norm(randn(4, 4), randn(4, dtype=torch.float16), 1e-5)),
    ("size", lambda: activation.silu_mul(randn(4, 5))),
    ("contiguous", lambda: blocks.block_copy(randn(2, 2, 4, 4, 2, 8).transpose(3, 4), torch.zeros(0, 2))),
    ("staging", lambda: blocks.gather_blocks(randn(2, 2, 4, 4, 2, 8), torch.zeros(3).long(), randn(2, 2, 2, 4, 2, 8))),
    ("floating", lambda: sampling.sample(torch.zeros(2, 8, dtype=torch.int32, device=DEVICE), *[randn(2)] * 6)),
    ("temperature", lambda: sampling.sample(randn(2, 8), *[randn(3)] * 6)),
    ("count", lambda: top_k.top_log_probabilities(randn(2, 8), 9)),
    ("count", lambda: top_k.top_log_probabilities(randn(2, 800), 0)),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_attention_refuses_what_does_not_fit() -> None:
    pool = make_pool([5, 6], 2, 64, torch.float32, 4)
    q = randn(2, 4, 64)
    wrong: list[tuple[str, dict[str, Tensor]]] = [
        ("does not fit", {"q": randn(2, 3, 64)}),
        ("does not fit", {"q": randn(2, 4, 32)}),
        ("does not fit", {"q": randn(2, 4, 64, dtype=torch.float16)}),
        ("power of two", {"k_cache": randn(4, 3, 2, 64), "v_cache": randn(4, 3, 2, 64)}),
        ("contiguous", {"k_cache": pool.k.transpose(0, 1)}),
        ("int32", {"block_tables": pool.tables.long()}),
        ("rows", {"context_lens": pool.lens[:1]}),
    ]
    for said, changes in wrong:
        fitting = {"q": q, "k_cache": pool.k, "v_cache": pool.v, "block_tables": pool.tables, "context_lens": pool.lens}
        arguments: Any = {**fitting, **changes, "softmax_scale": 0.1}
        with pytest.raises(ValueError, match=said):
            paged_attention(**arguments)


@pytest.mark.gpu
def test_a_pool_beyond_2_to_the_31_elements() -> None:
    """Blocks near the end of a pool of more than 2^31 elements: every kernel that indexes it, against a small pool."""
    block_size, kv_heads, dim, heads = 16, 8, 128, 32
    num_blocks = (1 << 31) // (block_size * kv_heads * dim) + 64
    big_k, big_v = (
        torch.empty(num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"
    )
    assert big_k.numel() > 1 << 31
    small = make_pool([100], kv_heads, dim, torch.bfloat16, block_size)
    last = torch.arange(num_blocks - 7, num_blocks, dtype=torch.int32, device=DEVICE)[None]
    own = small.tables[0, :7].long()
    big_k[last[0].long()], big_v[last[0].long()] = small.k[own], small.v[own]
    q = randn(1, heads, dim, dtype=torch.bfloat16)
    expected = paged_attention(q, small.k, small.v, small.tables, small.lens, 0.1)
    got = paged_attention(q, big_k, big_v, last, small.lens, 0.1)
    assert torch.equal(got, expected)
    chunk = randn(50, heads, dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 50], dtype=torch.int32, device=DEVICE)
    expected = prefill_attention(chunk, small.k, small.v, small.tables, small.lens, starts, 0.1)
    assert torch.equal(prefill_attention(chunk, big_k, big_v, last, small.lens, starts, 0.1), expected)
    k, v = (randn(1, kv_heads, dim, dtype=torch.bfloat16) for _ in "kv")
    slot = torch.tensor([num_blocks * block_size - 1], device=DEVICE)
    rotary.rotary_write_kv(
        q, k, v, torch.ones(1, dim // 2, device=DEVICE), torch.zeros(1, dim // 2, device=DEVICE), big_k, big_v, slot
    )
    assert torch.equal(big_k[-1, -1], k[0])
    assert torch.equal(big_v[-1, -1], v[0])
    del big_k, big_v
    pool = torch.empty(2, 2, num_blocks // 4 + 1, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 1 << 31
    pool[:, :, 0] = randn(2, 2, block_size, kv_heads, dim, dtype=torch.bfloat16)
    end = pool.shape[2] - 1
    blocks.block_copy(pool, torch.tensor([[0, end]], device=DEVICE))
    assert torch.equal(pool[:, :, end], pool[:, :, 0])
    staging = torch.zeros(1, 2, 2, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    blocks.gather_blocks(pool, torch.tensor([end], device=DEVICE), staging)
    assert torch.equal(staging[0], pool[:, :, 0])
    blocks.scatter_blocks(pool, torch.tensor([end - 1], device=DEVICE), staging)
    assert torch.equal(pool[:, :, end - 1], pool[:, :, 0])


# --- matrix-vector products -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "features", "columns"),
    [
        *((1, *shape) for shape in ((2, 1), (34, 33), (960, 576), (70, 2100))),
        *((tokens, *shape) for tokens in (2, 3, 4) for shape in ((2, 1), (34, 33))),
        (3, 22, 2100),
        *([(n, *shape) for n in (1, 2, 4) for shape in ((960, 576), (4096, 14336))] if ON_GPU else []),
    ],
)
def test_matvec(dtype: torch.dtype, bias: bool, tokens: int, features: int, columns: int) -> None:
    x, norm_weight = randn(tokens, columns, dtype=dtype), randn(columns, dtype=dtype)
    weight = randn(features, columns, dtype=dtype) / columns**0.5
    offset = randn(features, dtype=dtype) if bias else None
    residual = randn(tokens, features, dtype=dtype)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.norm_matvec(x, norm_weight, 1e-5, weight, offset), exact) < TOLERANCE[dtype]
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.norm_gated_matvec(x, norm_weight, 1e-5, weight, offset), exact) < TOLERANCE[dtype]
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    out = residual.clone()
    assert matvec.matvec_add(x, weight, offset, out) is out
    assert relative_error(out, exact) < TOLERANCE[dtype]
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(matvec.matvec(x, weight, offset), exact) < TOLERANCE[dtype]


def test_a_matvec_of_a_few_tokens_is_that_of_each() -> None:
    """To the bit: what a sequence says does not depend on its neighbours."""
    x, norm_weight = randn(3, 600, dtype=torch.bfloat16), randn(600, dtype=torch.bfloat16)
    weight, residual = randn(22, 600, dtype=torch.bfloat16), randn(3, 22, dtype=torch.bfloat16)
    for padded in (x[:3], torch.cat((x, x[:1]))):
        rows = matvec.norm_matvec(padded, norm_weight, 1e-5, weight)
        assert torch.equal(rows[:3], matvec.norm_matvec(x, norm_weight, 1e-5, weight))
    turned = matvec.matvec_add(x[[2, 0, 1]], weight, None, residual[[2, 0, 1]])
    assert torch.equal(turned[[1, 2, 0]], matvec.matvec_add(x, weight, None, residual.clone()))


def test_a_matvec_refuses_what_it_would_get_wrong() -> None:
    weight, x = randn(8, 6, dtype=torch.float32), randn(4, 6, dtype=torch.float32)
    for wrong in (
        randn(5, 6),
        randn(0, 6),
        randn(2, 7),
        randn(6, 4).t()[:, :6],
        randn(2, 6).bfloat16(),
        randn(2, 12)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"up to \[4, 6\]"):
            matvec.matvec(wrong.to(DEVICE), weight)
    with pytest.raises(ValueError, match="contiguous"):
        matvec.matvec_add(x, weight, None, randn(8, 4).t())
    with pytest.raises(ValueError, match="contiguous"):
        matvec.norm_matvec(x, x[0].clone(), 1e-5, weight, out=randn(4, 16)[:, :8])


def test_a_few_tokens_of_a_large_weight_are_left_to_cublas() -> None:
    def takes(tokens: int, features: int, columns: int) -> bool:
        return matvec.takes(tokens, torch.empty(features, columns, device="meta"))

    assert takes(1, 128256, 4096)
    assert takes(2, 4096, 4096)
    assert takes(4, 3072, 576)
    assert not takes(2, 6144, 4096)
    assert not takes(4, 2048, 2048)
    assert not takes(5, 16, 16)
    assert not takes(0, 16, 16)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_are_their_parts(rows: int, bias: bool) -> None:
    """Whatever the batch size chooses, the ops that the model calls are the reference's."""
    x, norm_weight, residual = (randn(*shape, dtype=torch.float32) for shape in ((rows, 48), (48,), (rows, 34)))
    weight, offset = randn(34, 48, dtype=torch.float32), randn(34, dtype=torch.float32) if bias else None
    linear = kernels.LinearWeight(weight, offset)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    out = torch.empty(rows, 34, device=DEVICE)
    assert relative_error(kernels.norm_linear(x, norm_weight, 1e-5, linear), exact) < 1e-5
    assert relative_error(kernels.norm_linear(x, norm_weight, 1e-5, linear, out), exact) < 1e-5
    assert relative_error(out, exact) < 1e-5
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(kernels.norm_gated_linear(x, norm_weight, 1e-5, linear), exact) < 1e-5
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    assert kernels.linear_add(x, linear, residual) is residual
    assert relative_error(residual, exact) < 1e-5
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(kernels.linear(x, linear), exact) < 1e-5
