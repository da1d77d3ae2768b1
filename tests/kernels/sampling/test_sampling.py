"""The sampler draws the same tokens as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, DTYPES, ON_GPU, TOLERANCE, parameters, randn, relative_error
from minillm import kernels
from minillm.kernels import SamplingInputs, reference

pytest.importorskip("triton")
from minillm.kernels.sampling import draw as sampling
from minillm.kernels.sampling.top_k import top_log_probabilities


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
        tokens, logprobs = sampling.sample_with_logprobs(logits, settings)
        expected = reference.sample(logits, settings)
        different += int((tokens != expected).sum())
        total += rows
        exact = reference.log_probabilities(logits.double(), tokens)
        assert (logprobs - exact).abs().max() < 1e-4
        assert torch.equal(sampling.log_probabilities(logits, tokens), logprobs)
        assert ((tokens >= 0) & (tokens < vocab)).all()
        if vocab > 7:
            assert (tokens != 3).all(), "a forbidden token was drawn"
    # A cut by mass can fall on either side of a token where two sums differ in the last bit.
    assert different <= total // 100


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "allowed"),
    [
        (1.0, 3, 1.0, 0.0, {0, 1, 2}),
        (1.0, 4, 0.6, 0.0, {0, 1}),  # the second one reaches 0.7, and is kept
        (1.0, 0, 0.6, 0.0, {0, 1}),
        (2.0, 4, 1.0, 0.6, {0, 1, 2}),  # the third one's share is sqrt(0.2 / 0.4)
        (2.0, 0, 1.0, 0.6, {0, 1, 2}),
    ],
)
def test_each_cut_keeps_just_what_it_should(
    temperature: float, top_k: int, top_p: float, min_p: float, allowed: set[int]
) -> None:
    rows = 24
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1] + [1e-7] * 200, device=DEVICE).log().repeat(rows, 1)
    full, numbers = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
    settings = SamplingInputs(
        full * temperature, torch.full_like(numbers, top_k), full * top_p, full * min_p, numbers, numbers + 9
    )
    tokens = sampling.sample(logits, settings)
    assert set(tokens.tolist()) == allowed
    assert tokens.equal(reference.sample(logits, settings))


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
        settings = SamplingInputs(
            full,
            torch.full((rows,), top_k, device=DEVICE),
            full * top_p,
            full * 0,
            torch.arange(rows, device=DEVICE),
            torch.arange(rows, device=DEVICE) + 9,
        )
        tokens = sampling.sample(logits, settings)
        expected = reference.sample(logits, settings)
        kept = reference_support(logits, top_k, top_p)
        assert all(bool(kept[row, token]) for row, token in enumerate(tokens.tolist()))
        assert (tokens != expected).sum() <= 1


def reference_support(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The tokens that may be drawn, with a little margin: float32 sums may decide the last token either way."""
    values, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = rank < (top_k or logits.shape[1])
    weights = values.softmax(-1) * kept
    weights /= weights.sum(-1, keepdim=True)
    kept = kept & ((weights.cumsum(-1) - weights < top_p + 1e-5) | (rank == 0))
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_dtype_are_drawn_from(dtype: torch.dtype) -> None:
    logits = randn(6, 700, dtype=dtype) * 3
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.9, 2.0], device=DEVICE)
    top_k = torch.tensor([0, 0, 5, 0, 40, 0], device=DEVICE)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 0.9, 1.0], device=DEVICE)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05], device=DEVICE)
    seeds, positions = torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE) + 40
    inputs = SamplingInputs(temperature, top_k, top_p, min_p, seeds, positions)
    tokens, logprobs = sampling.sample_with_logprobs(logits, inputs)
    assert torch.equal(tokens, reference.sample(logits.float(), inputs))
    exact = reference.log_probabilities(logits.double(), tokens)
    assert relative_error(logprobs, exact) < TOLERANCE[torch.float32]
    assert torch.equal(kernels.sample_with_logprobs(logits, inputs)[0], tokens)
    values, ids = top_log_probabilities(logits, 5)
    assert torch.equal(logits.gather(1, ids).float(), logits.float().topk(5).values)
    assert relative_error(values, logits.double().log_softmax(-1).topk(5).values) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_of_nan_is_told_and_ends(top_k: int) -> None:
    """A search for a cut among numbers without an order must end."""
    logits = randn(3, 700, dtype=torch.float32)
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    inputs = SamplingInputs(*(torch.full((3,), value, device=DEVICE) for value in (0.8, top_k, 0.5, 0.1, 1, 2)))
    tokens, logprobs = sampling.sample_with_logprobs(logits, inputs)
    assert logprobs.isnan().tolist() == [True, True, False]
    assert bool(((tokens >= 0) & (tokens < 700)).all())


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 3e-38, 1e-12, 1e6])
@pytest.mark.parametrize("top_k", [0, 10])
def test_extreme_temperatures_stay_finite(temperature: float, top_k: int) -> None:
    logits = randn(8, 100) * 50
    settings = parameters(8, torch.Generator().manual_seed(0))
    full, none = torch.full_like(settings.top_p, temperature), torch.zeros_like(settings.min_p)
    settings = settings._replace(temperature=full, top_k=settings.top_k * 0 + top_k, top_p=none + 1, min_p=none)
    tokens, logprobs = sampling.sample_with_logprobs(logits, settings)
    if temperature < 1:
        assert torch.equal(tokens, logits.argmax(-1))
    assert (logprobs - reference.log_probabilities(logits.double(), tokens)).abs().max() < 1e-4


BAD: list[tuple[str, Any]] = [
    (
        "floating",
        lambda: sampling.sample(randn(2, 8).int(), SamplingInputs(*[randn(2)] * 6)),
    ),
    ("temperature", lambda: sampling.sample(randn(2, 8), SamplingInputs(*[randn(3)] * 6))),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
