"""Compare the predictions of the default model with weights in 8 bits and in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.engine import logits_in_chunks
from minillm import LLM

NUM_TOKENS = 2000
TEXT = Path(__file__).parents[2] / "README.md"

pytestmark = [pytest.mark.weights, pytest.mark.parity]


def test_divergence_of_predictions(llm: LLM) -> None:
    """Mean KL divergence of the next token's distribution, over real text, in four pieces."""
    int8 = LLM("smollm2-135m", device="cpu", dtype="float32", num_blocks=256, weights="int8")
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    total = 0.0
    for start in range(0, NUM_TOKENS, 500):
        piece = ids[start : start + 500]
        exact, got = (
            logits_in_chunks(each.engine.runner.model, piece, [len(piece)], block_size=16).double().log_softmax(-1)
            for each in (llm, int8)
        )
        total += float((exact.exp() * (exact - got)).sum())
    divergence = total / NUM_TOKENS
    print(f"mean KL divergence {divergence:.2e}")
    assert 1e-5 < divergence <= 2e-3, "below: the weights are not in 8 bits"


def test_one_token_at_a_time_predicts_as_a_prompt_does(llm: LLM) -> None:
    """Single rows go another way through the code than prompts."""
    int8 = LLM("smollm2-135m", device="cpu", dtype="float32", num_blocks=256, weights="int8")
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:60]
    model = int8.engine.runner.model
    together, single = (
        logits_in_chunks(model, ids, chunks, block_size=16).double().log_softmax(-1)
        for chunks in ([60], [20] + [1] * 40)
    )
    assert torch.equal(together.argmax(-1), single.argmax(-1))
    assert float((together.exp() * (together - single)).sum(-1).max()) < 1e-4
