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
        ropes["full_attention"] |= rng.choice([{}, {"attention_factor": 1.25}])
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


def _flags(rng: random.Random, *names: str) -> Keys:
    return {name: rng.random() < 0.4 for name in names}


def _multipliers(rng: random.Random) -> Keys:
    return {
        "embedding_multiplier": rng.choice([0.7, 4.0, 12.0]), "residual_multiplier": rng.choice([1.0, 0.22, 0.5]),
        "attention_multiplier": rng.choice([0.05, 0.1, 0.2]), "logits_scaling": rng.choice([1.0, 2.0, 0.9]),
    }  # fmt: skip


def _granite(rng: random.Random) -> Keys:
    biases = _flags(rng, "attention_bias", "mlp_bias")
    return sizes(rng, kind="Granite", rope_parameters=theta(rng), **_multipliers(rng), **biases)


def _granite4(rng: random.Random) -> Keys:
    found = sizes(rng, kind="GraniteMoeHybrid", **_multipliers(rng), **_flags(rng, "attention_bias"))
    return found | {
        "layer_types": ["attention"] * found["num_hidden_layers"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": found["intermediate_size"], "mamba_d_head": 2 * found["hidden_size"],
        "mamba_n_heads": 1, "position_embedding_type": "rope", "rope_parameters": theta(rng),
    }  # fmt: skip


def _phi3(rng: random.Random) -> Keys:
    found = sizes(rng, kind="Phi3", sliding_window=rng.choice([None, 9]))
    dim = found["hidden_size"] // found["num_attention_heads"]
    share = rng.choice([0.5, 0.75, 1.0]) if dim == 16 else 1.0
    rope = theta(rng, partial_rotary_factor=share)
    if rng.random() < 0.5:
        factors = {
            f"{name}_factor": [rng.uniform(1, 8) for _ in range(int(dim * share) // 2)] for name in ("short", "long")
        }
        rope |= {"rope_type": "longrope", **factors}
    return found | {"rope_parameters": rope, "original_max_position_embeddings": rng.choice([128, 256])}


def _ernie(rng: random.Random) -> Keys:
    return sizes(rng, kind="Ernie4_5", head_dim=rng.choice([4, 8, 16]), **_flags(rng, "use_bias"))


def _helium(rng: random.Random) -> Keys:
    found = sizes(rng, kind="Helium", **_flags(rng, "attention_bias", "mlp_bias"))
    return found | {"head_dim": found["hidden_size"] // found["num_attention_heads"]}


def _seed_oss(rng: random.Random) -> Keys:
    biases = _flags(rng, "attention_bias", "attention_out_bias", "mlp_bias")
    return sizes(rng, kind="SeedOss", head_dim=rng.choice([8, 16]), rope_parameters=theta(rng), **biases)


def _ministral(rng: random.Random) -> Keys:
    found = sizes(rng, kind="Ministral", sliding_window=rng.randint(2, 40), head_dim=rng.choice([8, 16]))
    return found | ({"layer_types": kinds(rng, found["num_hidden_layers"])} if rng.random() < 0.5 else {})


def _ministral3(rng: random.Random) -> Keys:
    factor = rng.choice([2.0, 16.0])
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 128,
        "max_position_embeddings": int(128 * factor), "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    context = int(128 * factor)
    return sizes(rng, kind="Ministral3", head_dim=16, rope_parameters=yarn, max_position_embeddings=context)


def _hunyuan(rng: random.Random) -> Keys:
    found = sizes(rng, kind="HunYuanDenseV1", head_dim=rng.choice([8, 16]), **_flags(rng, "attention_bias"))
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    return found | {"rope_parameters": rng.choice([theta(rng), alpha])}


CASES: dict[str, Callable[[random.Random], Keys]] = {
    "olmo2": _olmo2, "olmo3": _olmo3, "exaone4": _exaone4, "glm4": _glm4, "gemma3": _gemma3,
    "granite": _granite, "granite4": _granite4, "phi3": _phi3, "ernie": _ernie, "helium": _helium,
    "seed_oss": _seed_oss, "ministral": _ministral, "ministral3": _ministral3, "hunyuan": _hunyuan,
}  # fmt: skip
