"""Test each architecture against transformers, on random small configurations in float32, and as a GGUF file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from lib.architectures import CASES
from lib.beams import assert_same, expected
from lib.engine import engine_for, logits_in_chunks, run
from lib.gguf_files import converted, write_gguf
from lib.models import DEVICE, hf_model, ours
from minillm import BeamSearchParams, SamplingParams
from minillm.model.config import ModelConfig
from minillm.model.llama_tensors import LlamaTensors
from minillm.model.loader import load_llama
from minillm.weights.gguf_file import GGUFCheckpoint

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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("helium", "ministral")])  # not in llama.cpp
def test_a_gguf_file_of_an_architecture_is_the_same_model(case: str, seed: int, tmp_path: Path) -> None:
    theirs, rng = random_model(case, seed)
    path = tmp_path / "m.gguf"
    write_gguf(path, theirs, gguf.GGMLQuantizationType.F32, **converted(theirs.config))
    checkpoint = GGUFCheckpoint(path)
    for name, tensor in theirs.state_dict().items():
        if name in checkpoint.names():
            torch.testing.assert_close(checkpoint.tensor(name), tensor, atol=2e-7, rtol=0)
    config = ModelConfig.from_hf(checkpoint.config)
    stored = LlamaTensors(checkpoint, config)
    model = load_llama(stored, config, device=DEVICE, dtype=torch.float32, max_positions=256)
    tokens = [rng.randrange(3, 96) for _ in range(70)]
    logits = [logits_in_chunks(each, tokens, [40, 1, 29]).log_softmax(-1) for each in (model, ours(theirs))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
