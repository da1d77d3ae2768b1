"""Test the checkpoints of vision models: only the language model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lib.models import TINY
from minillm import LLM, SamplingParams
from minillm.errors import WeightsError
from minillm.fit.sizes import sized
from minillm.model.config import ModelConfig

IMAGES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Return a small Gemma 3 with a vision encoder, saved in ``tmp_path``."""
    text = {**TINY, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 7}
    config = transformers.Gemma3Config(
        text_config={**text, "sliding_window": 5}, vision_config=IMAGES, mm_tokens_per_image=1, image_token_index=95
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize("layout", ["new", "old"])
@torch.no_grad()
def test_the_language_model_is_loaded_and_a_message_says_so(model: Any, tmp_path: Path, layout: str) -> None:
    stored = load_file(tmp_path / "model.safetensors")
    if layout == "old":  # the names in the published checkpoints
        stored = {
            name.removeprefix("model.") if "model.language_model" not in name
            else name.replace("model.language_model.", "language_model.model."): tensor
            for name, tensor in stored.items()
        }  # fmt: skip
        assert {name.split(".")[0] for name in stored} <= {"language_model", "vision_tower", "multi_modal_projector"}
        save_file(stored, tmp_path / "model.safetensors")
    prompt, messages = [3, 17, 40, 9, 5, 60, 71], list[str]()
    llm = LLM(str(tmp_path), device="cpu", num_blocks=16, on_message=messages.append)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == said[0, len(prompt) :].tolist()
    images = sum("vision_tower" in name or "projector" in name for name in stored)
    assert images
    [message] = [each for each in messages if "images" in each]
    assert f"only the language model is loaded; {images} tensors for images are ignored" in message


def test_memory_is_estimated_for_the_language_model_alone(model: Any, tmp_path: Path) -> None:
    found = sized("x", tmp_path)
    count = ModelConfig.from_hf(model.config.to_dict()).num_parameters
    assert sum(tensor.count for tensor in found.tensors) == count
    assert count == sum(each.numel() for each in model.model.language_model.parameters())


def test_a_vision_model_of_another_language_model_is_rejected_by_name(model: Any, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "gemma9_text"
    with pytest.raises(WeightsError, match="gemma9_text") as caught:
        ModelConfig.from_hf(config)
    assert "\n" not in str(caught.value)
