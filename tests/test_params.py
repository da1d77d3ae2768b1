"""Parameters are checked when they are made; stop strings are found wherever text is cut."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest

from minillm.checks import declared
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.params import BeamSearchParams, SamplingParams, with_defaults
from minillm.text.stop import OutputText, StreamingDetokenizer

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 257, 1 << 31, 10**18, 1.0, True, None, "2"],
    "temperature": [-0.1, NAN, INF, -INF, "1", None, True, 1e7],
    "top_k": [-2, 1.5, NAN, True, 1 << 40],
    "top_p": [0, 0.0, -0.1, 1.1, NAN, None],
    "min_p": [-0.1, 1.1, NAN, None],
    "repetition_penalty": [0, -1, NAN, INF, 101],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [{1: "x"}, {1: NAN}, {-1: 0}, {"x": 1}, [1], dict.fromkeys(range(2000), 0.0)],
    "seed": [1.5, "x", True, 1 << 70],
    "stop": [3, [""], "", [1], ["x"] * 65, ["x" * 2000]],
    "stop_token_ids": ["x", [-1], [1.5], [True], list(range(2000))],
    "min_tokens": [-1, 1.0, 10**18],
    "max_tokens": [0, -1, 10**18, 10**400, 1.0],
    "bad_words": [3, [""], [[]], [[-1]], [1.5], [["x"]], [None]],
    "allowed_token_ids": ["x", [], [-1], [1.5], 3],
    "logits_processor": [3, "x", [len]],
    "ignore_eos": [1, "yes", None],
    "logprobs": [-2, 65, 1.0, True],
    "prompt_logprobs": [-1, 65, 1.0, True, "2"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name.split("_")[0]) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


GOOD: dict[str, list[Any]] = {
    "n": [1, 256],
    "temperature": [0, 0.0, -0.0, 1e-9, 1e6],
    "top_k": [0, -1, 1, 1 << 31],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 1],
    "logit_bias": [{}, {5: -100.0}, {"5": 100}, {5: 1e9}],
    "seed": [None, 0, -1, (1 << 63) - 1],
    "stop": [(), None, "x", ["x", "yy"], {"x"}],
    "stop_token_ids": [(), None, [3], {3, 4}],
    "bad_words": [(), None, "x", ["x", [3, 4]], [np.array([3, 4])]],
    "allowed_token_ids": [None, [3], {3, 4}, range(5000)],
    "logits_processor": [None, max],
    "max_tokens": [1, 1 << 24, None],
    "logprobs": [None, 0, 64, -1],
    "prompt_logprobs": [None, 0, 64],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_values_at_the_edge_are_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_unknown_names_and_contradictions() -> None:
    with pytest.raises(UsageError, match="unknown parameter 'temprature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    makers: list[tuple[Any, str]] = [(SamplingParams, "temperature"), (BeamSearchParams, "beam_width")]
    for make, name in [*makers, (EngineConfig, "num_blocks")]:
        with pytest.raises(UsageError, match=f"unknown parameter '{name}x'; did you mean {name}?"):
            make(**{f"{name}x": 1})
        with pytest.raises(TypeError, match="positional"):
            make(*range(99))  # no keyword is at fault
        assert name in inspect.signature(make).parameters, "editors complete it"
    with pytest.raises(UsageError, match="at least 0 and at most 1,000,000, not 1e"):
        SamplingParams(temperature=1e30)
    with pytest.raises(UsageError, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={7: 1e9, 8: -101.0}).logit_bias == {7: 100.0, 8: -100.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"device": 3}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 3}, "block_size"),
        ({"block_size": 512}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"max_num_seqs": None}, "max_num_seqs"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "below max_num_seqs"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": NAN}, "gpu_memory_utilization"),
        ({"enable_prefix_attention": 1}, "enable_prefix_attention"),
        ({"quantize": "int3"}, "quantize"),
        ({"quantize": "int4", "weights": "expanded"}, "exclude each other"),
        ({"load_format": "pt"}, "load_format"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_engine_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EngineConfig(**options)


def output(stops: list[str], pieces: list[str]) -> OutputText:
    """Return a completion with the pieces as its tokens."""
    return OutputText(StreamingDetokenizer([piece.encode() for piece in pieces]), stops)


def push_all(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    text = output(stops, pieces)
    shown = []
    for number in range(len(pieces)):
        shown.append(text.push(number))
        if text.matched is not None:
            return "".join(shown), text.matched, shown
    shown.append(text.finish())
    return "".join(shown), None, shown


def test_stop_strings_are_found_wherever_text_is_cut() -> None:
    rng = random.Random(0)
    for _ in range(4000):
        text = "".join(rng.choice("abc\n") for _ in range(rng.randint(0, 24)))
        stops = ["".join(rng.choice("abc\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        pieces, rest = [], text
        while rest:
            cut = rng.randint(1, 6)
            pieces.append(rest[:cut])
            rest = rest[cut:]
        shown, matched, parts = push_all(stops, pieces)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, _, first = min(ends)
            assert matched == first
            assert shown == text[: end - len(first)]
        else:
            assert matched is None
            assert shown == text
        so_far = ""
        for part in parts[:-1]:  # the beginning of a stop string that completes later is not shown
            so_far += part
            assert text.startswith(so_far)


def test_a_held_beginning_is_shown_when_nothing_follows() -> None:
    text = output(["END"], ["the EN"])
    assert text.push(0) == "the "
    assert text.finish() == "EN"
    assert output([], ["x"]).push(0) == "x"


def test_a_number_that_python_cannot_print_is_refused_in_one_line() -> None:
    for name in ("max_tokens", "seed", "temperature"):
        with pytest.raises(UsageError, match=f"{name} must be .* not int too long to show"):
            SamplingParams(**{name: 10**5000})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, EngineConfig])
def test_every_default_is_in_its_one_form(kind: type) -> None:
    """It is not checked again when it is the value."""
    for name, default, parameter in declared(kind):
        checked = parameter.check(name, default)
        assert (checked, type(checked)) == (default, type(default)), name


@pytest.mark.parametrize("made", [SamplingParams, BeamSearchParams, EngineConfig])
def test_self_is_an_unknown_parameter(made: Any) -> None:
    with pytest.raises(UsageError, match="unknown parameter 'self'"):
        made(self=1)


@pytest.mark.parametrize(
    ("given", "defaults", "expected"),
    [
        ({}, {"max_tokens": 7, "min_tokens": 2}, {"max_tokens": 7, "min_tokens": 2}),
        ({"max_tokens": 1}, {"max_tokens": 7, "min_tokens": 2}, {"max_tokens": 1, "min_tokens": 1}),
        ({"min_tokens": 9}, {"max_tokens": 7, "top_k": 5}, {"min_tokens": 9, "top_k": 5}),
        ({"min_tokens": 9, "max_tokens": 3}, {"max_tokens": 7}, {"min_tokens": 9, "max_tokens": 3}),  # the user's own
        ({"max_tokens": None}, {"min_tokens": 2}, {"max_tokens": None, "min_tokens": 2}),
        ({"max_tokens": "1"}, {"min_tokens": 2}, {"max_tokens": "1", "min_tokens": 2}),  # for the checks to refuse
    ],
)
def test_a_default_that_contradicts_a_request_gives_way(
    given: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert with_defaults(given, defaults) == expected
