"""Test the function of all layers for a single token against the model's own ops, uncompiled and compiled."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.engine import logits_in_chunks
from lib.kernels import relative_error
from lib.models import in_4_bits, needs_products_of_8_bits
from minillm.loading import compiling
from minillm.model.llama import Batch, Llama
from minillm.model.one_token import CompiledLlama, Layer, OneToken, layer_shape, layer_weights

KINDS: dict[str, dict[str, Any]] = {
    "groups of two": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "norms of heads": {"kind": "Qwen3", "num_key_value_heads": 1, "head_dim": 32},
    "norms of heads after rotary": {"kind": "HunYuanDenseV1", "head_dim": 32},
    "multipliers": {"kind": "Granite", "attention_multiplier": 0.1, "residual_multiplier": 0.3},
    "a window": {"kind": "Mistral", "sliding_window": 5},
    "layers without rotary": {"kind": "SmolLM3", "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "as many kv heads": {"num_key_value_heads": 4},
}
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]

pytestmark = needs_products_of_8_bits


def by_torch(model: Llama) -> tuple[CompiledLlama, list[int]]:
    """The model with `Layer` in the place of its ops, and the lengths that each call was for."""
    shape, lengths = layer_shape(model), []
    assert shape is not None
    layer = Layer(shape)

    def run(arguments: list[Tensor]) -> list[Tensor]:
        lengths.append(len(arguments[6]))
        return [layer(*arguments[:7], arguments[7:])]

    layers = [(each.attention, layer_weights(each)) for each in model.layers]
    return CompiledLlama.of(model, OneToken(run, layers)), lengths


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_computes_as_the_ops_do(kind: str) -> None:
    model = in_4_bits(**KINDS[kind])
    single, lengths = by_torch(model)
    chunks = [4, *[1] * 8]
    expected, got = logits_in_chunks(model, TOKENS, chunks), logits_in_chunks(single, TOKENS, chunks)
    # Activations are rounded to bfloat16 in front of each product: a last digit that differs may become 2^-8 of it.
    assert relative_error(got, expected) < 0.01
    windows = [layer.attention.window or 99 for layer in model.layers]
    assert lengths == [min(length, window) for length in range(5, 13) for window in windows]


def test_without_roundings_it_is_the_layer_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, with products of the same matrices that round nothing."""
    model = in_4_bits(attention_bias=True)
    single, shape = by_torch(model)[0].one_token, layer_shape(model)
    assert shape is not None
    weights, multiply = single.layers[0][1], torch.ops.aten._weight_int4pack_mm_for_cpu
    matrices: dict[int, Tensor] = {}
    for held, pairs in pairwise(weights):
        if held.dtype == torch.uint8:  # products with a single one are exact
            ones = torch.eye(held.shape[1] * 2).bfloat16()
            rows = [multiply(row[None], held, 32, pairs) for row in ones]
            matrices[held.data_ptr()] = torch.cat(rows).float()  # [in, out]
    x, cos, sin, pool, slots = _inputs(model, 9)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", lambda x: x)
        patch.setattr(
            torch.ops.aten,
            "_weight_int4pack_mm_for_cpu",
            lambda x, held, group, pairs: x @ matrices[held.data_ptr()],
        )
        got = Layer(shape)(x, cos, sin, *pool.clone().unbind(0), slots[-1:], slots, weights)
    expected = _in_float64(model, x, cos, sin, pool, slots, [each.double() for each in matrices.values()])
    assert relative_error(got, expected.float()) < 1e-5


def _inputs(model: Llama, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A token's ``x``, ``cos``, ``sin``, a pool ``[2, slots, kv heads, head_dim]`` with NaN in it, and slots."""
    c = model.config
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(1, c.hidden_size, generator=generator)
    cos, sin = model.rotary.rows(torch.tensor([length - 1]))
    pool = torch.full((2, 200, c.num_kv_heads, c.head_dim), float("nan"))
    slots = torch.randperm(200, generator=generator)[:length]
    pool[:, slots[:-1]] = torch.randn(2, length - 1, c.num_kv_heads, c.head_dim, generator=generator)
    return x, cos, sin, pool, slots


def _in_float64(
    model: Llama, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor, matrices: list[Tensor]
) -> Tensor:
    """The first layer's output, by the paper. ``matrices`` are ``[in, out]``."""
    c, layer, heads = model.config, model.layers[0], model.config.num_heads
    x, cos, sin = x.double(), cos.double(), sin.double()

    def norm(row: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return row / (row.square().mean() + c.rms_norm_eps).sqrt() * weight.double()

    def biased(row: Tensor, bias: Tensor | None) -> Tensor:
        return row if bias is None else row + bias.double()

    q, k, v = biased(norm(x, layer.input_norm) @ matrices[0], layer.qkv.bias).view(-1, c.head_dim).split(
        [heads, c.num_kv_heads, c.num_kv_heads]
    )  # fmt: skip
    half = c.head_dim // 2
    turned = [
        torch.cat((h[:, :half] * cos - h[:, half:] * sin, h[:, half:] * cos + h[:, :half] * sin), 1) for h in (q, k)
    ]
    keys, values = (torch.cat((pool[i, slots[:-1]].double(), new[None])) for i, new in ((0, turned[1]), (1, v)))
    outputs = []
    for head in range(heads):
        kv = head // (heads // c.num_kv_heads)
        scores = keys[:, kv] @ turned[0][head] / c.head_dim**0.5
        outputs.append(scores.softmax(0) @ values[:, kv])
    x = x + biased(torch.cat(outputs)[None] @ matrices[1], layer.o.bias)
    gate, up = biased(norm(x, layer.post_attention_norm) @ matrices[2], layer.gate_up.bias).chunk(2, 1)
    return x + biased((gate * gate.sigmoid() * up) @ matrices[3], layer.down.bias)


@pytest.mark.slow
@pytest.mark.skipif(compiling.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="no layers are compiled on a machine with a GPU")
def test_compiled_it_computes_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function for all layers and lengths; it writes K and V of the token, and reads no slot of others."""
    model = in_4_bits(kind="Qwen3", attention_bias=True, head_dim=32)
    shape = layer_shape(model)
    assert shape is not None
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    # Otherwise torch compiles six programs to find out which vector instructions the compiler knows.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    messages: list[str] = []
    faster = compiling.with_compiled_layers(model, lambda each: None, messages.append)
    assert not messages
    assert isinstance(faster, CompiledLlama)
    compiled = faster.one_token
    layer = Layer(shape)
    for length in (2, 3, 17, 100, 200):
        x, cos, sin, pool, slots = _inputs(model, length)
        for _, weights in compiled.layers:
            expected_pool, got_pool = pool.clone(), pool.clone()
            rest = (slots[-1:], slots)
            expected = layer(x, cos, sin, *expected_pool.unbind(0), *rest, weights)
            with torch.inference_mode():
                (got,) = compiled.run([x, cos, sin, *got_pool.unbind(0), *rest, *weights])
            assert relative_error(got, expected) < 0.01
            torch.testing.assert_close(got_pool, expected_pool, equal_nan=True)
            assert not got_pool[:, slots].isnan().any()
    chunks = [5, *[1] * 7]
    assert relative_error(logits_in_chunks(faster, TOKENS, chunks), logits_in_chunks(model, TOKENS, chunks)) < 0.01


def test_only_layers_that_are_alike_and_of_4_bits_are_compiled() -> None:
    model = in_4_bits()
    assert layer_shape(model) == layer_shape(in_4_bits(storage="int4")) is not None
    assert layer_shape(replace(model, kv_in_8_bits=True)) is None
    for kind in ("Olmo2", "Exaone4", "Gemma3"):  # norms after attention and MLP, norms over all heads, GELU
        assert layer_shape(in_4_bits(kind=kind, pad_token_id=0)) is None
    other = in_4_bits(attention_bias=True)
    assert layer_shape(replace(model, layers=[model.layers[0], other.layers[0]])) is None
    plain = replace(model.layers[0], down=replace_packed(model.layers[0].down))
    assert layer_shape(replace(model, layers=[plain])) is None


def replace_packed(linear: Any) -> Any:
    """The linear layer without its 4 bits."""
    result = copy.copy(linear)
    result.packed = replace(linear.packed, in_4_bits=None)
    return result


def one_decode(length: int, **changes: Any) -> Batch:
    facts: dict[str, Any] = {
        "token_ids": torch.tensor([5]), "positions": torch.tensor([length - 1]), "slot_mapping": torch.tensor([length]),
        "block_tables": torch.zeros(1, 8, dtype=torch.int32), "context_lens": torch.tensor([length], dtype=torch.int32),
        "num_decodes": 1, "cu_seqlens": torch.tensor([0], dtype=torch.int32),
    }  # fmt: skip
    return Batch(**{**facts, **changes})


def test_it_is_for_one_token_of_one_sequence_that_is_not_the_first() -> None:
    single = by_torch(in_4_bits())[0].one_token
    assert single.takes(one_decode(2))
    assert not single.takes(one_decode(1))
    assert not single.takes(one_decode(9, num_decodes=0))
    assert not single.takes(one_decode(9, token_ids=torch.tensor([5, 6])))
    windowed = by_torch(in_4_bits(kind="Mistral", sliding_window=1))[0].one_token
    assert windowed is not None
    assert not windowed.takes(one_decode(9))
