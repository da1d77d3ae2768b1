"""The sampler on a CPU: the tokens that may be drawn, and how often; a draw depends only on its seed and position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import SamplingInputs, cpu, reference


def inputs(rows: int, **settings: float) -> SamplingInputs:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    full = {name: torch.full((rows,), value) for name, value in values.items()}
    return SamplingInputs(
        full["temperature"].float(),
        full["top_k"].long(),
        full["top_p"].float(),
        full["min_p"].float(),
        torch.arange(rows) * 7919 - 3,
        torch.arange(rows) % 50,
    )


def expected_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Apply the definition to one row, token by token, in plain Python and float64."""
    scaled = (logits.double() / temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[: top_k or None]
    best = max(scaled)
    weights = {i: math.exp(scaled[i] - best) for i in kept}
    total, reached = sum(weights.values()), 0.0
    nucleus: list[int] = []
    for i in kept:
        if reached < top_p * total or not nucleus:
            nucleus.append(i)
        reached += weights[i]
    if top_p >= 1:
        nucleus = kept
    nucleus = [i for i in nucleus if weights[i] >= min_p * (1 - 1e-9)]
    result = torch.zeros(len(scaled), dtype=torch.float64)
    for i in nucleus:
        result[i] = weights[i]
    return result / result.sum()


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.3, 12, 0.9, 0.05),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("grid", [None, 0.5], ids=["distinct", "many-ties"])
@pytest.mark.parametrize("op", [cpu.sample, reference.sample], ids=["cpu", "reference"])
def test_draws_follow_the_distribution(setting: tuple[float, int, float, float], grid: float | None, op) -> None:
    temperature, top_k, top_p, min_p = setting
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    if grid:
        logits = (logits / grid).round() * grid
    expected = expected_distribution(logits, temperature, top_k, top_p, min_p)
    rows = 20_000
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = op(logits.expand(rows, -1), inputs(rows, **settings))
    counts = torch.bincount(drawn, minlength=40).double()
    assert counts[expected == 0].sum() == 0, "a token outside the support was drawn"
    inside = expected > 0
    assert (counts[expected * rows > 64] > 0).all(), "a token inside the support never came"
    deviation = ((counts - rows * expected)[inside] ** 2 / (rows * expected[inside])).sum()
    degrees = int(inside.sum()) - 1
    assert deviation < degrees + 5 * math.sqrt(2 * max(degrees, 1)) + 5


@pytest.mark.parametrize("vocab", [1, 2, 50, 5000])
@pytest.mark.parametrize("grid", [None, 0.25])
def test_the_candidate_search_draws_what_the_full_sort_draws(vocab: int, grid: float | None) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for round_number in range(12):
        rows = 24
        logits = torch.randn(rows, vocab, generator=generator) * (0.1 + round_number)
        if grid:
            logits = (logits / grid).round() * grid
        temperature = torch.rand(rows, generator=generator) * 2 * (torch.rand(rows, generator=generator) > 0.2)
        top_k = torch.randint(0, 60, (rows,), generator=generator) * (torch.rand(rows, generator=generator) > 0.5)
        top_p = torch.where(torch.rand(rows, generator=generator) > 0.5, torch.rand(rows, generator=generator), 1.0)
        min_p = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.7)
        drawn = SamplingInputs(temperature, top_k, top_p.clamp(min=1e-3), min_p, *inputs(rows)[4:])
        assert torch.equal(cpu.sample(logits, drawn), reference.sample(logits, drawn))


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 3e-38, 1e-30, 1e-12, 1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("cut", [{}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("op", [cpu.sample, reference.sample], ids=["cpu", "reference"])
def test_extreme_temperatures_stay_finite(temperature: float, cut: dict[str, float], op: Any) -> None:
    logits = torch.randn(8, 100) * 50
    drawn = op(logits, inputs(8, temperature=temperature, **cut))
    if temperature < 1e-3:
        assert torch.equal(drawn, logits.argmax(-1))
    assert ((drawn >= 0) & (drawn < 100)).all()


@pytest.mark.parametrize("count", [1, 3, 50, 100])
def test_of_equal_tokens_the_lower_id_comes_first(count: int) -> None:
    """The list of the most probable tokens begins with the greedy one."""
    logits = torch.randn(20, 100)
    rounded = (logits * 4).round() / 4
    for each in (logits, rounded, logits.round(), torch.zeros(3, 100), torch.where(logits > 0, 1.0, float("-inf"))):
        logprobs, ids = cpu.top_log_probabilities(each, count)
        expected, expected_ids = reference.top_log_probabilities(each, count)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(logprobs, expected)
        assert torch.equal(ids[:, 0], cpu.sample(each, inputs(len(each), temperature=0)))


@pytest.mark.parametrize("op", [cpu.sample, reference.sample], ids=["cpu", "reference"])
def test_of_equal_tokens_top_k_keeps_the_lower_ids(op: Any) -> None:
    logits = torch.zeros(300, 300)
    logits[:, 200] = 1.0
    drawn = set(op(logits, inputs(300, top_k=41, temperature=9.0)).tolist())
    assert max(drawn - {200}) < 40
    assert len(drawn) > 30


def test_the_most_probable_tokens_of_a_row_of_nan() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 7] = float("nan")
    logprobs, _ = cpu.top_log_probabilities(logits, 5)
    assert logprobs.isnan().all(-1).tolist() == [True, False]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((4000, 30), float("-inf"))
    logits[:, [3, 17]] = torch.tensor([0.0, -25.0])
    for settings in ({}, {"top_k": 5}, {"top_p": 0.999999}, {"min_p": 1e-12}):
        drawn = kernels.sample(logits, inputs(4000, **settings))
        assert set(drawn.tolist()) <= {3, 17}


def test_a_draw_depends_on_its_own_row_only() -> None:
    logits = torch.randn(16, 300)
    settings = inputs(16)
    together = kernels.sample(logits, settings)
    alone = [kernels.sample(logits[i : i + 1], settings.rows(slice(i, i + 1))) for i in range(16)]
    assert torch.equal(together, torch.cat(alone))
