"""Test the checks of grammars when they are created: one line that names the fault, in bounded time."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from lib.schemas import SCHEMAS
from minillm import Grammar
from minillm.errors import UsageError
from minillm.grammar import grammar as limits
from minillm.grammar import trial
from minillm.params import BeamSearchParams, SamplingParams


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def references(depth: int) -> dict[str, Any]:
    """Two references to the next definition in each: written out it would have 2^depth."""
    refs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**refs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE_SCHEMAS: dict[str, Any] = {
    "ten megabytes": {"enum": ["x" * 10_000_000]},
    "ten megabytes of text": '{"const": "' + "x" * 10_000_000 + '"}',
    "nested in text": '{"items":' * 50_000 + "{}" + "}" * 50_000,
    "nested beyond the bound": nested(60),
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"{c}{i}": {"type": "string"}}} for c in "ab"]} for i in range(22)
        ]
    },
    "a large multiple": {"type": "integer", "multipleOf": 99_999_989, "minimum": 0, "maximum": 10**15},
    "only itself": {"$ref": "#"},
    "a reference to elsewhere": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
}  # fmt: skip
HOSTILE_EXPRESSIONS = {
    "long": "a" * 20_000,
    "nested": "(" * 5000 + "a" + ")" * 5000,
    "unclosed": "[a-",
    "look-ahead": "(?=a)b",
    "a reference to a group": r"(a)\1",
    "nothing at all": "(?:)",
}
HOSTILE_LARK = {
    "nested": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "an intersection that takes hours": "start: A\nA: /.*a.{18}/ & /.*b.{17}/ & ~/.*c.{16}/",
    "a control token": "start: <|im_end|>",
    "no rules": "nothing",
    "no start": 'other: "a"',
    "an import of nothing": "%import nothing.NOTHING\nstart: NOTHING",
    "large": "start: " + " | ".join(f'"{i}"' for i in range(100_000)),
}


def assert_refused(make: Any, *arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make(*arguments)
    said = str(caught.value)
    assert said.startswith("grammar")
    assert "\n" not in said
    assert len(said) < 500
    return said


@pytest.fixture
def _late_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_CPU_SECONDS", 1)


@pytest.mark.usefixtures("_late_after_a_second")
@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schemas_are_refused(name: str) -> None:
    assert_refused(Grammar.json, HOSTILE_SCHEMAS[name])


@pytest.mark.parametrize("name", HOSTILE_EXPRESSIONS)
def test_hostile_expressions_are_refused(name: str) -> None:
    assert_refused(Grammar.regex, HOSTILE_EXPRESSIONS[name])


@pytest.mark.usefixtures("_late_after_a_second")
@pytest.mark.parametrize("name", HOSTILE_LARK)
def test_hostile_lark_grammars_are_refused(name: str) -> None:
    assert_refused(Grammar.lark, HOSTILE_LARK[name])


@pytest.mark.usefixtures("_late_after_a_second")
def test_what_cannot_be_obeyed_is_refused_by_name() -> None:
    assert "uniqueItems" in assert_refused(Grammar.json, {"type": "array", "uniqueItems": True})
    assert "32,770 bytes" in assert_refused(Grammar.regex, "é" * (limits.MAX_REGEX_BYTES + 1))
    assert "look-around" in assert_refused(Grammar.regex, "(?<!a)b")
    assert "takes more than 1 seconds" in assert_refused(Grammar.json, HOSTILE_SCHEMAS["a large multiple"])


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (Grammar.json, "not JSON"),
        (Grammar.json, [1]),
        (Grammar.json, 3),
        (Grammar.json, {"minimum": float("nan")}),
        (Grammar.json, {"const": {1, 2}}),
        (Grammar.json, ""),
        (Grammar.regex, ""),
        (Grammar.regex, None),
        (Grammar.regex, b"a"),
        (Grammar.regex, "\ud800"),
        (Grammar.choice, []),
        (Grammar.choice, "abc"),
        (Grammar.choice, [""]),
        (Grammar.choice, ["a", 1]),
        (Grammar.choice, 7),
        (Grammar.choice, ["\udfff"]),
        (Grammar.choice, ["a"] * (limits.MAX_CHOICES + 1)),
        (Grammar.lark, " "),
        (Grammar.lark, 1.5),
        (Grammar, "xml"),
        (Grammar, ["regex"]),
    ],
)
def test_wrong_values_are_refused(make: Any, value: Any) -> None:
    assert_refused(make, value)


def test_as_many_choices_as_the_bounds_allow_are_taken() -> None:
    for count in (1, limits.MAX_CHOICES):
        assert Grammar.choice(["a"] * count).kind == "choice"


def test_a_circle_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    assert_refused(Grammar.json, schema)


def test_deep_and_branching_schemas_within_the_bounds_are_taken() -> None:
    for schema in (nested(45), references(40), True, {}):
        assert Grammar.json(schema).kind == "json_schema"


def test_equal_grammars_are_equal_and_can_be_keys() -> None:
    assert (
        len({Grammar.regex("a+"), Grammar.regex("a+"), Grammar.lark('start: "a"'), Grammar.json(), Grammar.json()}) == 3
    )


def test_the_order_of_properties_is_kept() -> None:
    source = Grammar.json({"properties": {"z": {}, "a": {}}}).source
    assert source.index('"z"') < source.index('"a"')


def test_a_class_of_pydantics_is_taken() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMAS["a record"]

    assert Grammar.json(Model) == Grammar.json(SCHEMAS["a record"])


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
def test_parameters_take_a_grammar_or_its_form_in_json(cls: Any) -> None:
    assert cls().grammar is None
    schema = SCHEMAS["a record"]
    for value, grammar in (
        ({"json_object": True}, Grammar.json()),
        ({"json_schema": schema}, Grammar.json(schema)),
        ({"json_schema": json.dumps(schema)}, Grammar.json(schema)),
        ({"regex": "a|b"}, Grammar.regex("a|b")),
        ({"choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"lark": 'start: "a"'}, Grammar.lark('start: "a"')),
        (Grammar.regex("a|b"), Grammar.regex("a|b")),
    ):
        assert cls(grammar=value).grammar == grammar


@pytest.mark.parametrize(
    "value",
    [
        "json",
        3,
        {},
        {"regex": "a", "choice": ["b"]},
        {"xml": "a"},
        {"json_object": 1},
        {"regex": None},
        {1: "a"},
        ["a"],
    ],
)
def test_parameters_refuse_other_forms(value: Any) -> None:
    assert re.match("grammar", assert_refused(lambda: SamplingParams(grammar=value)))


def test_a_machine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "not installed" in assert_refused(Grammar.regex, "never seen before: [0-9]+")
