"""Test engines with quantized matrices: all kinds of requests answer as with the dequantized matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model
from minillm import BeamSearchParams, SamplingParams, kernels
from minillm.kernels.linear.low_bit.layouts import dequantize
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.model.rounded_tensors import RoundedTensors
from minillm.weights.checkpoint import SafetensorsCheckpoint

pytest.importorskip("triton")
from minillm.kernels.linear.low_bit import choose as low_bit_linear

REQUESTS: list[tuple[list[int], Any]] = [
    ([3, 14, 15, 92, 65, 35], SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)),
    ([27, 18, 28], SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=4, ignore_eos=True)),
    ([31, 41, 59, 26, 53], BeamSearchParams(max_tokens=5, beam_width=3)),
]


class Numbers(RoundedTensors):
    """The rounded matrices as numbers."""

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        stored = self.low_bit(name, DEVICE, rows, columns)
        return super().tensor(name, rows, columns) if stored is None else dequantize(stored)


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Llama, Llama]:
    """A model of one layer, quantized and dequantized. Without a GPU the kernels are interpreted."""
    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    hf_model(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False).save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    config = ModelConfig.from_hf(checkpoint.config)

    def load(source: RoundedTensors, weights: Any) -> Llama:
        return load_llama(source, config, device=DEVICE, dtype=torch.float32, max_positions=128, weights=weights)

    low_bit = load(RoundedTensors(checkpoint, request.param), "stored")
    assert all(linear.parts for linear in low_bit.linears)
    return low_bit, load(Numbers(checkpoint, request.param), "expanded")


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("models", "num_blocks", "host_blocks"),
    [("int8", 64, 0), ("int8", 9, 0), ("int4", 9, 16)], indirect=["models"], ids=["ample", "recompute", "swap"],
)  # fmt: skip
def test_all_kinds_of_requests(models: tuple[Llama, Llama], num_blocks: int, host_blocks: int) -> None:
    low_bit, unpacked = models
    expected = tokens(run(engine_for(unpacked), REQUESTS))
    options: dict[str, Any] = {"num_blocks": num_blocks, "host_blocks": host_blocks, "admission": "optimistic"}
    engine = engine_for(low_bit, **options, on_device=True)
    assert tokens(run(engine, REQUESTS)) == expected
    assert bool(engine.scheduler.preemption.count) == (num_blocks < 64)


@pytest.mark.parametrize("models", ["int4"], indirect=True)
def test_steps_of_many_tokens_by_a_copy(models: tuple[Llama, Llama]) -> None:
    """The prompt uses the copy in 16 bits (here 32), and the answer uses the quantized matrices."""
    low_bit, unpacked = models
    for linear in low_bit.linears:
        linear.keep_copy(torch.float32)
    requests = [([index * 7 % 96 for index in range(80)], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))]
    engine = engine_for(low_bit, max_num_batched_tokens=128)
    assert tokens(run(engine, requests)) == tokens(run(engine_for(unpacked), requests))
