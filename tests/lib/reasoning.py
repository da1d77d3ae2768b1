"""Requests with a limit on the reasoning, and engines of a tiny model that run them in several ways."""

from __future__ import annotations

import random
from typing import Any

from lib.engine import engine_for
from minillm import BeamSearchParams, Grammar, SamplingParams
from minillm.engine.engine import Engine
from minillm.model.llama import Llama
from minillm.text.tokenizer import Tokenizer

PATTERN = r"[a-c]{2,9}x"  # of answers with a grammar
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "device": {"on_device": True},
    "device-drafts": {"on_device": True, "speculate": "lookup"},
    "drafts": {"speculate": "lookup"},
    "recompute": {"num_blocks": 100, "admission": "optimistic"},
    "swap": {"num_blocks": 100, "host_blocks": 40, "admission": "optimistic", "on_device": True},
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, with the tags that it spells."""
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def engine(parts: tuple[Llama, Tokenizer], **options: Any) -> Engine:
    """Return an engine for a model and its tokenizer."""
    model, tokenizer = parts
    assert tokenizer.eos_token_id is not None
    sizes: dict[str, Any] = {"num_blocks": 1000, "max_num_seqs": 128, **options}
    return engine_for(model, tokenizer=tokenizer, eos=frozenset({tokenizer.eos_token_id}), **sizes)


def request(rng: random.Random, tokenizer: Tokenizer, number: int) -> tuple[list[int], Any, bool]:
    """Return a prompt, parameters, and whether the prompt has opened the thought."""
    is_open = rng.random() < 0.7
    prompt = [rng.randrange(10, 500) for _ in range(rng.randint(1, 30))]
    prompt += ids_of(tokenizer, "<think>\n") if is_open else []
    [opening], [closing] = ids_of(tokenizer, "<think>"), ids_of(tokenizer, "</think>")
    shared: dict[str, Any] = {
        "max_reasoning_tokens": rng.choice([0, 1, 2, 7, rng.randint(3, 25)]),
        "max_tokens": rng.randint(50, 80),
        "logit_bias": {closing: rng.choice([-100.0, 15.0, 25.0]), opening: 0.0 if is_open else 30.0},
        "grammar": Grammar.regex(PATTERN) if rng.random() < 0.3 else None,
        "ignore_eos": False,
    }
    if rng.random() < 0.25:
        return prompt, BeamSearchParams(beam_width=rng.randint(1, 4), **shared), is_open
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
        {"n": rng.randint(1, 4), "top_p": 0.9, "frequency_penalty": rng.choice([0.0, 0.5])},
        {"min_tokens": 28, "allowed_token_ids": [*range(20, 400), opening, closing]},
    ]
    return prompt, SamplingParams(seed=number, **{**shared, **rng.choice(sampling)}), is_open
