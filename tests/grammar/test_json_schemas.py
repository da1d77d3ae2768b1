"""Test grammars of JSON schemas of all kinds: they accept valid values, and no invalid one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.bytewise import accepts, drawn, matcher
from lib.examples import examples
from minillm import Grammar
from minillm.errors import UsageError
from minillm.grammar.notation import followed

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


A, B = obj(a={"type": "integer"}), obj(b={"type": "integer"})
SHAPES = {"anyOf": [{"$ref": "#/definitions/circle"}, {"$ref": "#/definitions/square"}]}
KIND = {"properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}}, "required": ["kind"]}

# Name: schema, values that its grammar accepts, values that are not valid.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "one of two that required properties tell apart": (
        {"oneOf": [A, B]}, [{"a": 1}, {"b": 1}, {"a": 1, "c": 2}], [{}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": "x"}],
    ),
    "one of two that a constant tells apart": (
        {"oneOf": [obj(t={"const": "a"}, x={}), obj(t={"const": "b"}, y={})]},
        [{"t": "a", "x": 1}, {"t": "b", "y": 1}], [{"t": "a", "y": 1}, {"t": "c", "x": 1}],
    ),
    "one of overlapping numbers": (
        {"oneOf": [{"type": "number", "minimum": -5}, {"type": "number", "maximum": -2}]}, [1, -6, -1.5], [-5, -3, -2, -2.5],
    ),
    "one of overlapping texts": (
        {"type": "string", "oneOf": [{"pattern": "^a"}, {"maxLength": 2}]}, ["abc", "b", ""], ["a", "ab", "bcd"],
    ),
    "one of two references": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}],
    ),
    "one of two next to properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {}},
         "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False},
        [{"a": 1}, {"b": 1, "c": 2}], [{}, {"a": 1, "b": 1}, {"c": 1}, {"a": 1, "d": 1}],
    ),
    "one of three, two of which are the same": ({"oneOf": [A, A, B]}, [{"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
    "one of an enum and a type of some of its values": (
        {"oneOf": [{"enum": ["a", 1]}, {"type": "string"}]}, [1, "b"], ["a", 2],
    ),
    "one of closed objects": (
        {"oneOf": [{**A, "additionalProperties": False}, {"type": "object", "properties": {"a": {}, "b": {}}}]},
        [{"a": "x"}, {"b": 1}, {}, {"a": 1, "b": 1}], [{"a": 1}],
    ),
    "one of formats": ({"oneOf": [{"format": "ipv4"}, {"format": "uuid"}], "type": "string"}, ["1.2.3.4"], ["x", ""]),
    "one of arrays": (
        {"oneOf": [{"type": "array", "maxItems": 0}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]},
        [[], [1, 2]], [["a"], [1, "a"]],
    ),
    "one of arrays that may be empty": (
        {"oneOf": [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]}, [[1], ["a", "b"]], [[], [1, "a"]],
    ),
    "one of a closed object and one of an open one": (
        {"oneOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                   {"oneOf": [{"type": "object", "properties": {"b": {"type": "integer"}}}, {"type": "string"}]}]},
        [{"b": 1}, "s"], [{}, {"a": 1}, {"b": "x"}],
    ),
    "not a text": ({"not": {"type": "string"}}, [1, None, [], {}], ["", "a"]),
    "not some texts": ({"type": "string", "not": {"enum": ["a", "bc"]}}, ["", "b", "ab", "bcd"], ["a", "bc"]),
    "not some numbers": ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6, -3], [3, 5]),
    "not a range": ({"type": "number", "not": {"minimum": 2, "maximum": 5}}, [1, 6, 1.5], [2, 3, 5]),
    "not a property": ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "not both properties": (
        {**obj(c={}), "properties": {"a": {}, "b": {}, "c": {}}, "not": {"required": ["a", "b"]}},
        [{"c": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1, "c": 1}],
    ),
    "not a value of a property": ({**A, "not": obj(a={"const": 3})}, [{"a": 2}, {"a": 4, "c": 1}], [{"a": 3}]),
    "not an object of a reference": ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": A}}, [1, {}, {"a": "x"}], [{"a": 1}]),
    "not any, not all": (
        {"type": "integer", "allOf": [{"not": {"anyOf": [{"const": 1}, {"const": 2}]}}, {"not": {"const": 3}}]},
        [4, 0], [1, 2, 3],
    ),
    "if, then, else": (
        {**KIND, "type": "object", "if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["n"]},
         "else": {"properties": {"n": False}}},
        [{"kind": "x", "n": 1}, {"kind": "y"}], [{"kind": "x"}, {"kind": "y", "n": 1}],
    ),
    "if without else": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, [3, "a"], [2]),
    "if without then": ({"if": {"type": "integer"}, "else": {"maxLength": 1}}, [3, "a"], ["ab"]),
    "dependencies of draft 7": (
        {**DRAFT_7, "type": "object", "properties": {"a": {}, "b": {}, "c": {}},
         "dependencies": {"a": ["b"], "c": {"properties": {"b": {"type": "integer"}}}}},
        [{}, {"b": "x"}, {"a": 1, "b": "x"}, {"b": 1, "c": 1}], [{"a": 1}, {"b": "x", "c": 1}],
    ),
    "dependent required": (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"b": ["a"]}}, [{}, {"a": 1}, {"a": 1, "b": 1}, 3],
        [{"b": 1}],
    ),
    "dependent schemas": (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"], "maxProperties": 2}}},
        [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "at least one of optional properties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"c": 1}, {"a": 1, "b": 1}], [{}],
    ),
    "at least one property more than the required ones": (
        {**obj(a={}), "properties": {"a": {}, "b": {}}, "minProperties": 2}, [{"a": 1, "b": 1}, {"a": 1, "c": 1}], [{"a": 1}],
    ),
    "almost all of many closed properties": (
        {"type": "object", "properties": {f"p{i}": {} for i in range(11)}, "minProperties": 10, "additionalProperties": False},
        [{f"p{i}": 1 for i in range(length)} for length in (10, 11)], [{f"p{i}": 1 for i in range(9)}],
    ),
    "at most two of optional properties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2, "minProperties": 1},
        [{"a": 1}, {"b": 1, "c": 1}, {"d": 1}], [{}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "d": 1}],
    ),
    "two of closed properties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": False},
        [{"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}], [{"a": 1}, {}],
    ),
    "at least one property, which a pattern may have": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 1},
        [{"a": 1}, {"x": 1}], [{}, {"b": 1}],
    ),
    "more properties than there are": (
        {"properties": {"a": {}}, "minProperties": 2, "additionalProperties": False}, [3, "a"], [{"a": 1}, {}],
    ),
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "maxLength": 2}, "properties": {"long": {}, "a": {}}},
        [{"a": 1}, {"bc": 1}], [{"long": 1}, {"abc": 1}, {"d": 1}],
    ),
    "names of an enum": ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1}, {}], [{"z": 1}]),
    "names by a pattern, and a definition named like a rewritten one": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"$ref": "#/$defs/n"},
         "$defs": {"n": {"type": "integer"}, "d0": {"type": "string"}}},
        [{"a": 1}, {}], [{"a": "x"}, {"c": 1}],
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}, "additionalProperties": False},
        [{"a": 1}, {"b": 5}, {"ab": 7}, {"b": "x"}], [{"a": "x"}, {"ab": 1}, {"b": 1}, {"c": 1}],
    ),
    "a property that a pattern has too": (
        {"properties": {"ab": {"maximum": 9}}, "patternProperties": {"^a": {"type": "integer"}}},
        [{"ab": 1}, {"ac": 11, "x": "y"}], [{"ab": "x"}, {"ab": 10}, {"ac": "x"}],
    ),
    "an array that contains": (
        {"type": "array", "contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1], [2, 3, 1]], [[], [2], [2, 2, 2], [2, 2, 2, 1]],
    ),
    "not an array of integers": ({"type": "array", "not": {"items": {"type": "integer"}}}, [["a"], ["a", 1], [1, "a"]], [[], [1]]),
    "not a tuple": (
        {"type": "array", "not": {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}},
        [["a"], [1, 2], ["a", "b"]], [[], [1], [1, "a"]],
    ),
    "not a closed tuple": ({"type": "array", "not": {"prefixItems": [True], "items": False}}, [[1, 2]], [[], [1]]),
    "not a short array": ({"type": "array", "not": {"maxItems": 1}}, [[1, 2]], [[], [1]]),
    "not a long array": ({"type": "array", "not": {"minItems": 2}}, [[], [1]], [[1, 2]]),
    "an array that contains no": ({"type": "array", "not": {"contains": {"const": 1}}}, [[], [2]], [[1], [2, 1]]),
    "an array that contains two": ({"contains": {"type": "integer"}, "minContains": 2}, [[1, 2], "a"], [[1], [1, "a"]]),
    "a set of an enum": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["b", "a"], ["a", "b", "c"]],
        [["a", "a"], ["a", "b", "a"], ["d"]],
    ),
    "a larger set of an enum": (
        {"items": {"enum": list("abcdefg")}, "uniqueItems": True, "maxItems": 3}, [["a"], ["a", "c", "g"]],
        [["a", "a"], ["a", "b", "c", "d"]],
    ),
    "a set of two among many": (
        {"type": "array", "items": {"enum": list("abcdefghijk")}, "uniqueItems": True, "maxItems": 2},
        [[], ["a"], ["a", "k"]], [["b", "b"], ["a", "b", "c"]],
    ),
    "a tuple of items that always differ": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}, {"type": "null"}], "items": False,
         "uniqueItems": True},
        [[], [1, "a"], [1, "a", None]], [[1, 1], [1, "a", "a"], [1, "a", None, None]],
    ),
    "a set of booleans": ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[True, False]], [[True, True]]),
    "a pair of different integers": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}, [[], [5], [5, 7], [10, 1], [20, 5], [-20, -99], [21, 20]],
        [[5, 5], [1, 2, 3]],
    ),
    "a tuple of draft 4": (
        {**DRAFT_4, "type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
        [[], [1], [1, "a"]], [["a"], [1, "a", 2]],
    ),
    "a tuple that starts with another tuple": (
        {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1}, [[1], [1, "a"]], [[], ["a"], [1, 2]],
    ),
    "exclusive bounds of draft 4": (
        {**DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 7, "exclusiveMaximum": True},
        [4, 6], [3, 7],
    ),
    "the larger of two bounds": ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3}, [4], [3, 2]),
    "more than an integer, and less than the next": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.25, 0.001], [0, 0.0, -0.1, 0.6],
    ),
    "less than an integer, and more than the one before": (
        {"allOf": [{"type": "number", "exclusiveMaximum": -18}, {"minimum": -18.5}]}, [-18.5, -18.1], [-18, -18.0, -19],
    ),
    "bounds of many digits": (
        {"minimum": -14.200000000000003, "maximum": -14.200000000000001}, ["a"], [-14.2, -14.200000000000005],
    ),
    "integers of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**53), 2**53], [2**63, 2**64, -(2**63) - 1],
    ),
    "an enum next to a pattern": ({"enum": ["a", "bc", 3], "pattern": "^b", "type": "string"}, ["bc"], ["a", 3]),
    "an enum next to bounds": ({"enum": [1, 5, 9], "not": {"const": 5}, "minimum": 2}, [9], [1, 5]),
    "an enum next to a type in draft 7": ({**DRAFT_7, "enum": [1, "a"], "type": "integer"}, [1], ["a"]),
    "an enum next to a multiple": ({"enum": [1, 1.5, 3, "a"], "multipleOf": 1}, [1, 3, "a"], [1.5]),
    "an enum next to bounds that are in it": (
        {"enum": [1, 2, 3, 4], "exclusiveMinimum": 1, "minimum": 0, "maximum": 4, "exclusiveMaximum": 4}, [2, 3], [1, 4],
    ),
    "an enum next to keywords of arrays and objects": (
        {"enum": [[], [1], [1, 1], ["a"], {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}], "items": {"type": "integer"}, "minItems": 1,
         "uniqueItems": True, "required": ["a"], "maxProperties": 1},
        [[1], {"a": 1}], [[], [1, 1], ["a"], {}, {"b": 1}, {"a": 1, "b": 2}],
    ),
    "an enum next to combinations": (
        {"enum": [1, 2, 3, 4, "x"], "anyOf": [{"type": "integer"}], "oneOf": [{"minimum": 3}, {"maximum": 3}], "not": {"const": 4},
         "if": {"const": 2}, "then": False},
        [1], [2, 3, 4, "x"],
    ),
    "an enum next to dependencies": (
        {"enum": [{"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"c": 1}], "dependentRequired": {"a": ["b"]}, "propertyNames": {"pattern": "[ab]"}},
        [{"a": 1, "b": 1}, {"b": 1}], [{"a": 1}, {"c": 1}],
    ),
    "an enum next to a constant": (
        {"enum": [{"a": 1}, {"a": True}, {"b": 1}, {"a": 1, "b": 2}, [1, [2]]], "const": {"a": 1}},
        [{"a": 1}], [{"a": True}, {"b": 1}, {"a": 1, "b": 2}, [1, [2]]],
    ),
    "an enum next to contains": (
        {"enum": [[1, 1], [1], [2], [1, 1, 1]], "contains": {"const": 1}, "minContains": 2, "maxContains": 2}, [[1, 1]], [[1], [2], [1, 1, 1]],
    ),
    "an enum of all kinds": (
        {"enum": [None, True, 1, 1.5, "a", [1, "b"], {"k": {}}]}, [None, True, 1, 1.5, "a", [1, "b"], {"k": {}}],
        [False, 2, "b", [1], {}, {"k": 1}, 0],
    ),
    "a constant that looks like a schema of draft 3": (
        {"const": {"properties": {"a": {"required": True}}}}, [{"properties": {"a": {"required": True}}}], [{}],
    ),
    "a constant that is not true": ({"const": 1}, [1], [True, 2]),
    "properties of a subschema before the schema's own": (
        {"required": ["a"], "allOf": [{"properties": {"b": {}}}], "properties": {"a": {}}}, [{"b": 1, "a": 1}], [{"b": 1}],
    ),
    "all of objects": (
        {"allOf": [A, {"properties": {"c": {"type": "string"}}, "required": ["c"]}]}, [{"a": 1, "c": "x"}], [{"a": 1}, {"c": "x"}],
    ),
    "a reference with siblings": (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3}, [3], [2, "a"],
    ),
    "siblings of a reference in draft 7": (
        {**DRAFT_7, "properties": {"a": {"$ref": "#/definitions/n", "minimum": 3}}, "definitions": {"n": {"type": "integer"}}},
        [{"a": 2}], [{"a": "x"}],
    ),
    "a reference by id": (
        {**DRAFT_4, "id": "http://x.y/root", "definitions": {"n": {"id": "n", "type": "integer"}, "m": {"id": "#m", "type": "null"}},
         "properties": {"a": {"$ref": "http://x.y/n"}, "b": {"$ref": "#m"}, "c": {"$ref": "root#/definitions/n"}}},
        [{"a": 1, "b": None, "c": 2}], [{"a": "x"}, {"b": 1}, {"c": "x"}],
    ),
    "a reference from a property that is named like a keyword": (
        {"$id": "http://x.y/z", "$ref": "http://x.y/in", "$defs": {"n": {"type": "string"}, "in": {
         "$id": "http://x.y/in", "$defs": {"n": {"type": "integer"}}, "properties": {"default": {"$ref": "#/$defs/n"}}}}},
        [{"default": 1}], [{"default": "x"}],
    ),
    "a reference to an anchor": (
        {"$id": "http://x.y/z", "$defs": {"n": {"$anchor": "num", "type": "integer"}}, "items": {"$ref": "#num"}}, [[1]], [["a"]],
    ),
    "a reference to a dynamic anchor": (
        {"$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "#n"}}, "additionalProperties": False}, [{"a": {"a": {}}}], [{"a": {"b": 1}}],
    ),
    "a reference to a schema of anything, and one to nothing": (
        {"$defs": {"yes": True, "no": False}, "properties": {"a": {"$ref": "#/$defs/yes"}, "b": {"$ref": "#/$defs/no"}}},
        [{"a": 1}, {"c": 1}], [{"b": 1}],
    ),
    "a reference with escapes": (
        {"$defs": {"a/b~c d%": {"type": "integer"}}, "items": {"$ref": "#/$defs/a~1b~0c%20d%25"}}, [[1]], [["a"]],
    ),
    "a reference to a property": (
        {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, [{"a": 1, "b": 2}], [{"b": "x"}],
    ),
    "a tree": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/t"}},
         "additionalProperties": False}}},
        [{"v": 1, "l": {"l": {"v": 3}}}], [{"l": {"x": 1}}],
    ),
    "a tree of large numbers, with small ones as leaves": (
        {"$ref": "#/$defs/t", "$defs": {"t": obj(n={"type": "integer", "minimum": 7, "allOf": [{"minimum": 2}]}, c={"items": {
         "oneOf": [{"$ref": "#/$defs/t"}, obj(n={"type": "integer", "exclusiveMaximum": 7})]}})}},
        [{"n": 7, "c": [{"n": 9, "c": []}, {"n": 6}]}], [{"n": 6, "c": []}, {"n": 7, "c": [{"n": 7}]}],
    ),
    "required of draft 3": (
        {"type": "object", "properties": {"a": {"type": "integer", "required": True}, "b": {"type": "any"}}},
        [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": 1}],
    ),
    "what is not evaluated": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}],
    ),
    "a look-ahead": (
        {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ["1.5", "+3", "00"], ["", "-", ".", "a"],
    ),
    "a password": ({"type": "string", "pattern": "^(?=.*\\d)(?=.*[a-z]).{3,5}$"}, ["a1b", "111a"], ["a1", "abc", "123"]),
    "a pattern with choices and anchors": ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "a"], ["xa", "bx", "x"]),
    "a pattern with escapes": ({"type": "string", "pattern": "^\\/\\w\\-\\u0041\\x42\\.$"}, ["/_-AB."], ["/ -AB.", "x/_-AB."]),
    "a pattern without quotation marks": ({"type": "string", "pattern": '^[^"\\\\]+$'}, ["a", "ü"], ['"', "\\", 'a"', ""]),
    "an unknown format": ({"type": "string", "format": "color", "maxLength": 3}, ["red", ""], ["blue"]),
    "a format of numbers": ({"type": "integer", "format": "int32"}, [3], ["a"]),
    "options of the library": ({"type": "integer", "x-guidance": {"lenient": True}, "maximum": 3}, [3], [4]),
    "options of the library that ignore keywords": (
        {"oneOf": [{"minimum": 2}, {"maximum": 5}], "type": "integer", "x-guidance": {"coerce_one_of": True}}, [1, 6], [3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_grammar_accepts_valid_values_and_no_others(name: str) -> None:
    schema, valid, invalid = CASES[name]
    state = matcher(schema)
    assert [value for value in valid if not accepts(state, value)] == []
    assert [value for value in invalid if accepts(state, value)] == []


@pytest.mark.parametrize("name", [name for name in CASES if "draft 3" not in name])
def test_the_cases_are_what_the_standard_says(name: str) -> None:
    schema, valid, invalid = CASES[name]
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = cls(schema, format_checker=cls.FORMAT_CHECKER)
    assert [value for value in valid if not validator.is_valid(value)] == []
    assert [value for value in invalid if validator.is_valid(value)] == []


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-13-01", "2023-04-31", "0000-01-01"]),
    "time": (["12:30:00Z", "23:59:59.5+02:00"], ["24:00:00Z", "12:30:00", "12:60:00Z"]),
    "date-time": (["2024-02-29T00:00:00Z", "1999-01-01t12:00:00.123-08:00"], ["2023-02-29T00:00:00Z", "2024-02-29"]),
    "duration": (["P1Y2M3D", "PT1H", "P2W", "P1DT2S"], ["P", "PT", "1D", "P1Y2D", "P1D2H"]),
    "email": (["a.b@c.d", "x+y@example.com"], ["a", "@b", "a@", "a@b@c", ".a@b"]),
    "hostname": (["a.b", "x-y.z"], ["-a", "a-", ".", "a..b", "a" * 64, "xn--x"]),
    "ipv4": (["0.0.0.0", "255.249.19.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2", "1:2:3:4:5:6:7::", "1:2:3:4:5:6::8", "1::3:4:5:6:7:8"],
             [":", "1", ":1", "1:2:3:4:5:6:7::8", "1::2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8::", "::1:2:3:4:5:6:7:8", "1::2::3", "12345::", ":::"]),
    "uuid": (["01234567-89ab-cdef-0123-456789abcDEF"], ["0123456789abcdef0123456789abcdef", "x"]),
    "uri": (["http://a.b/c?d#e", "mailto:a@b", "urn:x", "http://[::1]:80/"], ["a b", "//x", "http://[zz]/", ":x", "/a"]),
    "uri-reference": (["", "a", "/a", "//h/p", "#f", "?q", "a/b:c", "http://x"], ["a b", "\\\\x", "1:2"]),
    "iri": (["http://ä.de/ü"], ["ü", "a b"]),
    "iri-reference": (["/ü", ""], ["a b"]),
    "json-pointer": (["", "/a/~0/~1"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["-1", "01", "/a"]),
    "uri-template": (["a{b}", "{+x,y*}"], ["a{", "}", "{}"]),
    "regex": (["^a*b$", "[a-z]+", "(a|b)*", "\\d{2}"], ["(", "a**", "[", "*", "\\"]),
    "idn-email": (["ü@b.c"], ["2962", "@b"]),
    "idn-hostname": (["a.b"], ["-a", "", "."]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_the_standard_are_followed(name: str) -> None:
    valid, invalid = FORMATS[name]
    state = matcher({"type": "string", "format": name})
    assert [text for text in valid if not accepts(state, text)] == []
    assert [text for text in invalid if accepts(state, text)] == []


REJECTED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "maxContains": {"contains": {"type": "integer"}, "maxContains": 3},
    "unevaluatedProperties": {"anyOf": [A, B], "unevaluatedProperties": False},
    "oneOf": {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]},
    "not": {"type": "integer", "not": {"multipleOf": 3}},
    "look-behind": {"type": "string", "pattern": "(?<=a)b"},
    "\\\\b": {"type": "string", "pattern": "\\bx"},
    "minItems": {"type": "array", "minItems": -1},
    "minimum": {"type": "number", "minimum": "3"},
    "multipleOf": {"type": "number", "multipleOf": 0},
    "type": {"type": "nothing"},
    "fraction": {"type": "fraction"},
    "nothign": {"not": {"type": "nothign"}},
    "properties": {"properties": [1]},
    "anyOf": {"anyOf": {"a": 1}},
    "required": {"required": [[1]]},
    "#/definitions/none": {"properties": {"a": {"$ref": "#/definitions/none"}}},
    "#none": {"properties": {"a": {"$ref": "#none"}}},
    "http://x.y/z": {"$ref": "http://x.y/z"},
    " oneOf ": {"type": "array", "oneOf": [{"maxItems": 0}, {"maxItems": 0, "items": {"type": "integer"}}]},
    "which is not a schema": {"$ref": "#/title", "title": "x"},
    "too many digits": {"enum": [2**60 + 1]},
    "0.9019999999999999": {"const": 0.9019999999999999},
    "inf": '{"enum": [1e400]}',
    "where a schema belongs": {"properties": {"a": 3}},
    "reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "too many optional properties": {"properties": {f"p{i}": {} for i in range(30)}, "minProperties": 5},
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_followed_is_rejected_by_name(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Grammar.json(REJECTED[name])
    assert name.replace("\\\\", "\\") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_opposites_within_each_other_stay_small() -> None:
    """Each level has two ways to end. Multiplied out, the grammar would have 2^depth."""
    inner: dict[str, Any] = obj(z={"type": "string"})
    for depth in range(12):
        inner = {"oneOf": [obj(**{f"k{depth}": inner}), {"properties": {f"k{depth}": {"maxProperties": 3}}}]}
    assert len(json.dumps(followed(inner))) < 100_000


def test_a_schema_of_many_references_stays_small() -> None:
    refs = {f"d{i}": {"oneOf": [obj(**{f"k{i}": {"$ref": f"#/$defs/d{i + 1}"}}), {"type": "null"}]} for i in range(40)}
    schema = {"$defs": {**refs, "d40": {"type": "string"}}, "$ref": "#/$defs/d0"}
    assert len(json.dumps(followed(schema))) < 10_000


NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(-2, 4)
COUNTS = st.integers(0, 3)
ATOMS = st.one_of(st.none(), st.booleans(), SMALL, st.just(1.5), st.sampled_from(["", "a", "b", "ab", "1"]))
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)
PATTERNS = st.sampled_from(["^a", "b$", "^(?!a)", "a|1", "^[ab]*$", "^$", "(?=.*b)a"])
TYPES = st.sampled_from(["object", "string", "integer", "number", "array", "boolean", "null"])
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "minimum": SMALL, "exclusiveMaximum": SMALL, "minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS,
        "const": ATOMS,
    },
)  # fmt: skip


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        "type": TYPES, "properties": st.dictionaries(NAMES, inner, max_size=3), "required": st.lists(NAMES, unique=True),
        "additionalProperties": inner, "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "items": inner, "prefixItems": several, "minItems": COUNTS, "maxItems": COUNTS, "contains": inner,
        "anyOf": several, "oneOf": several, "allOf": several, "not": inner, "if": inner, "then": inner, "else": inner,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1), "minProperties": COUNTS, "maxProperties": COUNTS,
        "propertyNames": st.sampled_from([{"pattern": "^a"}, {"maxLength": 1}, {"enum": ["a", "c"]}]),
        "enum": st.lists(VALUES, min_size=1, max_size=3), "uniqueItems": st.booleans(),
    }  # fmt: skip
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=6)


@settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(VALUES, min_size=20, max_size=20), st.integers(0, 1000))
def test_what_a_grammar_accepts_or_produces_is_valid(schema: dict[str, Any], values: list[Any], seed: int) -> None:
    try:
        state = matcher(schema)
    except (UsageError, ValueError):
        return  # it says so
    validator = jsonschema.Draft202012Validator(schema)
    assert [value for value in values if accepts(state, value) and not validator.is_valid(value)] == []
    for number in range(3):
        text = drawn(state, seed + number)
        pairs: list[int] = []

        def once(found: list[tuple[str, Any]], pairs: list[int] = pairs) -> dict[str, Any]:
            pairs.append(len(found) - len(dict(found)))
            return dict(found)

        value = None if text is None else json.loads(text, object_pairs_hook=once)
        # The library does not keep a name from coming twice, which a count of properties takes amiss.
        assert text is None or any(pairs) or validator.is_valid(value), text
