"""Test random weights in the quantizations of files."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels.linear.low_bit.layouts import FP8, dequantize
from minillm.model.random_tensors import RandomTensors
from minillm.model.shapes import SHAPES
from minillm.storage import QUANTIZATIONS

CPU = torch.device("cpu")
MATRIX, EMBEDDING = "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("form", QUANTIZATIONS)
def test_matrices_have_few_bits_and_look_like_weights(form: str) -> None:
    source = RandomTensors(SHAPES["llama-1b"], CPU, form=form)
    matrix = source.low_bit(MATRIX, CPU, None, None)
    assert matrix is not None
    assert matrix.shape == source.shape(MATRIX)
    assert 0.01 < float(dequantize(matrix.rows(slice(0, 16))).std()) < 0.04
    assert (matrix.layout == FP8) == (form == "fp8")


def test_fp8_is_of_the_layers_alone() -> None:
    assert RandomTensors(SHAPES["llama-1b"], CPU, form="fp8").low_bit(EMBEDDING, CPU, None, None) is None
