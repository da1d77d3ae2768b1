"""Test the reference ops against sums written out by hand."""

from __future__ import annotations

import math

import torch

from lib.kernels import make_pool
from minillm import kernels
from minillm.kernels import reference


def test_attention_is_plain_softmax() -> None:
    pool = make_pool([11], 2, 32, torch.float64, 4, device=torch.device("cpu"))
    q = torch.randn(1, 4, 32, dtype=torch.float64)
    out = reference.paged_attention(q, pool, 0.5)
    for head in range(4):
        keys = torch.stack([pool.k[pool.tables[0, i // 4], i % 4, head // 2] for i in range(11)])
        values = torch.stack([pool.v[pool.tables[0, i // 4], i % 4, head // 2] for i in range(11)])
        weights = (keys @ q[0, head] * 0.5).exp()
        torch.testing.assert_close(out[0, head], weights @ values / weights.sum())


def test_rows_in_8_bits_are_within_half_a_scale() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-30, 30, 50)[:, None, None]
    levels, scales = reference.quantize_rows(x)
    assert levels.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert torch.equal(levels.abs().amax(-1), torch.full((50, 3), 127)), "all of the range is used"
    error = (levels.double() * scales.double()[..., None] - x.double()).abs().amax(-1)
    assert (error <= 0.5001 * scales).all()
    assert torch.equal(levels.sign(), torch.where(levels == 0, 0, x.sign()).to(torch.int8))


def test_rows_without_a_number_say_so() -> None:
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 4], x[3, 0] = math.nan, -math.inf, 1e-45
    levels, scales = reference.quantize_rows(x)
    assert scales.isnan().tolist() == [False, True, True, False]
    assert scales[0] == 0
    assert not levels[:3].any()
    assert (levels[3].float() * scales[3]).isfinite().all()


def test_block_copy_moves_every_layer_and_nothing_else() -> None:
    pool = torch.randn(3, 2, 6, 4, 2, 8)
    before = pool.clone()
    kernels.block_copy(pool, torch.tensor([[0, 3], [0, 5], [2, 1]]))
    for source, destination in ((0, 3), (0, 5), (2, 1), (0, 0), (2, 2), (4, 4)):
        assert torch.equal(pool[:, :, destination], before[:, :, source])


def test_all_reduce() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
    assert reference.all_reduce(parts).tolist() == [111.0, 222.0]
    tiny = [torch.tensor([1.0]).bfloat16(), torch.tensor([2**-8]).bfloat16(), torch.tensor([2**-8]).bfloat16()]
    assert reference.all_reduce(tiny).item() == 1 + 2**-7, "rounded once, not twice"


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    ids = torch.arange(1 << 16, dtype=torch.int32)
    u = reference.uniform(torch.arange(16) * 12345, torch.arange(16), ids[None]).double()
    assert u.min() > 0
    assert u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    counts = torch.histc(u, 256, 0, 1)
    assert (counts - n / 256).square().sum() / (n / 256) < 255 + 6 * math.sqrt(2 * 255)
    centred = u - 0.5
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:])):  # rows, neighbouring ids
        assert abs((a * b).mean() * 12) < 6 / math.sqrt(a.numel())
    neighbours = reference.uniform(torch.tensor([5, 5, 6]), torch.tensor([7, 8, 7]), ids[None]).double() - 0.5
    for i, j in ((0, 1), (0, 2), (1, 2)):  # next position, next seed
        assert abs((neighbours[i] * neighbours[j]).mean() * 12) < 6 / math.sqrt(len(ids))


def test_log_probabilities() -> None:
    logits = torch.randn(5, 77) * 10
    token_ids = torch.randint(0, 77, (5,))
    expected = logits.double().log_softmax(-1)[torch.arange(5), token_ids]
    torch.testing.assert_close(reference.log_probabilities(logits, token_ids).double(), expected, atol=1e-5, rtol=0)
