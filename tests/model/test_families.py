"""Test Llama-family models against transformers, on small random models of many shapes in float32."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lib.engine import engine_for, logits_in_chunks, run
from lib.models import DEVICE, TINY, StateDict, hf_model, ours
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama

WINDOWED = {"use_sliding_window": True, "sliding_window": 12, "num_hidden_layers": 4}
LISTS = {"layer_types", "no_rope_layers"}  # which older configs have not
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"kind": "Qwen2"},
    "qwen2, tied, one kv head": {"kind": "Qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2, multi-head, yarn": {"kind": "Qwen2", "num_key_value_heads": 6, "rope_parameters": YARN},
    "qwen2, windows in the upper layers": {"kind": "Qwen2", **WINDOWED, "max_window_layers": 2},
    "qwen2, windows by layer_types": {"kind": "Qwen2", **WINDOWED, "layer_types": MIXED},
    "qwen2, a window that is not used": {"kind": "Qwen2", "sliding_window": 12, "max_window_layers": 0},
    "qwen3": {"kind": "Qwen3", "head_dim": 8},
    "qwen3, heads of another size": {"kind": "Qwen3", "head_dim": 32, "num_attention_heads": 4},
    "qwen3, head_dim 128": {"kind": "Qwen3", "num_attention_heads": 2},
    "qwen3, biases": {"kind": "Qwen3", "head_dim": 16, "attention_bias": True, "num_key_value_heads": 3},
    "qwen3, windows": {"kind": "Qwen3", "head_dim": 8, **WINDOWED, "max_window_layers": 1},
    "qwen3, dynamic rope": {"kind": "Qwen3", "head_dim": 8, "rope_parameters": DYNAMIC},
    "smollm3": {"kind": "SmolLM3", "num_hidden_layers": 9, "rope_parameters": None},
    "smollm3, every second layer": {"kind": "SmolLM3", "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "smollm3, listed layers": {"kind": "SmolLM3", "no_rope_layers": [0, 1, 0, 1], "attention_bias": True},
    "smollm3, no layer with rope": {"kind": "SmolLM3", "no_rope_layers": [0] * 3, "mlp_bias": True},
    "smollm3, windows": {"kind": "SmolLM3", **WINDOWED, "no_rope_layer_interval": 2},
    "smollm3, windows by layer_types": {"kind": "SmolLM3", **WINDOWED, "layer_types": MIXED},
    "mistral, window 1": {"kind": "Mistral", "sliding_window": 1},
    "mistral, window 2": {"kind": "Mistral", "sliding_window": 2},
    "mistral, window 12": {"kind": "Mistral", "sliding_window": 12},
    "mistral, window 37, one kv head": {"kind": "Mistral", "sliding_window": 37, "num_key_value_heads": 1},
    "mistral, window 119": {"kind": "Mistral", "sliding_window": 119, "head_dim": 16},
    "mistral, window as long as the prompt": {"kind": "Mistral", "sliding_window": 120},
    "mistral, window longer than the context": {"kind": "Mistral", "sliding_window": 4096},
    "mistral, default window": {"kind": "Mistral"},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def theirs_on(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[120], [50, 1, 1, 68], [7] * 17 + [1]], ids=["whole", "mixed", "sevens"])
def test_a_family_gives_the_logits_of_transformers(family: str, chunks: list[int]) -> None:
    theirs = hf_model(**FAMILIES[family])
    tokens = prompt_of(120)
    expected = theirs_on(theirs, tokens)
    assert expected.std() > 0.5, "flat logits would prove nothing"
    torch.testing.assert_close(logits_in_chunks(ours(theirs), tokens, chunks), expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_saved_by_transformers_says_its_greedy_tokens(tmp_path: Path, family: str) -> None:
    theirs = hf_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=64)
    prompts = [prompt_of(length, length) for length in (3, 11, 40)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        # Tokens are greedy if each is the likeliest one after those before it: one pass checks all of them.
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 24
        assert tokens == theirs_on(theirs, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_random_shapes_of_every_family() -> None:
    rng = random.Random(5)
    for seed in range(24):
        layers, kv_heads = rng.randint(1, 5), rng.choice([1, 2, 3])
        heads = kv_heads * rng.randint(1, 4)
        shape: dict[str, Any] = {
            "kind": rng.choice(["Qwen2", "Qwen3", "SmolLM3", "Mistral"]),
            "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "num_attention_heads": heads,
            "hidden_size": heads * rng.choice([4, 6, 10]), "intermediate_size": rng.randint(8, 90),
            "tie_word_embeddings": rng.random() < 0.5, "sliding_window": rng.randint(1, 50),
            "use_sliding_window": rng.random() < 0.7, "max_window_layers": rng.randint(0, 5),
            "no_rope_layer_interval": rng.randint(1, 5),
        }  # fmt: skip
        if shape["kind"] in ("Qwen3", "Mistral"):
            shape["head_dim"] = rng.choice([4, 10, 16])
        theirs = hf_model(seed, **shape)
        tokens = prompt_of(70, seed)
        cut = rng.randint(1, 68)
        got = logits_in_chunks(ours(theirs), tokens, [cut, 1, 69 - cut])
        torch.testing.assert_close(got, theirs_on(theirs, tokens), atol=5e-4, rtol=2e-4)


# --- under any load ---------------------------------------------------------------------------------------------------

LOADED = {
    **{name: FAMILIES[name] for name in ("mistral, window 12", "qwen2, windows by layer_types", "qwen3")},
    "smollm3, windows": FAMILIES["smollm3, windows"],
    "olmo3": {"kind": "Olmo3", "sliding_window": 12, "num_hidden_layers": 4},
    "gemma3": {"kind": "Gemma3", "sliding_window": 12, "head_dim": 16, "num_hidden_layers": 6},
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def outputs_of(model: Llama, requests: list[tuple[list[int], Any]], **options: Any) -> list[list[list[int]]]:
    results = run(engine_for(model, **options), requests)
    return [[completion.token_ids for completion in output.outputs] for output in results]


@cache
def each_alone(family: str) -> tuple[Llama, list[tuple[list[int], Any]], list[list[list[int]]]]:
    """A model, requests of every kind, and the tokens of each where it is the only one."""
    model = ours(hf_model(**LOADED[family]))
    rng = random.Random(1)
    head = prompt_of(22, 99)
    prompts = [(head if i % 2 else []) + prompt_of(rng.randint(1, 30), i) for i in range(6)]
    sampled = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=12)
    requests = [(prompt, (GREEDY, sampled, beams)[i % 3]) for i, prompt in enumerate(prompts)]
    return model, requests, [outputs_of(model, [request], num_blocks=128)[0] for request in requests]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("family", LOADED)
def test_chunks_batches_shared_prefixes_and_preemption_change_nothing(family: str, on_device: bool) -> None:
    model, requests, alone = each_alone(family)
    for options in (
        {"num_blocks": 512, "max_num_batched_tokens": 512},
        {"num_blocks": 512, "max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"num_blocks": 34},
        {"num_blocks": 34, "host_blocks": 40, "admission": "optimistic"},
    ):
        assert outputs_of(model, requests, on_device=on_device, **options) == alone, options


@pytest.mark.parametrize("family", LOADED)
def test_a_cached_prefix_gives_the_same_tokens(family: str) -> None:
    model = ours(hf_model(**LOADED[family]))
    prompt = prompt_of(50)
    engine = engine_for(model, num_blocks=128)
    first, second = (run(engine, [(prompt, GREEDY)])[0] for _ in range(2))
    assert engine.figures.cache_stats().num_hit_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


# --- the config -------------------------------------------------------------------------------------------------------


def config_of(kind: str, **keys: Any) -> ModelConfig:
    return ModelConfig.from_hf({**TINY, "architectures": [f"{kind}ForCausalLM"], **keys})


def windows_of(config: ModelConfig, longest: int) -> list[int | None]:
    """The windows of a model's layers where sequences have up to ``longest`` tokens."""
    theirs = hf_model(kind="Mistral", num_hidden_layers=config.num_layers)
    model = load_llama(
        StateDict(theirs.state_dict()), config, device=DEVICE, dtype=torch.float32, max_positions=longest
    )
    return [layer.attention.window for layer in model.layers]


def test_keys_that_are_left_out_mean_what_they_mean_to_transformers() -> None:
    assert config_of("Mistral").windows == (4096,) * 3
    assert config_of("Mistral", sliding_window=None).windows == ()
    assert config_of("Llama", sliding_window=12, layer_types=["sliding_attention"] * 3).windows == ()
    assert config_of("Qwen2", sliding_window=12, max_window_layers=0).windows == ()
    assert config_of("Qwen2", use_sliding_window=True).windows == (), "the first 28 layers see everything"
    assert config_of("Qwen2", use_sliding_window=True, max_window_layers=2).windows == (None, None, 4096)
    assert config_of("Qwen3").head_dim == 128
    assert config_of("Qwen2").head_dim == 8
    assert config_of("SmolLM3").tie_word_embeddings
    assert config_of("SmolLM3").rope.theta == 2e6
    assert config_of("SmolLM3", rope_theta=5e6).rope.theta == 5e6
    assert config_of("SmolLM3", num_hidden_layers=9).layers_without_rope == (3, 7)


@pytest.mark.parametrize("family", [name for name, keys in FAMILIES.items() if not LISTS & keys.keys()])
def test_a_config_without_lists_of_layers_means_the_lists_that_transformers_makes(family: str) -> None:
    keys = hf_model(**FAMILIES[family]).config.to_dict()
    older = {key: value for key, value in keys.items() if key not in LISTS}
    assert ModelConfig.from_hf(older) == ModelConfig.from_hf(keys)


def test_a_window_that_holds_every_sequence_is_none() -> None:
    config = config_of("Mistral", sliding_window=48)
    assert windows_of(config, 48) == [None] * 3
    assert windows_of(config, 49) == [48] * 3


def test_biases_and_norms_are_counted() -> None:
    for family in ("qwen2", "qwen3", "qwen3, biases", "smollm3, listed layers"):
        theirs = hf_model(**FAMILIES[family])
        assert ModelConfig.from_hf(theirs.config.to_dict()).num_parameters == theirs.num_parameters(), family


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("Qwen2Moe", {}, "Qwen2MoeForCausalLM"),
        ("Qwen3Moe", {}, "Qwen3MoeForCausalLM"),
        ("Gemma2", {}, "Gemma2ForCausalLM"),
        ("MiniCPM3", {}, "MiniCPM3ForCausalLM"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window"),
        ("Qwen2", {"use_sliding_window": "yes", "sliding_window": 9}, "use_sliding_window"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ("Qwen2", {"layer_types": ["full_attention"] * 2}, "layer_types must be a list of 3"),
        ("Qwen2", {"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types"),
        ("Qwen3", {"layer_types": "full_attention"}, "layer_types"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 3}, "contradict"),
        ("SmolLM3", {"layer_types": [["x"]] * 3}, "layer_types"),
        ("SmolLM3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, "contradict"),
        ("Mistral", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "contradict"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 3"),
        ("SmolLM3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layers": "101"}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
    ids=str,
)
def test_other_models_and_nonsense_are_refused_in_one_line(kind: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        config_of(kind, **keys)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(not hasattr(transformers, "InternLM3Config"), reason="this version of transformers lacks it")
@pytest.mark.parametrize("keys", [("qkv_bias", "bias"), ("attention_bias", "mlp_bias")])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_an_internlm3_is_a_llama_whose_biases_have_other_keys(keys: tuple[str, str], biased: bool) -> None:
    theirs = hf_model(attention_bias=biased, mlp_bias=biased, head_dim=128, num_attention_heads=2)
    config = {**theirs.config.to_dict(), "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    for key in ("attention_bias", "mlp_bias", "head_dim"):  # heads of 128 are its default
        config.pop(key)
    config |= dict.fromkeys(keys, biased)
    model = transformers.AutoModelForCausalLM.from_config(transformers.InternLM3Config(**config)).eval()
    model.load_state_dict(theirs.state_dict())
    model.config.architectures = ["InternLM3ForCausalLM"]
    found = ModelConfig.from_hf(config)
    assert found.num_parameters == model.num_parameters()
    tokens, source = prompt_of(40), StateDict(model.state_dict())
    mine = load_llama(source, found, device=DEVICE, dtype=torch.float32, max_positions=64)
    torch.testing.assert_close(
        logits_in_chunks(mine, tokens, [40]), theirs_on(model, tokens).to(DEVICE), atol=3e-4, rtol=1e-4
    )


def test_a_llama_with_norms_of_q_and_k_is_refused() -> None:
    theirs = hf_model(kind="Qwen3", head_dim=8)
    config = ModelConfig.from_hf(theirs.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(WeightsError, match=r"does not use, such as model\.layers\.0\.self_attn\.k_norm\.weight"):
        load_llama(StateDict(theirs.state_dict()), config, device=DEVICE, dtype=torch.float32, max_positions=64)
