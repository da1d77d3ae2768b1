"""Every supported variant of the Llama family against transformers, on small random weights in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.engine import logits_in_chunks
from lib.models import StateDict, hf_model, ours
from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.loader import load_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "explicit-head-dim": {"head_dim": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic-within": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn-mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn-betas": {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    "yarn-attention-factor": {"rope_parameters": {**YARN, "attention_factor": 1.3}},
    "mistral": {"kind": "Mistral", "sliding_window": None},
}


def prompt_of(length: int, vocab: int = 96) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[120], [50, 1, 1, 68], [7] * 17 + [1]], ids=["whole", "mixed", "sevens"])
def test_variant_gives_the_logits_of_transformers(variant: str, chunks: list[int]) -> None:
    theirs = hf_model(**VARIANTS[variant])
    tokens = prompt_of(120)
    expected = hf_logits(theirs, tokens)
    got = logits_in_chunks(ours(theirs), tokens, chunks)
    assert expected.std() > 0.5, "flat logits would prove nothing"
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [200, 257, 400])
def test_dynamic_scaling_beyond_the_trained_context(length: int) -> None:
    theirs = hf_model(**VARIANTS["dynamic-within"])
    tokens = prompt_of(length)
    expected = hf_logits(theirs, tokens)
    got = logits_in_chunks(ours(theirs, max_positions=512), tokens, [length - 100, 100])
    torch.testing.assert_close(got, expected, atol=3e-4, rtol=1e-4)


OLD_KEYS = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    "yarn": {**{key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")}, "type": "yarn"},
}


@pytest.mark.parametrize("name", OLD_KEYS)
def test_old_and_new_rope_keys_mean_the_same(name: str) -> None:
    base = hf_model().config.to_dict()
    del base["rope_parameters"]
    old = ModelConfig.from_hf({**base, "rope_theta": 50_000.0, "rope_scaling": OLD_KEYS[name]})
    scaling = {key: value for key, value in OLD_KEYS[name].items() if key != "type"}
    new = ModelConfig.from_hf({**base, "rope_parameters": {"rope_type": name, **scaling, "rope_theta": 50_000.0}})
    assert old == new
    assert old.rope.theta == 50_000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "mrope"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": "x", "factor": 2.0}}, "rope_theta"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": 47}, "head_dim"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"intermediate_size": 2.5}, "intermediate_size"),
        ({"attention_bias": "yes"}, "attention_bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {**hf_model().config.to_dict(), "head_dim": None, "architectures": ["LlamaForCausalLM"], **change}
    with pytest.raises(WeightsError, match=named):
        ModelConfig.from_hf(config)


def load(tensors: dict[str, torch.Tensor], config: ModelConfig) -> Any:
    return load_llama(StateDict(tensors), config, device=torch.device("cpu"), dtype=torch.float32, max_positions=256)


@pytest.mark.parametrize("tied", [True, False])
def test_every_missing_tensor_is_named(tied: bool) -> None:
    theirs = hf_model(tie_word_embeddings=tied, num_hidden_layers=1, attention_bias=True)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    tensors = dict(theirs.state_dict())
    for name in tensors:
        if tied and name == "lm_head.weight":
            continue
        with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
            load({key: value for key, value in tensors.items() if key != name}, config)


def test_wrong_shapes_and_unknown_tensors_are_named() -> None:
    theirs = hf_model(num_hidden_layers=1)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    tensors = dict(theirs.state_dict())
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        load({**tensors, "model.norm.weight": torch.ones(3)}, config)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.extra"):
        load({**tensors, "model.layers.1.extra": torch.ones(3)}, config)
    load({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, config)


@pytest.mark.parametrize("stored", ["absent", "equal", "different"])
def test_a_tied_model_uses_a_stored_head_only_where_it_differs(stored: str) -> None:
    theirs = hf_model(tie_word_embeddings=True)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if stored != "different" else embedding + 1
    if stored != "absent":
        tensors["lm_head.weight"] = head.clone()
    tokens = prompt_of(9)
    with torch.no_grad():
        expected = theirs.model(torch.tensor([tokens])).last_hidden_state[0] @ head.T
    torch.testing.assert_close(logits_in_chunks(load(tensors, config), tokens, [9]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    theirs = hf_model()
    tokens = prompt_of(60)
    exact = hf_logits(theirs, tokens)
    error = (logits_in_chunks(ours(theirs, dtype=dtype), tokens, [30, 30]) - exact).norm() / exact.norm()
    other = (hf_logits(theirs.to(dtype), tokens).float() - exact).norm() / exact.norm()
    assert error < 1.5 * other
