"""Test each architecture against transformers, on random small configurations in float32, and as a GGUF file."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lib.architectures import CASES
from lib.beams import assert_same, expected
from lib.engine import engine_for, logits_in_chunks, run
from lib.models import hf_model, ours
from minillm import BeamSearchParams, SamplingParams
from minillm.model.config import ModelConfig

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(5, 100))]


def random_model(case: str, seed: int) -> tuple[Any, random.Random]:
    rng = random.Random(f"{case} {seed}")
    return hf_model(seed, **CASES[case](rng)), rng


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_architecture_computes_what_transformers_computes(case: str, seed: int) -> None:
    theirs, rng = random_model(case, seed)
    assert ModelConfig.from_hf(theirs.config.to_dict()).num_parameters == theirs.num_parameters()
    model, tokens = ours(theirs), [rng.randrange(3, 96) for _ in range(70)]
    cut = rng.randint(1, 68)
    logits = theirs(torch.tensor([tokens])).logits[0]
    assert logits.std() > 0.1, "flat logits would prove nothing"
    got = logits_in_chunks(model, tokens, [cut, 1, 69 - cut])
    torch.testing.assert_close(got.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=0)
    prompt = tokens[: rng.randint(1, 40)]
    greedy = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=None
    )
    beams = expected(theirs, prompt, BEAMS, [2], use_cache=False)
    engine = engine_for(model, num_blocks=128, eos=frozenset({2}))
    outputs = run(engine, [(prompt, GREEDY), (prompt, BEAMS)])
    assert outputs[0].outputs[0].token_ids == greedy[0, len(prompt) :].tolist()
    assert_same(outputs[1], *beams)
