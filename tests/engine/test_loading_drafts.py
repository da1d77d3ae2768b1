"""Test draft models by name: the loaded model, the errors, and the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.models import hf_model, ours, write_tiny_model
from lib.speculation import facts, guesses_of
from lib.tokens import byte_level
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.llm import LLM
from minillm.params import SamplingParams
from minillm.speculation import drafter
from minillm.speculation.drafter import drafter_of

MEASURED = drafter.draft_cost
OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "dtype": "float32"}


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay, however long they take here."""
    monkeypatch.setattr(drafter, "draft_cost", lambda draft, model: 0.1)


def write_model(directory: Path, **sizes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    byte_level(directory)
    hf_model(vocab_size=640, max_position_embeddings=512, **sizes).save_pretrained(directory)
    return directory


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small", num_hidden_layers=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_tiny_model(tmp_path / "model")


def test_a_smaller_model_guesses(model: Path, small: Path) -> None:
    plain, guessing = LLM(str(model), **OPTIONS), LLM(str(model), **OPTIONS, speculate=str(small))
    prompts = ["one two three one two", "a b c a b c a b"]
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=60, ignore_eos=True, logprobs=2)
    for one, other in zip(plain.generate(prompts, params), guessing.generate(prompts, params), strict=True):
        assert facts(one) == facts(other)
    assert guesses_of(guessing.engine).num_drafted > 0


def test_a_copy_in_8_bits_guesses(model: Path) -> None:
    """The same weights: nearly all guesses are right."""
    plain, guessing = LLM(str(model), **OPTIONS), LLM(str(model), **OPTIONS, speculate=f"{model}:int8")
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True)
    [one], [other] = plain.generate(["one two"], params), guessing.generate(["one two"], params)
    assert facts(one) == facts(other)
    guesses = guesses_of(guessing.engine)
    assert guesses.num_accepted > 0.7 * guesses.num_drafted > 0


def test_random_weights_have_a_copy_of_few_bits(model: Path) -> None:
    """`minillm bench speculate --shape` needs a draft model with the same random weights."""
    llm = LLM(str(model), device="cpu", load_format="dummy", num_blocks=64, speculate=f"{model}:q8_0")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)
    llm.generate([[5, 6, 7]], params)
    guesses = guesses_of(llm.engine)
    assert guesses.num_accepted > 0.6 * guesses.num_drafted > 0


def test_the_pools_share_what_there_is(model: Path, small: Path) -> None:
    """A draft model's pool has as many blocks; of the memory on the host its part is taken into account."""
    guessing = LLM(str(model), **OPTIONS, speculate=str(small), swap_space_gb=0.001)
    plain = LLM(str(model), **OPTIONS, swap_space_gb=0.001)
    drafter = drafter_of(guessing.engine.runner)
    assert drafter is not None
    assert drafter.runner.kv_cache.values.shape[2] == guessing.engine.cache.num_blocks
    blocks = [each.engine.scheduler.preemption.swap.num_blocks for each in (plain, guessing)]
    assert blocks[1] == pytest.approx(blocks[0] * 3 / 4, abs=1), "one layer more than the model's three"


def test_what_will_hardly_pay_is_told_and_not_done(model: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "draft_cost", lambda draft, model: 0.95)
    told: list[str] = []
    llm = LLM(str(model), on_message=told.append, **OPTIONS, speculate=str(small))
    assert any("a draft token takes 0.95 of the time of a token" in line for line in told)
    llm.generate(["one two"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert guesses_of(llm.engine).num_drafted == 0


def test_the_price_is_the_part_of_a_tokens_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (ours(hf_model(num_hidden_layers=count)) for count in (1, 4))
    monkeypatch.setattr(drafter, "_seconds_of_a_token", lambda model: model.config.num_layers)
    assert 0.2 < MEASURED(small, large) < 1, "a quarter by the clock, a little more by bytes"
    assert MEASURED(large, large) == 1


def refused(model: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        LLM(str(model), **{**OPTIONS, **options})
    message = str(error.value)
    assert "\n" not in message
    return message


def test_other_tokens_are_refused(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=1)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    told = refused(model, speculate=str(other))
    assert "it cannot draft for" in told
    assert f"their tokens differ: token {min(vocabulary['a'], vocabulary['b'])} is " in told


def test_what_cannot_pay_is_refused(model: Path, tmp_path: Path) -> None:
    large = write_model(tmp_path / "large", num_hidden_layers=5)
    assert "it is the larger one" in refused(model, speculate=str(large))
    assert "a draft token would read" in refused(model, weights="int8", speculate=str(model))


def test_bad_names_are_refused_in_a_line(model: Path) -> None:
    assert "off, lookup or a model" in refused(model, speculate="lokup")
    assert "off, lookup or a model" in refused(model, speculate=str(model / "nothing"))
    assert "int4 needs a GPU" in refused(model, speculate=f"{model}:int4")
    assert "tensor_parallel_size 1" in refused(model, speculate=str(model), tensor_parallel_size=2)
    for value in (True, None, "", 3):
        with pytest.raises(UsageError, match="speculate must be off, lookup or the name of a model"):
            EngineConfig(speculate=value)  # type: ignore[arg-type]
