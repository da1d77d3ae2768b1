"""Rotary embedding, and the write of K and V to their blocks."""

from __future__ import annotations

import pytest
import torch

from lib.kernels import DEVICE, DTYPES, TOLERANCE, make_pool, randn, relative_error
from minillm.kernels import HeadNorms, LayerCache, RotaryInputs, reference

pytest.importorskip("triton")
from minillm.kernels.cache import rotary


def norms_of(head_dim: int, dtype: torch.dtype, normed: str) -> HeadNorms | None:
    if not normed:
        return None
    return HeadNorms(randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype), 1e-5, normed == "after")


@pytest.mark.parametrize("normed", ["", "before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 1, 1, 32, 32),
        (5, 9, 3, 64, 64),
        (3, 32, 8, 128, 128),
        (4, 6, 2, 80, 80),
        (4, 6, 2, 96, 64),
        (4, 6, 2, 96, 96),
        (2, 17, 1, 256, 8),
    ],
)
def test_rotary_write_kv(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, normed: str
) -> None:
    norms = norms_of(head_dim, dtype, normed)
    exact_norms = norms and norms._replace(q=norms.q.double(), k=norms.k.double())
    packed = randn(tokens, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)
    q, k, v, _ = packed.clone().split((heads, kv_heads, kv_heads, 1), dim=1)
    angles = randn(tokens, rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    pool = make_pool([0], kv_heads, head_dim, dtype, 4)
    slots = torch.randperm(12, device=DEVICE)[:tokens]
    slots[tokens // 2] = -1
    exact_q, exact_k, exact_v = q.double(), *(torch.full_like(pool.k, float("nan"), dtype=torch.float64) for _ in "kv")
    rope = RotaryInputs(cos, sin, slots)
    if normed and rotary_dim < head_dim:
        with pytest.raises(ValueError, match="all of a head"):
            rotary.rotary_write_kv(q, k, v, rope, LayerCache(pool.k, pool.v), norms)
        return
    reference.rotary_write_kv(exact_q, k.double(), v.double(), rope, LayerCache(exact_k, exact_v), exact_norms)
    rotary.rotary_write_kv(q, k, v, rope, LayerCache(pool.k, pool.v), norms)
    assert relative_error(q, exact_q) < TOLERANCE[dtype]
    for got, exact in ((pool.k, exact_k), (pool.v, exact_v)):
        assert torch.equal(got.isnan(), exact.isnan()), "padding or a slot of nobody was written"
        if tokens > 1:
            assert relative_error(got[~got.isnan()], exact[~exact.isnan()]) < TOLERANCE[dtype]
    assert torch.equal(k, packed[:, heads : heads + kv_heads]), "k itself is left as it was"
    rotary.rotary_write_kv(q[:0], k[:0], v[:0], RotaryInputs(cos[:0], sin[:0], slots[:0]), LayerCache(pool.k, pool.v))


@pytest.mark.parametrize("normed", ["", "before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(9, 3, 64, 64), (6, 2, 80, 80), (6, 2, 96, 64), (17, 1, 256, 8)]
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_are_rounded_as_the_reference_rounds_them(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, normed: str, block_size: int
) -> None:
    """Bit for bit what `quantize_rows` makes of the rows that a cache of q's dtype gets, zeros and NaN among them."""
    if normed and rotary_dim < head_dim:
        return
    tokens = 7
    norms = norms_of(head_dim, dtype, normed)
    packed = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype) * 10 ** randn(tokens, 1, 1).to(dtype)
    packed[1, heads:] = 0
    packed[2, heads, 3] = packed[2, heads + kv_heads, head_dim - 1] = float("nan")
    packed[3, heads, 5] = packed[3, heads + kv_heads, 0] = float("inf")
    angles = randn(tokens, rotary_dim // 2)
    slots = torch.randperm(24, device=DEVICE)[:tokens]
    slots[5] = -1
    rope = RotaryInputs(angles.cos(), angles.sin(), slots)
    count = 24 // block_size
    caches = [torch.zeros(count, block_size, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    levels = [torch.full(caches[0].shape, 99, dtype=torch.int8, device=DEVICE) for _ in "kv"]
    scales = [torch.full((count, kv_heads, block_size), 99.0, device=DEVICE) for _ in "kv"]
    for cache in (LayerCache(*caches), LayerCache(*levels, *scales)):
        q, k, v = packed.clone().split((heads, kv_heads, kv_heads), dim=1)
        rotary.rotary_write_kv(q, k, v, rope, cache, norms)
    written = slots[slots >= 0]
    others = torch.tensor([slot for slot in range(24) if slot not in written.tolist()], device=DEVICE)
    for rows, got, factors in zip(caches, levels, scales, strict=True):
        expected, expected_scales = reference.quantize_rows(rows.flatten(0, 1)[written].cpu())
        flat_scales = factors.transpose(1, 2).flatten(0, 1)
        assert torch.equal(got.flatten(0, 1)[written].cpu(), expected)
        torch.testing.assert_close(flat_scales[written].cpu(), expected_scales, atol=0, rtol=0, equal_nan=True)
        assert (got.flatten(0, 1)[others] == 99).all(), "padding or a slot of nobody was written"
        assert (flat_scales[others] == 99).all()
        assert expected_scales.isnan().sum() == 2
        assert (expected_scales == 0).sum() == kv_heads


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bytes_alone_and_among_others(dtype: torch.dtype) -> None:
    """So prompts, chunks of them and decoded tokens leave the same cache."""
    tokens, kv_heads, dim = 9, 3, 64
    packed, angles = randn(tokens, 3 * kv_heads, dim, dtype=dtype), randn(tokens, dim // 2)
    cos, sin, slots = angles.cos(), angles.sin(), torch.randperm(12, device=DEVICE)[:tokens]
    caches = []
    for runs in ([slice(0, tokens)], [slice(i, i + 1) for i in range(tokens)]):
        levels = [torch.zeros(3, 4, kv_heads, dim, dtype=torch.int8, device=DEVICE) for _ in "kv"]
        caches.append(LayerCache(*levels, *(torch.zeros(3, kv_heads, 4, device=DEVICE) for _ in "kv")))
        for run in runs:
            q, k, v = packed[run].clone().split(kv_heads, dim=1)
            rotary.rotary_write_kv(q, k, v, RotaryInputs(cos[run], sin[run], slots[run]), caches[-1])
    for together, alone in zip(*caches, strict=True):
        assert torch.equal(together, alone)
