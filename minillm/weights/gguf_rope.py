"""Rope scaling of a GGUF file of architecture llama, as llama.cpp reads it, under Hugging Face's names."""

from __future__ import annotations

from typing import Any

from minillm.errors import WeightsError
from minillm.text.safe import clean_line
from minillm.text.values import Values, shown

_KEY = "llama.rope.scaling."
_TYPES = ("none", "linear", "yarn")
_FOLLOWED = (
    *("type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"),
    "finetuned",  # changes nothing
)
# Keys that llama.cpp reads for other architectures, and the values with which they change nothing.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "yarn_log_multiplier": (0.0,),
    "yarn_attn_factor": (1.0,),
}


def rope_scaling(metadata: Values, frequency_factors: list[float] | None) -> dict[str, Any]:
    """What ``rope_scaling`` of a config.json would say; empty where nothing is scaled.

    Every key that changes angles is followed or refused by name.

    Args:
        frequency_factors: llama 3's scaling, which GGUF stores as one divisor per pair of dimensions.
    """
    kind = metadata.text(f"{_KEY}type", "linear")  # without a type a factor is linear: files of 2023 have no other key
    if kind not in _TYPES:
        raise WeightsError(
            f"{metadata.where}: rope scaling {shown(kind)} is not supported; supported: {', '.join(_TYPES)}"
        )
    # How much of YaRN's ramp is mixed in; -1 is "not set".
    neutral = {**_NEUTRAL, "yarn_ext_factor": (1.0 if kind == "yarn" else 0.0, -1.0)}
    for key, value in metadata.values.items():
        name = key.removeprefix(_KEY)
        if name != key and name not in _FOLLOWED and value not in neutral.get(name, ()):
            raise WeightsError(f"{metadata.where}: {clean_line(key, 80)} {shown(value)} is not supported")
    scaling: dict[str, Any] = {}
    factor = metadata.number(f"{_KEY}factor", metadata.number("llama.rope.scale_linear", 0.0)) or 1.0
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if original := metadata.integer(f"{_KEY}original_context_length", 0, least=0):
            scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"{_KEY}yarn_{name}"):
                scaling[name] = metadata.positive(f"{_KEY}yarn_{name}")
    elif kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    if (amplitude := metadata.positive(f"{_KEY}attn_factor", 1.0)) != 1.0:
        scaling = {"rope_type": "default", **scaling, "amplitude": amplitude}
    if frequency_factors is not None:
        scaling = {"rope_type": "default", **scaling, "frequency_factors": frequency_factors}
    return scaling
