"""Rotary embeddings that config.json may ask for, against transformers with the same keys."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from lib.engine import engine_for, logits_in_chunks, run
from lib.models import DEVICE, TINY, StateDict, hf_model
from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.model.rope import RotaryTable
from minillm.model.rope_scaling import inverse_frequencies
from minillm.params import SamplingParams

CONTEXT, PAIRS, ORIGINAL = 256, 4, 64  # of TINY: its context, its head_dim / 2; and the context before it was stretched
SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.0, 2.5, 6.0, 9.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Keys as they stand in a config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "yarn finetuned": {"rope_scaling": {**OLD_YARN, "finetuned": True}},
    "yarn, factor from the contexts": {"rope_scaling": {**OLD_YARN, "factor": None}},
    "yarn, original context beside it": {"rope_scaling": OLD_YARN, "original_max_position_embeddings": 32},
    "longrope": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": ORIGINAL}},
    "longrope, original context beside it": {"rope_scaling": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "longrope, factor": {
        "rope_scaling": {**LONGROPE, "factor": 16.0, "original_max_position_embeddings": ORIGINAL},
        "rope_theta": 50_000.0,
    },
    "longrope, attention factor": {
        "rope_scaling": {**LONGROPE, "attention_factor": 1.4, "original_max_position_embeddings": ORIGINAL}
    },
    "longrope, never stretched": {"rope_scaling": LONGROPE},
    "proportional": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
    "proportional, factor": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0}},
    "proportional, a share": {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "no theta": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "theta beside the parameters": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 777.0},
    "empty parameters": {"rope_parameters": {}, "rope_theta": 777.0},
    "llama3, no original context": {"rope_scaling": LLAMA3},
    "partial rotary factor null": {"partial_rotary_factor": None, "rope_theta": 1e4},
    "eps 0": {"rms_norm_eps": 0.0},
    "a left-over window": {"sliding_window": 32},
    "dynamic below 1": {"rope_scaling": {"type": "dynamic", "factor": 0.5}},
    "unknown keys": {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3, "note": "x"}},
}


def theirs_and_ours(keys: dict[str, Any], max_positions: int = CONTEXT) -> tuple[Any, Llama]:
    theirs = hf_model(**deepcopy(keys))  # it fills them in
    layers = theirs.config.num_hidden_layers
    config = ModelConfig.from_hf({**TINY, "num_hidden_layers": layers, "architectures": ["LlamaForCausalLM"], **keys})
    source = StateDict(theirs.state_dict())
    return theirs, load_llama(source, config, device=DEVICE, dtype=torch.float32, max_positions=max_positions)


def tokens_of(count: int) -> list[int]:
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@torch.no_grad()
def check(keys: dict[str, Any], count: int, chunks: list[int], max_positions: int = CONTEXT) -> None:
    theirs, ours = theirs_and_ours(keys, max_positions)
    tokens = tokens_of(count)
    expected = theirs(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5, "flat logits would prove nothing"
    torch.testing.assert_close(logits_in_chunks(ours, tokens, chunks), expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [50, 200])
def test_what_transformers_runs_gives_its_logits(name: str, count: int) -> None:
    check(CONFIGS[name], count, [count - 41, 1, 40])


@pytest.mark.parametrize("count", [ORIGINAL, ORIGINAL + 1])
def test_longrope_changes_its_factors_beyond_the_original_context(count: int) -> None:
    check(CONFIGS["longrope"], count, [count])


def test_longrope_within_the_original_context_is_one_table() -> None:
    _, ours = theirs_and_ours(CONFIGS["longrope"], max_positions=ORIGINAL)
    assert not ours.rotary.dynamic
    check(CONFIGS["longrope"], ORIGINAL, [ORIGINAL], max_positions=ORIGINAL)
    assert ours.config.rope_changes_beyond == ORIGINAL


@pytest.mark.parametrize("name", ["longrope", "longrope, factor"])
def test_an_answer_that_leaves_the_original_context_is_that_of_transformers(name: str) -> None:
    """Both keep the angles of the tokens that they computed before."""
    theirs, ours = theirs_and_ours(CONFIGS[name])
    prompt = tokens_of(ORIGINAL - 6)
    with torch.no_grad():
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    engine = engine_for(ours, num_blocks=CONTEXT // 4)
    [output] = run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))])
    assert output.outputs[0].token_ids == ids[0, len(prompt) :].tolist()


def config_of(**keys: Any) -> ModelConfig:
    return ModelConfig.from_hf({**TINY, "architectures": ["LlamaForCausalLM"], **keys})


def test_the_longest_context_is_at_least_the_trained_one() -> None:
    assert config_of().longest_context == CONTEXT
    assert config_of(rope_scaling={"type": "dynamic", "factor": 0.5}).longest_context == CONTEXT
    assert config_of(rope_scaling={"type": "dynamic", "factor": 4}).longest_context == 4 * CONTEXT
    assert config_of(rope_scaling={"type": "linear", "factor": 4.0}).longest_context == CONTEXT


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": 1e308}, "rope_theta"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_theta": True}, "rope_theta"),
    ({"rope_theta": 1e-300}, "finite"),
    ({"rope_theta": 1, "rope_scaling": OLD_YARN}, "finite"),
    ({"rope_scaling": {**OLD_YARN, "original_max_position_embeddings": 1 << 63}}, "original_max_position_embeddings"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 1e30}, "head_dim": 2}, "finite"),
    ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
    ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "finite"),
    ({"rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.0, 1.0, 0.0]}}, "short_factor"),
    ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, 1.0, "x", 1.0]}}, "long_factor"),
    ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 5}}, "list of 4 numbers"),
    ({"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "long_factor"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
    ({"rope_scaling": {"type": ["linear"], "factor": 2}}, "type must be text"),
    ({"rope_scaling": {"type": "x" * 5000}}, "is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("keys", "said"), WRONG, ids=lambda value: str(value)[:60])
def test_numbers_that_give_no_angles_are_refused_in_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        RotaryTable(config_of(**keys), CONTEXT, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_table_for_no_end_of_positions_is_refused_before_it_is_made() -> None:
    for context in (10**9, 1 << 60):
        config = config_of(max_position_embeddings=context)
        inverse_frequencies(config)
        RotaryTable(config, 512, torch.device("cpu"))
        with pytest.raises(WeightsError, match="--max-model-len"):
            RotaryTable(config, context, torch.device("cpu"))
