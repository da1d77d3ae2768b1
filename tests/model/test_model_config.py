"""Test the values of config.json and generation_config.json: end tokens, sampling defaults, invalid values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lib.models import TINY, hf_model
from minillm import LLM, SamplingParams
from minillm.errors import UsageError, WeightsError
from minillm.loading.engine import sampling_defaults
from minillm.model.config import ModelConfig

LLAMA = {**TINY, "architectures": ["LlamaForCausalLM"]}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes}, generation)


def test_end_tokens_are_those_of_generation_config_where_it_names_any() -> None:
    """transformers' ``generate`` does the same; where it names none, config.json's count."""
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read({"eos_token_id": [7, 9, 7]}, eos_token_id=5).eos_token_ids == (7, 9)
    assert read({"eos_token_id": 7}, eos_token_id=[5, 6]).eos_token_ids == (7,)
    nothings: list[dict[str, Any]] = [{}, {"eos_token_id": None}, {"eos_token_id": []}, {"eos_token_id": 1000}]
    for nothing in nothings:
        assert read(nothing, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_a_chat_ends_with_the_tokenizers_own_end_token_too(tiny_model: Path, tmp_path: Path) -> None:
    """Templates end a turn with it, and some tuned models' generation_config.json does not name it."""
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 640]}))
    engine = LLM(str(copy), device="cpu", num_blocks=8).engine
    assert engine.tokenizer is not None
    assert engine.requests.eos_token_ids == {7, engine.tokenizer.eos_token_id}
    assert engine.tokenizer.eos_token_id not in (None, 7)


def test_ids_beyond_the_vocabulary_are_dropped() -> None:
    beyond = [96, -1, 10**400, 95, 1 << 60]
    assert read(eos_token_id=beyond).eos_token_ids == (95,)
    assert read({"eos_token_id": beyond}, eos_token_id=3).eos_token_ids == (95,)
    assert read(bos_token_id=96).bos_token_id is None
    assert read(bos_token_id=1).bos_token_id == 1


def test_an_end_token_beyond_the_vocabulary_breaks_no_request(tmp_path: Path) -> None:
    hf_model(eos_token_id=[2, 96, 5000]).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=32)
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=6)
    [first, second] = llm.generate([[3, 4, 5], [9, 8, 7]], params)
    assert len(first.outputs[0].token_ids) >= 4
    assert len(second.outputs[0].token_ids) >= 4


@pytest.mark.parametrize("value", ["2", [[2]], [2, "3"], 2.5, float("nan"), True, [None, 2], {"id": 2}])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_end_tokens_of_another_kind_are_refused(key: str, value: Any) -> None:
    with pytest.raises(WeightsError, match=key):
        read(**{key: value})
    if key == "eos_token_id":
        with pytest.raises(WeightsError, match=rf"generation_config\.json: {key}"):
            read({key: value})


def test_defaults_of_sampling_are_read() -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "do_sample": True}
    assert read({**given, "max_length": 4096, "transformers_version": "4"}).generation_defaults == given
    assert read({"temperature": None, "top_k": -1, "do_sample": False}).generation_defaults == {
        "top_k": 0,
        "do_sample": False,
    }
    assert read().generation_defaults == {}
    for name, value in read(given).generation_defaults.items():
        if name != "do_sample":
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.6"),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("temperature", 10**400),
        ("top_p", 1.5),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("top_k", 2.5),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("do_sample", "yes"),
        ("min_p", 1.5),
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("no_repeat_ngram_size", 2.5),
    ],
)
def test_defaults_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(WeightsError, match=rf"generation_config\.json: {name} must be"):
        read({name: value})


def test_a_model_brings_every_default_that_is_supported_and_the_others_are_named(
    tiny_model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    given = {"temperature": 0.7, "min_p": 0.15, "max_new_tokens": 7, "min_new_tokens": 2, "no_repeat_ngram_size": 3}
    others = {"typical_p": 0.9, "num_beams": 4, "suppress_tokens": [5], "eta_cutoff": 0.0, "forced_eos_token_id": None}
    (copy / "generation_config.json").write_text(json.dumps({**given, **others}))
    messages: list[str] = []
    with LLM(str(copy), device="cpu", num_blocks=8, on_message=messages.append) as llm:
        assert llm.default_params() == SamplingParams(
            temperature=0.7, min_p=0.15, max_tokens=7, min_tokens=2, no_repeat_ngram_size=3
        )
        [output] = llm.generate([[3, 4, 5]])
        assert 2 <= len(output.outputs[0].token_ids) <= 7
    [message] = [each for each in messages if "generation_config" in each]
    assert message == (
        "generation_config.json: typical_p, num_beams, suppress_tokens not supported, so answers ignore it"
    )


def test_a_model_that_wants_more_tokens_than_it_allows_has_as_many_as_it_allows() -> None:
    assert sampling_defaults({"min_new_tokens": 9, "max_new_tokens": 5}) == {"min_tokens": 5, "max_tokens": 5}
    assert sampling_defaults({"min_new_tokens": 10**6}) == {"min_tokens": SamplingParams.max_tokens}


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
    ({"vocab_size": 1 << 60}, "vocab_size"),
    ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
    ({"max_position_embeddings": [256]}, "max_position_embeddings"),
    ({"hidden_size": {"a": 1}}, "hidden_size"),
    ({"num_attention_heads": float("inf")}, "num_attention_heads"),
    ({"num_attention_heads": 1e300}, "num_attention_heads"),
    ({"num_key_value_heads": True}, "num_key_value_heads"),
    ({"head_dim": "8"}, "head_dim"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({"rms_norm_eps": list(range(10**5))}, "rms_norm_eps"),
    ({"hidden_act": ["silu"]}, "hidden_act"),
    ({"hidden_act": "g" * 5000}, "hidden_act"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"architectures": [5]}, "architectures"),
    ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    ({"architectures": {"a": 1}}, "architectures"),
    ({"architectures": ["x" * 5000]}, "is not supported"),
    ({"architectures": None, "model_type": ["llama"]}, "model_type"),
    ({"quantization_config": "awq"}, "quantization_config"),
    ({"quantization_config": {"quant_method": ["awq"]}}, "quant_method"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": "4096"}, "sliding_window"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("changes", "named"), NONSENSE, ids=lambda value: str(value)[:60])
def test_nonsense_is_refused_by_name_in_one_short_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_dtype_of_any_kind_is_no_matter() -> None:
    assert read(dtype="bfloat16").dtype == "bfloat16"
    assert read(dtype=["bfloat16"]).dtype is None


def test_more_layers_than_there_are_tensors_are_refused_at_the_first_that_is_missing(tmp_path: Path) -> None:
    hf_model(num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10_000}))
    with pytest.raises(WeightsError, match=r"model\.layers\.1\."):
        LLM(str(tmp_path), device="cpu", num_blocks=8)


def test_the_context_is_no_matter_where_max_model_len_is_given(tmp_path: Path) -> None:
    hf_model(num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1 << 60}))
    with pytest.raises(WeightsError, match="--max-model-len"):
        LLM(str(tmp_path), device="cpu", num_blocks=8)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=8, max_model_len=64)
    assert llm.generate([3, 4, 5], SamplingParams(max_tokens=3))


def test_a_dynamic_factor_below_1_shortens_nothing(tmp_path: Path) -> None:
    hf_model(num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    scaling = {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 0.5}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **scaling}))
    assert LLM(str(tmp_path), device="cpu", num_blocks=64).engine.max_model_len == TINY["max_position_embeddings"]


def test_a_directory_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    hf_model(num_hidden_layers=1).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=32)
    [output] = llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].text == ""
    with pytest.raises(UsageError, match="no tokenizer") as caught:
        llm.generate("some text")
    assert "\n" not in str(caught.value)
