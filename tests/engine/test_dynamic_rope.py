"""Test rope scaling that depends on a sequence's length: prompts only find blocks with the K they would compute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model, ours
from minillm.llm import LLM
from minillm.params import SamplingParams

TRAINED = 32
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    scaling = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    theirs = hf_model(max_position_embeddings=TRAINED, rope_parameters=scaling).to(DEVICE)
    return theirs, ours(theirs, max_positions=TRAINED * 8)


def greedy(theirs: Any, prompt: list[int]) -> list[int]:
    theirs(torch.tensor([[5]], device=DEVICE))  # transformers keeps the longest text's angles: a short one resets them
    ids = theirs.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


def test_a_long_prompt_does_no_harm_to_a_short_one_that_begins_alike(models: tuple[Any, Any]) -> None:
    """Prompts of all lengths share their beginnings, on one engine, and each answer is that of transformers."""
    theirs, model = models
    rng = random.Random(1)
    text = [rng.randrange(3, 96) for _ in range(120)]
    engine = engine_for(model, num_blocks=400)
    lengths = [100, 20, 100, 40, 41, 40, 20, 30, 33, 110]
    hits = []
    for length in lengths:
        [output] = run(engine, [(text[:length], GREEDY)])
        assert output.outputs[0].token_ids == greedy(theirs, text[:length]), length
        hits.append(output.num_cached_tokens)
    assert hits[2] > 90, "the same long prompt again is found"
    assert hits[6] > 10, "so is a short one"
    assert hits[3] == hits[4] == hits[8] == hits[9] == 0, "another length beyond the trained context is another K"


def test_branches_that_grow_beyond_the_trained_context(tmp_path: Path, models: tuple[Any, Any]) -> None:
    theirs, _ = models
    theirs.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", num_blocks=200, block_size=4, max_model_len=200)
    rng = random.Random(3)
    branch = llm.branch([rng.randrange(3, 96) for _ in range(20)])
    for _ in range(4):
        branch.append([rng.randrange(3, 96) for _ in range(9)])
        before = list(branch.token_ids)
        with branch.fork() as other:
            assert other.sample(GREEDY).token_ids == greedy(theirs, before)
        assert branch.sample(SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)).token_ids
