"""Compare the predictions of the default model with its KV cache in 8 bits and in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lib.engine import logits_in_chunks
from minillm import LLM

NUM_TOKENS = 2000
TEXT = Path(__file__).parents[2] / "README.md"

pytestmark = [pytest.mark.weights, pytest.mark.parity]


def divergences(exact: Tensor, got: Tensor) -> Iterator[float]:
    """KL divergence of each token's distribution, piece by piece: in float64 all would take a gigabyte."""
    for one, other in zip(exact.split(250), got.split(250), strict=True):
        one, other = one.double().log_softmax(-1), other.double().log_softmax(-1)
        yield from (one.exp() * (one - other)).sum(-1).tolist()


def test_divergence_of_predictions_in_a_long_context(llm: LLM) -> None:
    """Mean KL divergence of the next token's distribution, over 2,000 tokens of real text in one context."""
    model = llm.engine.runner.model
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    chunks = [500] * 4
    exact = logits_in_chunks(model, ids, chunks, block_size=16)
    got = logits_in_chunks(replace(model, kv_in_8_bits=True), ids, chunks, block_size=16)
    found = torch.tensor(list(divergences(exact, got)))
    late = found[NUM_TOKENS // 2 :].mean()
    print(f"mean KL divergence {found.mean():.2e}, of the second half {late:.2e}, largest {found.max():.2e}")
    agree = (exact.argmax(-1) == got.argmax(-1)).double().mean()
    print(f"the same likeliest token for {agree:.2%}")
    assert 1e-6 < found.mean() <= 1e-3, "below: nothing is in 8 bits"
    assert late <= 1e-3, "it grows with the context"
