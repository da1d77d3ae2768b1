"""Test GGUF files that lack tensors, or are one part of a split file."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from lib.engine import logits_in_chunks
from lib.gguf_files import Without, gguf_model, write_gguf
from lib.models import hf_model
from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.loader import load_llama
from minillm.weights.gguf_file import GGUFCheckpoint
from minillm.weights.package import convert

F32 = gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize(
    "absent",
    [
        ("o_proj.bias",),
        ("o_proj.bias", "k_proj.bias"),
        ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        ("up_proj.bias",),
        ("0.self_attn.q_proj.bias", "1.mlp.down_proj.bias"),
    ],
    ids=" ".join,
)
def test_a_bias_that_is_absent_is_zero(tmp_path: Path, absent: tuple[str, ...]) -> None:
    model = gguf_model(attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(absent):
                parameter.zero_()
    write_gguf(tmp_path / "m.gguf", Without(model, *absent), F32)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    config = ModelConfig.from_hf(checkpoint.config)
    assert config.attention_bias
    ours = load_llama(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    tokens = [3, 14, 15, 92, 65, 35]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_in_chunks(ours, tokens, [6]), expected, atol=2e-4, rtol=1e-4)
    # Converted, they are all there.
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(tmp_path / "m.gguf", directory, lambda progress: None)
    assert set(load_file(directory / "model.safetensors")) == set(model.state_dict())


def test_a_weight_that_is_absent_is_still_missed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Without(gguf_model(attention_bias=True), "1.self_attn.q_proj.weight"), F32)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    config = ModelConfig.from_hf(checkpoint.config)
    with pytest.raises(WeightsError, match=r"no tensor model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_llama(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        GGUFCheckpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_part_of_a_split_model_says_so(tmp_path: Path) -> None:
    model = Without(hf_model(num_hidden_layers=1, hidden_size=128, num_attention_heads=4), "model.norm.weight")
    for name in ("big-00001-of-00003.gguf", "renamed.gguf"):
        write_gguf(tmp_path / name, model, F32, **{"split.count": 3, "split.no": 0})
        said = refusal(tmp_path / name)
        assert "split into 3 files" in said
        assert "llama-gguf-split --merge" in said
    # A later part of a file that was cut into bytes.
    path = tmp_path / "big-00002-of-00002.gguf"
    path.write_bytes(bytes(range(256)) * 10)
    assert "split into 2 files" in refusal(path)


def test_a_whole_model_in_one_part_is_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00001.gguf", gguf_model(num_hidden_layers=1), F32, **{"split.count": 1})
    assert GGUFCheckpoint(tmp_path / "m-00001-of-00001.gguf").names()
    shutil.copy(tmp_path / "m-00001-of-00001.gguf", tmp_path / "merged-00001-of-00002.gguf")
    assert GGUFCheckpoint(tmp_path / "merged-00001-of-00002.gguf").names()
