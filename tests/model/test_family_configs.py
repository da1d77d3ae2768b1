"""Test configurations of Llama-family models: their defaults, their folded multipliers, and odd ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from lib.engine import logits_in_chunks
from lib.gguf_files import converted, write_gguf
from lib.models import TINY, hf_model, ours
from minillm import LLM, SamplingParams
from minillm.errors import CapacityError, WeightsError
from minillm.fit.sizes import sized
from minillm.kernels import LowBit
from minillm.kernels.linear.low_bit.layouts import FP8, Layout, dequantize, random_matrix
from minillm.model.config import ModelConfig
from minillm.model.llama_tensors import LlamaTensors

KINDS = ["Granite", "Phi3", "Ernie4_5", "Helium", "SeedOss", "Ministral", "HunYuanDenseV1"]
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def config_of(kind: str, **keys: Any) -> ModelConfig:
    return ModelConfig.from_hf({**TINY, "architectures": [f"{kind}ForCausalLM"], **keys})


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys_have_the_defaults_of_transformers(kind: str) -> None:
    complete = getattr(transformers, f"{kind}Config")(**TINY).to_dict()
    assert config_of(kind) == ModelConfig.from_hf({**complete, "architectures": [f"{kind}ForCausalLM"]})


def test_the_residual_multiplier_is_folded_into_eps_and_the_embedding() -> None:
    config = config_of("Granite", residual_multiplier=0.5, embedding_multiplier=12, attention_multiplier=0.1)
    assert config.rms_norm_eps == 4 * TINY["rms_norm_eps"]
    assert config.embedding_scale == 24
    assert config.softmax_scale == 0.1
    assert config_of("Llama").softmax_scale == 8**-0.5


def test_the_context_of_ministral_3_ends_where_its_scaling_of_q_begins(tmp_path: Path) -> None:
    theirs = hf_model(kind="Ministral3", rope_parameters=YARN, max_position_embeddings=1024, head_dim=16)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    assert config.longest_context == 64
    assert config.rope.factor == 16
    unscaled = {**YARN, "llama_4_scaling_beta": 0.0}
    assert config_of("Ministral3", rope_parameters=unscaled, max_position_embeddings=1024).longest_context == 1024
    write_gguf(tmp_path / "m.gguf", theirs, gguf.GGMLQuantizationType.F32, **converted(theirs.config))
    assert sized("x", tmp_path / "m.gguf").shape.context == 64
    theirs.save_pretrained(tmp_path)
    with pytest.raises(CapacityError, match=r"max_model_len 65 is above the model's context of 64 tokens"):
        LLM(str(tmp_path), device="cpu", num_blocks=64, max_model_len=65)


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier must be a number from 1e-06 to 1e"),
        ("Granite", {"residual_multiplier": 1e-300}, "residual_multiplier"),
        ("Granite", {"logits_scaling": 0.0}, "logits_scaling"),
        ("Granite", {"attention_multiplier": "0.1"}, "attention_multiplier"),
        ("Granite", {"embedding_multiplier": math.nan}, "embedding_multiplier"),
        ("GraniteMoeHybrid", {"num_local_experts": 0}, "layer_types"),
        ("GraniteMoeHybrid", {"num_local_experts": 0, "layer_types": ["attention", "mamba", "attention"]}, "Mamba"),
        ("GraniteMoeHybrid", {"layer_types": ["attention"] * 3}, "mixture-of-experts"),
        ("Phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor rotates 3 of 8 dimensions"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("Phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4}}, "short_factor"),
        ("Phi3", {"sliding_window": 0}, "sliding_window"),
        ("Ernie4_5", {"use_bias": 1}, "use_bias must be true or false"),
        ("Helium", {"num_key_value_heads": 4}, "not a multiple of num_key_value_heads 4"),
        ("SeedOss", {"attention_out_bias": "no"}, "attention_out_bias"),
        ("Ministral", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
        ("Ministral3", {}, "the required key rope_parameters is missing"),
        ("Ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": -5}}, "alpha"),
    ],
    ids=str,
)
def test_odd_configurations_are_rejected_in_one_line(kind: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        config_of(kind, **keys)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("length", [30, 60])
@torch.no_grad()
def test_a_prompt_beyond_the_original_context_of_partial_longrope(length: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}  # fmt: skip
    theirs = hf_model(kind="Phi3", hidden_size=96, rope_parameters=rope, original_max_position_embeddings=32)
    model, tokens = ours(theirs), torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    assert model.rotary.dynamic
    logits = theirs(torch.tensor([tokens])).logits[0]
    got = logits_in_chunks(model, tokens, [20, 1, length - 21])
    torch.testing.assert_close(got.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_old_names_have_the_meaning_of_the_new_ones() -> None:
    assert config_of("Ernie4_5_") == config_of("Ernie4_5")
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert config_of("Phi3", rope_scaling=rope) == config_of("Phi3", rope_scaling={**rope, "type": "longrope"})


# --- tensors ----------------------------------------------------------------------------------------------------------


class LowBitSource:
    """A checkpoint of a Phi-3 with one packed matrix, of random levels in a layout."""

    def __init__(self, layout: Layout, shape: tuple[int, int]) -> None:
        self.matrix = random_matrix(layout, shape, 0.1, torch.Generator().manual_seed(0))

    def names(self) -> list[str]:
        return ["model.layers.0.self_attn.qkv_proj.weight"]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrix.shape

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        return dequantize(self.matrix)[rows or slice(None)][:, columns or slice(None)]

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit:
        return self.matrix.rows(rows or slice(None))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, "plain", zero=8), Layout(8, "plain"), Layout(4, "super"), Layout(5, "super"),
        Layout(6, "bytes", zero=32, group=16), FP8,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [None, slice(8, 24)])
def test_rows_of_a_low_bit_matrix_are_taken_and_ordered_as_numbers_are(layout: Layout, heads: slice | None) -> None:
    config = config_of("Phi3", hidden_size=256, num_attention_heads=4, head_dim=8, num_key_value_heads=4,
                       num_hidden_layers=1, partial_rotary_factor=0.5)  # fmt: skip
    tensors = LlamaTensors(LowBitSource(layout, (96, 256)), config)
    assert tensors.names() == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    for name in tensors.names():
        matrix = tensors.low_bit(name, torch.device("cpu"), heads, None)
        assert matrix is not None
        assert torch.equal(dequantize(matrix), tensors.tensor(name, heads))
    # Dimensions 0 and 2, 1 and 3 are pairs; they are half a head apart, and the others are between them.
    stored = tensors.stored.tensor("")[:8]
    assert torch.equal(tensors.tensor(tensors.names()[0], slice(0, 8)), stored[[0, 1, 4, 5, 2, 3, 6, 7]])


@torch.no_grad()
def test_the_text_model_of_a_mistral_3_checkpoint(tmp_path: Path) -> None:
    text = {**TINY, "model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN}
    images = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 1, "head_dim": 16, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Mistral3Config(
        text_config={**text, "tie_word_embeddings": False}, vision_config=images, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    for parameter in theirs.parameters():
        parameter.mul_(6 if parameter.dim() == 2 else 1)
    theirs.save_pretrained(tmp_path)
    prompt, params = list(range(5, 30)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=16)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == said[0, len(prompt) :].tolist()
    assert sum(each.count for each in sized("x", tmp_path).tensors) == theirs.model.language_model.num_parameters() + (
        theirs.lm_head.weight.numel()
    )
