"""Test GGUF files of Llama-family models against transformers, and that unsupported keys are rejected."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from lib.engine import logits_in_chunks
from lib.gguf_files import Without, write_gguf
from lib.models import hf_model
from minillm import LLM, SamplingParams
from minillm.errors import WeightsError
from minillm.kernels.linear.low_bit.layouts import dequantize
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import ModelFiles
from minillm.weights.gguf_file import GGUFCheckpoint
from minillm.weights.package import convert

F32 = gguf.GGMLQuantizationType.F32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
# The metadata that a converter writes besides the sizes, by kind of model.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2": ({"kind": "Qwen2"}, {}),
    "qwen2, tied": ({"kind": "Qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1}, {}),
    "qwen2, yarn": (
        {
            "kind": "Qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": ({"kind": "Qwen3", "head_dim": 32}, {"qwen3.rope.dimension_count": 32}),
    "qwen3, biases": ({"kind": "Qwen3", "head_dim": 8, "attention_bias": True}, {}),
    "smollm3": ({"kind": "SmolLM3", "num_hidden_layers": 9}, {}),
    "smollm3, untied": ({"kind": "SmolLM3", "num_hidden_layers": 5, "tie_word_embeddings": False}, {}),
    "mistral": ({"kind": "Mistral", "sliding_window": None}, {}),
    "mistral, a window": ({"kind": "Mistral", "sliding_window": 12}, {"llama.attention.sliding_window": 12}),
}


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 96), k=length)


def model_of(source: Any) -> Llama:
    config = ModelConfig.from_hf(source.config)
    return load_llama(source, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=128)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_file_computes_what_transformers_computes(tmp_path: Path, family: str) -> None:
    overrides, metadata = FAMILIES[family]
    theirs = hf_model(**{**SIZES, **overrides})
    write_gguf(tmp_path / "m.gguf", theirs, F32, **metadata)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    for name, tensor in theirs.state_dict().items():
        if name in checkpoint.names():
            assert torch.equal(checkpoint.tensor(name), tensor), name
    tokens = prompt_of(70)
    expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(
        logits_in_chunks(model_of(checkpoint), tokens, [40, 1, 29]), expected, atol=3e-4, rtol=1e-4
    )
    # As a directory it is the same model.
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(tmp_path / "m.gguf", directory, lambda progress: None)
    assert set(load_file(directory / "model.safetensors")) == set(checkpoint.names())
    converted = open_checkpoint(ModelFiles("x", directory, "test"))
    assert replace(ModelConfig.from_hf(converted.config), dtype=None) == ModelConfig.from_hf(checkpoint.config)
    # And from the file's name to text.
    llm = LLM(str(tmp_path / "m.gguf"), device="cpu", num_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = theirs.generate(
        torch.tensor([tokens]), max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=None
    )
    assert llm.generate(tokens, params)[0].outputs[0].token_ids == said[0, 70:].tolist()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "SmolLM3"])
@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_q_k_and_v_in_one_tensor_are_those_in_three(tmp_path: Path, kind: str, stored: str) -> None:
    theirs = hf_model(**SIZES, kind=kind, attention_bias=True, head_dim=32, num_key_value_heads=2)
    exact = write_gguf(tmp_path / "m.gguf", theirs, gguf.GGMLQuantizationType[stored], fused=True)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(exact)
    for name, values in exact.items():
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(values)), name
        matrix = checkpoint.low_bit(name, torch.device("cpu"), slice(2, 34), None)
        if matrix is not None:
            torch.testing.assert_close(dequantize(matrix), torch.from_numpy(values[2:34]))
    model_of(checkpoint)


def test_one_tensor_of_other_rows_than_those_of_q_k_and_v_is_named(tmp_path: Path) -> None:
    theirs = hf_model(**SIZES, num_key_value_heads=4)
    theirs.config.num_key_value_heads = 2
    write_gguf(tmp_path / "m.gguf", theirs, F32, fused=True)
    with pytest.raises(WeightsError, match=r"attn_qkv\.weight has 192 rows, but q, k and v together have 128"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_a_bias_that_is_absent_is_zero_for_q_k_and_v_alone(tmp_path: Path) -> None:
    theirs = hf_model(**SIZES, kind="Qwen2")
    write_gguf(tmp_path / "m.gguf", Without(theirs, "0.self_attn.k_proj.bias"), F32)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(theirs.state_dict())
    assert not checkpoint.tensor("model.layers.0.self_attn.k_proj.bias").any()
    model_of(checkpoint)


@pytest.mark.parametrize(
    ("kind", "metadata", "said"),
    [
        ("Qwen2", {"qwen2.attention.sliding_window": 12}, "qwen2.attention.sliding_window"),
        ("Qwen3", {"qwen3.expert_count": 4}, "qwen3.expert_count"),
        ("Qwen2", {"qwen2.rope.scaling.type": "longrope"}, "longrope"),
        ("Qwen2", {"qwen2.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor"),
        ("Qwen2", {"qwen2.rope.dimension_count": 8}, "8 of 16 dimensions"),
        ("Mistral", {"llama.attention.sliding_window": 2.5}, "sliding_window"),
    ],
)
def test_keys_that_are_not_followed_are_refused_in_one_line(
    tmp_path: Path, kind: str, metadata: dict[str, Any], said: str
) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model(**SIZES, kind=kind, head_dim=16), F32, **metadata)
    with pytest.raises(WeightsError, match=said) as caught:
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
