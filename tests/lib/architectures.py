"""Random small configurations of each architecture, for `lib.models.hf_model`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Keys = dict[str, Any]


def sizes(rng: random.Random, **options: Any) -> Keys:
    """Return random sizes that any architecture takes."""
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.randint(1, 3)
    return {
        "num_hidden_layers": rng.randint(1, 4), "num_key_value_heads": kv_heads, "num_attention_heads": heads,
        "hidden_size": heads * rng.choice([8, 12, 16]), "intermediate_size": 4 * rng.randint(4, 20),
        "tie_word_embeddings": rng.random() < 0.5, "rms_norm_eps": rng.choice([1e-5, 1e-6]), **options,
    }  # fmt: skip


def theta(rng: random.Random, **options: Any) -> Keys:
    return {"rope_type": "default", "rope_theta": rng.choice([1e4, 5e5]), **options}


def kinds(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(["full_attention", "sliding_attention"]) for _ in range(count)]


def _olmo2(rng: random.Random) -> Keys:
    return sizes(rng, kind="Olmo2", attention_bias=rng.random() < 0.3, rope_parameters=theta(rng))


def _olmo3(rng: random.Random) -> Keys:
    rope = theta(rng)
    ropes = {"sliding_attention": rope, "full_attention": dict(rope)}
    if rng.random() < 0.5:
        ropes["full_attention"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    found = sizes(rng, kind="Olmo3", sliding_window=rng.randint(2, 40), rope_parameters=ropes)
    return found | ({"layer_types": kinds(rng, found["num_hidden_layers"])} if rng.random() < 0.5 else {})


def _exaone4(rng: random.Random) -> Keys:
    window = rng.choice([None, rng.randint(2, 40)])
    found = sizes(rng, kind="Exaone4", sliding_window=window, rope_parameters=theta(rng), head_dim=rng.choice([8, 16]))
    layers = found["num_hidden_layers"]
    if window is None:
        return found | {"layer_types": ["full_attention"] * layers}
    return found | ({"layer_types": kinds(rng, layers)} if rng.random() < 0.5 else {"sliding_window_pattern": 2})


def _glm4(rng: random.Random) -> Keys:
    rope = theta(rng, partial_rotary_factor=rng.choice([0.5, 0.25, 1.0]))
    return sizes(
        rng, kind="Glm4", head_dim=rng.choice([8, 16]), attention_bias=rng.random() < 0.5, rope_parameters=rope
    )


def _gemma3(rng: random.Random) -> Keys:
    head_dim = rng.choice([8, 16])
    ropes = {"sliding_attention": theta(rng), "full_attention": theta(rng)}
    if rng.random() < 0.5:
        ropes["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    found = sizes(
        rng, kind="Gemma3", head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=rng.randint(2, 40),
        rope_parameters=ropes, num_hidden_layers=rng.randint(1, 7), tie_word_embeddings=True,
    )  # fmt: skip
    return found | ({"layer_types": kinds(rng, found["num_hidden_layers"])} if rng.random() < 0.3 else {})


CASES: dict[str, Callable[[random.Random], Keys]] = {
    "olmo2": _olmo2, "olmo3": _olmo3, "exaone4": _exaone4, "glm4": _glm4, "gemma3": _gemma3,
}  # fmt: skip
