"""Test each architecture against transformers, on random small configurations in float32, and as a GGUF file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from lib.architectures import CASES
from lib.beams import assert_same, expected
from lib.engine import engine_for, logits_in_chunks, run
from lib.gguf_files import converted, write_gguf
from lib.models import DEVICE, TINY, StateDict, hf_model, ours
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.errors import WeightsError
from minillm.kernels.linear.low_bit.layouts import dequantize
from minillm.model.config import ModelConfig
from minillm.model.llama_tensors import LlamaTensors
from minillm.model.loader import load_llama
from minillm.weights.gguf_file import GGUFCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(5, 100))]


def random_model(case: str, seed: int) -> tuple[Any, random.Random]:
    rng = random.Random(f"{case} {seed}")
    return hf_model(seed, **CASES[case](rng)), rng


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_architecture_computes_what_transformers_computes(case: str, seed: int) -> None:
    theirs, rng = random_model(case, seed)
    assert ModelConfig.from_hf(theirs.config.to_dict()).num_parameters == theirs.num_parameters()
    model, tokens = ours(theirs), [rng.randrange(3, 96) for _ in range(70)]
    cut = rng.randint(1, 68)
    logits = theirs(torch.tensor([tokens])).logits[0]
    assert logits.std() > 0.1, "flat logits would prove nothing"
    got = logits_in_chunks(model, tokens, [cut, 1, 69 - cut])
    torch.testing.assert_close(got.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=0)
    prompt = tokens[: rng.randint(1, 40)]
    greedy = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=None
    )
    beams = expected(theirs, prompt, BEAMS, [2], use_cache=False)
    engine = engine_for(model, num_blocks=128, eos=frozenset({2}))
    outputs = run(engine, [(prompt, GREEDY), (prompt, BEAMS)])
    assert outputs[0].outputs[0].token_ids == greedy[0, len(prompt) :].tolist()
    assert_same(outputs[1], *beams)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("helium", "ministral")])  # not in llama.cpp
def test_a_gguf_file_of_an_architecture_is_the_same_model(case: str, seed: int, tmp_path: Path) -> None:
    theirs, rng = random_model(case, seed)
    path = tmp_path / "m.gguf"
    write_gguf(path, theirs, gguf.GGMLQuantizationType.F32, **converted(theirs.config))
    checkpoint = GGUFCheckpoint(path)
    for name, tensor in theirs.state_dict().items():
        if name in checkpoint.names():
            torch.testing.assert_close(checkpoint.tensor(name), tensor, atol=2e-7, rtol=0)
    config = ModelConfig.from_hf(checkpoint.config)
    stored = LlamaTensors(checkpoint, config)
    model = load_llama(stored, config, device=DEVICE, dtype=torch.float32, max_positions=256)
    tokens = [rng.randrange(3, 96) for _ in range(70)]
    logits = [logits_in_chunks(each, tokens, [40, 1, 29]).log_softmax(-1) for each in (model, ours(theirs))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


# Of these, q and k are permuted or gate and up are packed. Rows of 64 numbers are two blocks of a quantization.
LOW_BIT: dict[str, dict[str, Any]] = {
    "glm4": {"kind": "Glm4", "head_dim": 32},
    "phi3": {"kind": "Phi3", "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75}},
    "gemma3": {"kind": "Gemma3", "head_dim": 32},
}


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("case", LOW_BIT)
def test_quantized_matrices_are_permuted_and_split_as_they_are_stored(case: str, stored: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    theirs = hf_model(**{**sizes, **LOW_BIT[case]}, num_hidden_layers=2)
    write_gguf(tmp_path / "m.gguf", theirs, gguf.GGMLQuantizationType[stored], **converted(theirs.config))
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    config = ModelConfig.from_hf(checkpoint.config)
    source, found = LlamaTensors(checkpoint, config), 0
    for name in source.names():
        rows = slice(32, 64) if len(source.shape(name)) == 2 else None
        matrix = source.low_bit(name, torch.device("cpu"), rows, None)
        if matrix is not None:
            found += 1
            torch.testing.assert_close(dequantize(matrix), source.tensor(name, rows), msg=name)
    assert found == 2 * 7 + (1 if config.tie_word_embeddings else 2)
    # A rank's rows of q are those of the whole matrix.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source.tensor(name)[32:], source.tensor(name, slice(32, 64)))
    prompt = [5, 9, 17, 40, 3, 77, 61]
    expected = None
    choices: list[dict[str, Any]] = [
        {"weights": "expanded"}, {"kv_cache_dtype": "int8"}, {"weights": "int8"}, {"weights": "stored"}
    ]  # fmt: skip
    for options in choices:
        llm = LLM(str(tmp_path / "m.gguf"), device="cpu", num_blocks=16, enforce_eager=True, **options)
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2))
        assert len(output[0].outputs[0].token_ids) == 4
        expected = expected or output[0].outputs[0].token_ids
        assert output[0].outputs[0].token_ids[0] == expected[0], options


ROPES = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}
ODD: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
    ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be"),
    ("Gemma3", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "contradict"),
    ("Gemma3", {"rope_parameters": ROPES}, "rope type dynamic of layers with a window"),
    ("Gemma3", {"rope_parameters": {"full_attention": {}, "sliding_attention": 5}}, "sliding_attention must be"),
    ("Gemma3", {"rope_parameters": {"linear_attention": {}}}, r"settings per kind of layer \(linear_attention\)"),
    ("Olmo3", {"layer_types": ["full_attention"] * 2}, "layer_types must be a list of 3"),
    ("Olmo3", {"sliding_window": 0}, "sliding_window must be"),
    ("Olmo2", {"rope_parameters": ROPES}, "settings per kind of layer"),
    ("Olmo2", {"num_key_value_heads": 4}, "not a multiple of num_key_value_heads 4"),
    ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a whole number"),
    ("Glm4", {"partial_rotary_factor": 0.4, "head_dim": 8}, "rotates 3 of 8 dimensions"),
    ("Glm4", {"partial_rotary_factor": 0}, "rotates 0 of 128 dimensions"),
    ("Glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
]


@pytest.mark.parametrize(("kind", "keys", "said"), ODD, ids=str)
def test_an_odd_configuration_is_rejected_in_one_line(kind: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        ModelConfig.from_hf({**TINY, "architectures": [f"{kind}ForCausalLM"], **keys})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_two_tensors_for_one_parameter_are_rejected() -> None:
    theirs = hf_model(kind="Olmo2", num_hidden_layers=1)
    tensors, prefix = dict(theirs.state_dict()), "model.layers.0."
    tensors[f"{prefix}post_self_attn_layernorm.weight"] = tensors[f"{prefix}post_attention_layernorm.weight"]
    config = ModelConfig.from_hf(theirs.config.to_dict())
    with pytest.raises(WeightsError, match=r"post_self_attn_layernorm\.weight are the same"):
        LlamaTensors(StateDict(tensors), config).names()


def test_packed_rows_that_do_not_fit_are_named() -> None:
    theirs = hf_model(kind="Glm4", num_hidden_layers=1)
    tensors, name = dict(theirs.state_dict()), "model.layers.0.mlp.gate_up_proj.weight"
    tensors[name] = tensors[name][:-1]
    config = ModelConfig.from_hf(theirs.config.to_dict())
    source = LlamaTensors(StateDict(tensors), config)
    with pytest.raises(WeightsError, match=r"gate_proj\.weight has shape \(159, 48\)"):
        load_llama(source, config, device=DEVICE, dtype=torch.float32, max_positions=64)
