"""Rope keys of GGUF files, against the arithmetic of llama.cpp written out in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from lib.gguf_files import gguf_model, write_gguf
from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.rope import RotaryTable
from minillm.weights.gguf_file import GGUFCheckpoint

DIM, CONTEXT, THETA = 32, 256, 10_000.0
SCALING = "llama.rope.scaling."


def llama_cpp(
    kind: str = "linear",
    factor: float = 0.0,
    attn_factor: float = 1.0,
    original: int = CONTEXT,
    betas: tuple[float, float] = (32.0, 1.0),
) -> tuple[list[float], float]:
    """The angular step of each pair, and the factor on cos and sin."""
    scale = 1.0 if kind == "none" or factor == 0.0 else 1.0 / factor
    steps = [THETA ** (-2 * pair / DIM) for pair in range(DIM // 2)]
    if kind != "yarn":
        return [step * scale for step in steps], attn_factor
    ends = [DIM * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(THETA)) for beta in betas]
    low, high = max(0, math.floor(ends[0])), min(DIM - 1, math.ceil(ends[1]))
    mixed = []
    for pair, step in enumerate(steps):
        ramp = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
        mixed.append(step * scale * (1 - ramp) + step * ramp)
    sharpness = 1.0 if scale >= 1 else 1.0 + 0.1 * math.log(1 / scale)
    return mixed, sharpness * attn_factor


def table_of(tmp_path: Path, **metadata: Any) -> RotaryTable:
    path = tmp_path / "m.gguf"
    write_gguf(path, gguf_model(num_hidden_layers=1), gguf.GGMLQuantizationType.F32, **metadata)
    config = ModelConfig.from_hf(GGUFCheckpoint(path).config)
    return RotaryTable(config, CONTEXT, torch.device("cpu"))


FOLLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "a factor without a type is linear": ({SCALING + "factor": 4.0}, {"factor": 4.0}),
    "the old key": ({"llama.rope.scale_linear": 4.0}, {"factor": 4.0}),
    "the new key before the old": ({SCALING + "factor": 2.0, "llama.rope.scale_linear": 4.0}, {"factor": 2.0}),
    "factor 0 is 1": ({SCALING + "factor": 0.0}, {}),
    "linear, factor 0": ({SCALING + "type": "linear", SCALING + "factor": 0.0}, {}),
    "old key 0": ({"llama.rope.scale_linear": 0.0}, {}),
    "none scales nothing": ({SCALING + "type": "none", SCALING + "factor": 4.0}, {}),
    "linear without a factor": ({SCALING + "type": "linear"}, {}),
    "linear, louder": (
        {SCALING + "factor": 4.0, SCALING + "attn_factor": 1.25},
        {"factor": 4.0, "attn_factor": 1.25},
    ),
    "louder alone": ({SCALING + "attn_factor": 0.75}, {"attn_factor": 0.75}),
    "yarn": ({SCALING + "type": "yarn", SCALING + "factor": 4.0}, {"kind": "yarn", "factor": 4.0}),
    "yarn, factor 0": ({SCALING + "type": "yarn", SCALING + "factor": 0.0}, {"kind": "yarn"}),
    "yarn, old key": ({SCALING + "type": "yarn", "llama.rope.scale_linear": 4.0}, {"kind": "yarn", "factor": 4.0}),
    "yarn, original context": (
        {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "original_context_length": 64},
        {"kind": "yarn", "factor": 4.0, "original": 64},
    ),
    "yarn, louder": (
        {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "attn_factor": 1.25},
        {"kind": "yarn", "factor": 4.0, "attn_factor": 1.25},
    ),
    "yarn, betas": (
        {
            SCALING + "type": "yarn",
            SCALING + "factor": 4.0,
            SCALING + "yarn_beta_fast": 8.0,
            SCALING + "yarn_beta_slow": 0.5,
        },
        {"kind": "yarn", "factor": 4.0, "betas": (8.0, 0.5)},
    ),
    "what changes nothing": (
        {
            SCALING + "type": "yarn",
            SCALING + "factor": 4.0,
            SCALING + "finetuned": True,
            SCALING + "yarn_ext_factor": 1.0,
            SCALING + "yarn_attn_factor": 1.0,
            SCALING + "yarn_log_multiplier": 0.0,
        },
        {"kind": "yarn", "factor": 4.0},
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_keys_mean_what_they_mean_to_llama_cpp(tmp_path: Path, name: str) -> None:
    metadata, meaning = FOLLOWED[name]
    steps, amplitude = llama_cpp(**meaning)
    table = table_of(tmp_path, **metadata)
    angles = torch.outer(torch.arange(CONTEXT).double(), torch.tensor(steps, dtype=torch.float64))
    torch.testing.assert_close(table.cos.double(), angles.cos() * amplitude, atol=3e-5, rtol=0)
    torch.testing.assert_close(table.sin.double(), angles.sin() * amplitude, atol=3e-5, rtol=0)


REFUSED: list[dict[str, Any]] = [
    {SCALING + "yarn_log_multiplier": 0.1},
    {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "yarn_ext_factor": 0.5},
    {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "yarn_ext_factor": 0.0},
    {SCALING + "yarn_ext_factor": 1.0},
    {SCALING + "yarn_attn_factor": 2.0},
    {SCALING + "alpha": 1000.0},
    {SCALING + "low_freq_factor": 2.0},
    {SCALING + "type": "longrope"},
    {SCALING + "type": 5},
    {SCALING + "factor": math.nan},
    {SCALING + "factor": math.inf},
    {SCALING + "factor": -2.0},
    {SCALING + "factor": "4"},
    {"llama.rope.scale_linear": "4"},
    {SCALING + "attn_factor": 0.0},
    {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "yarn_beta_fast": 0.0},
    {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "original_context_length": 1.5},
    {"llama.rope.freq_base": 0.0},
    {"llama.rope.freq_base": "10000"},
]


@pytest.mark.parametrize("metadata", REFUSED, ids=str)
def test_what_is_not_followed_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any]) -> None:
    with pytest.raises(WeightsError) as caught:
        table_of(tmp_path, **metadata)
    named = list(metadata)[-1].removeprefix(SCALING) if metadata.get(SCALING + "type") != "longrope" else "longrope"
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
