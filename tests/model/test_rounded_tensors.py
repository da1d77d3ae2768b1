"""Test quantization while loading: the model computes with the rounded weights. A CPU rounds none."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from lib.engine import logits_in_chunks
from lib.models import hf_model
from minillm import LLM, kernels
from minillm.errors import UsageError
from minillm.kernels.linear.low_bit.layouts import dequantize, in_fp8
from minillm.kernels.linear.low_bit.rounding import rounded
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import TensorSource, load_llama
from minillm.model.rounded_tensors import RoundedTensors
from minillm.weights.checkpoint import SafetensorsCheckpoint

CPU = torch.device("cpu")


class Numbers(RoundedTensors):
    """The rounded matrices as numbers."""

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        stored = self.low_bit(name, CPU, rows, columns)
        return super().tensor(name, rows, columns) if stored is None else dequantize(stored)


@pytest.fixture
def checkpoint(tmp_path: Path) -> SafetensorsCheckpoint:
    hf_model(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    return SafetensorsCheckpoint(tmp_path)


def load(source: TensorSource, checkpoint: SafetensorsCheckpoint, weights: Literal["stored", "expanded"]) -> Llama:
    config = ModelConfig.from_hf(checkpoint.config)
    return load_llama(source, config, device=CPU, dtype=torch.float32, max_positions=64, weights=weights)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted, on tensors of the CPU")
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_a_model_computes_with_them(
    checkpoint: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    pytest.importorskip("triton")
    from minillm.kernels.linear.low_bit import choose as low_bit_linear

    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    expected = load(Numbers(checkpoint, form), checkpoint, "expanded")
    model = load(RoundedTensors(checkpoint, form), checkpoint, "stored")
    assert all(weight.parts for layer in model.layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert bool(model.head.parts) == (form != "fp8")
    assert isinstance(model.embedding, Tensor)
    tokens = [3, 14, 15, 92, 65, 35]
    found, exact = (logits_in_chunks(each, tokens, [5, 1]) for each in (model, expected))
    torch.testing.assert_close(found, exact, atol=2e-3, rtol=2e-3)
    plain = logits_in_chunks(load(checkpoint, checkpoint, "stored"), tokens, [5, 1])
    assert float((plain - exact).abs().max()) > (1e-5 if form == "int8" else 1e-3), "nothing was rounded"


def test_a_rank_rounds_its_part(checkpoint: SafetensorsCheckpoint) -> None:
    name, part = "model.layers.0.self_attn.o_proj.weight", (slice(8, 24), slice(32, 64))
    stored = RoundedTensors(checkpoint, "int4").low_bit(name, CPU, *part)
    assert stored is not None
    assert torch.equal(dequantize(stored), dequantize(rounded(checkpoint.tensor(name, *part), 4)))
    assert RoundedTensors(checkpoint, "int4").low_bit(name, CPU, None, slice(0, 16)) is None, "no group is whole"
    in_8_bits = RoundedTensors(checkpoint, "fp8").low_bit(name, CPU, None, slice(0, 16))
    assert in_8_bits is not None
    assert torch.equal(dequantize(in_8_bits), dequantize(in_fp8(checkpoint.tensor(name, None, slice(0, 16)))))


def test_a_cpu_rounds_nothing() -> None:
    with pytest.raises(UsageError, match=r"quantize int4 needs a GPU; .* --weights int8"):
        LLM("smollm2-135m", load_format="dummy", device="cpu", quantize="int4")
