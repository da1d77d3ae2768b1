"""Fifty JSON schemas, each about one part of JSON Schema's vocabulary."""

from __future__ import annotations

from typing import Any

INTEGER = {"type": "integer", "minimum": -99, "maximum": 99}
WORD = {"type": "string", "maxLength": 6}


def record(*optional: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with only these properties. All but the ``optional`` ones are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def list_of(items: Any, least: int = 0, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TREE = record("children", value=INTEGER, children=list_of({"$ref": "#"}, 0, 2))
LINKED = {
    "$defs": {"node": record("next", value={"enum": [1, 2]}, next={"$ref": "#/$defs/node"})},
    "$ref": "#/$defs/node",
}
PERSON = record("nick", name=WORD, age={"type": "integer", "minimum": 0, "maximum": 130}, nick=WORD)

SCHEMAS: dict[str, Any] = {
    # enums and constants
    "strings of an enum": {"enum": ["red", "green", "blue"]},
    "an enum of mixed types": {"enum": [1, 2.5, None, True, "x", [1], {"a": 1}]},
    "an enum with escapes": {"enum": ['a"b', "line\nbreak", "tab\t", "back\\slash"]},
    "an enum of unicode": {"enum": ["naïve", "北京", "🎉"]},
    "a constant": {"const": {"kind": "fixed", "values": [1, 2]}},
    "a constant string": {"const": "only this"},
    "a typed enum": {"type": "string", "enum": ["yes", "no"]},
    # plain types
    "a boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null"]},
    "a nullable integer": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    # numbers
    "an integer in a range": {"type": "integer", "minimum": 3, "maximum": 17},
    "a negative range": {"type": "integer", "minimum": -120, "maximum": -7},
    "a range around zero": {"type": "integer", "minimum": -5, "maximum": 5},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "a number in a range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "an exclusive number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "a multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "a lower bound alone": record(n={"type": "integer", "minimum": 1000}),
    # strings
    "a short string": {"type": "string", "maxLength": 4},
    "a string of bounded length": {"type": "string", "minLength": 2, "maxLength": 5},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "a pattern that is not anchored": {"type": "string", "pattern": "[0-9][a-f]", "maxLength": 8},
    "a pattern with choices": {"type": "string", "pattern": "^(GET|POST) /[a-z]{1,5}$"},
    "a date": {"type": "string", "format": "date"},
    "a time": {"type": "string", "format": "time"},
    "a date and time": {"type": "string", "format": "date-time"},
    "a uuid": {"type": "string", "format": "uuid"},
    "an ipv4 address": {"type": "string", "format": "ipv4"},
    "an email address": {"type": "string", "format": "email", "maxLength": 30},
    # arrays
    "an array of bounded length": list_of(INTEGER, 2, 4),
    "an empty array": list_of(INTEGER, 0, 0),
    "an array of arrays": list_of(list_of({"type": "boolean"}, 1, 2), 1, 2),
    "a tuple": {"type": "array", "prefixItems": [INTEGER, WORD], "items": False, "minItems": 2},
    "a tuple with a tail": {
        "type": "array", "prefixItems": [{"const": "head"}], "items": INTEGER, "minItems": 1, "maxItems": 3,
    },
    "an array of an enum": list_of({"enum": ["a", "b", "c"]}, 1, 5),
    # objects
    "a record": PERSON,
    "nested records": record(person=PERSON, address=record(street=WORD, number=INTEGER)),
    "three levels": record(a=record(b=record(c={"type": "boolean"}))),
    "optional properties": record("a", "b", a={"type": "boolean"}, b={"type": "null"}),
    "values of one schema": {
        "type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2,
    },
    "names by a pattern": {
        "type": "object", "patternProperties": {"^x_[a-c]$": {"type": "boolean"}}, "additionalProperties": False,
        "maxProperties": 2,
    },
    "a list of records": list_of(record(id=INTEGER, kind={"enum": ["new", "old"]}), 1, 2),
    "a property with an odd name": record(**{'we"ird\nname': {"type": "boolean"}}),
    # references and combinations
    "a reference": {"$defs": {"word": WORD}, **record(first={"$ref": "#/$defs/word"}, last={"$ref": "#/$defs/word"})},
    "a tree": TREE,
    "a linked list": LINKED,
    "any of several": {"anyOf": [{"type": "boolean"}, INTEGER, record(x={"type": "null"})]},
    "one of several": {
        "oneOf": [record(kind={"const": "a"}, x=INTEGER), record(kind={"const": "b"}, y={"type": "boolean"})]
    },
    "all of several": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
}  # fmt: skip


def _unrolled(inner: dict[str, Any], make: Any, depth: int) -> dict[str, Any]:
    return make(_unrolled(inner, make, depth - 1)) if depth else inner


# The same, but where the answers of some have no longest one (digits, levels), they are bounded: so every answer ends.
BOUNDED: dict[str, Any] = {
    **SCHEMAS,
    "values of one schema": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": INTEGER},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "a number in a range": {"type": "number", "minimum": 0.5, "maximum": 2.25, "multipleOf": 0.125},
    "an exclusive number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.125},
    "a lower bound alone": record(n={"type": "integer", "minimum": 1000, "maximum": 10**12}),
    "a time": {"type": "string", "format": "time", "maxLength": 20},
    "a date and time": {"type": "string", "format": "date-time", "maxLength": 30},
    "a tree": _unrolled(
        record(value=INTEGER), lambda inner: record("children", value=INTEGER, children=list_of(inner, 0, 2)), 3
    ),
    "a linked list": _unrolled(
        record(value={"enum": [1, 2]}), lambda inner: record("next", value={"enum": [1, 2]}, next=inner), 5
    ),
}
