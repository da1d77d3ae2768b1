"""Negate a JSON schema: describe the values that the schema rejects, as a list of schemas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from minillm.grammar.meaning import (
    KINDS,
    NUMBERS,
    Meaning,
    Schema,
    as_schema,
    bounds,
    choices,
    count,
    kind_of,
    kinds_of_type,
    mapping,
    number,
    required,
    sequence,
    tuple_of,
)

_MOST_NUMBERS = 20  # maximum numbers in an enum for which all gaps between the numbers are listed


def opposites(meaning: Meaning, schema: Schema, names: tuple[str, ...] = ()) -> Iterator[Schema | None]:
    """Yield schemas that describe the values that ``schema`` rejects. Each of them accepts only rejected values.

    Together, the yielded schemas accept all rejected values, unless None is yielded as well. None stands for rejected
    values that no schema can describe.

    Args:
        names: names of properties that may occur. Suppose that ``schema`` forbids additional properties. Then one of
            the yielded schemas accepts objects with a property in ``names`` that ``schema`` does not mention.
    """
    if isinstance(schema, bool):
        if not schema:
            yield True
        return
    target = meaning.target(schema)
    if target is not None:
        yield {"not": target, "$names": names}
        if meaning.references.is_old:
            return
    yield from _of_types(schema)
    for values in choices(schema):
        yield from _of_values(meaning, values)
    yield from _of_combinations(schema, names)
    yield from _of_numbers(schema)
    yield from _of_strings(meaning, schema)
    yield from _of_arrays(schema)
    yield from _of_objects(meaning, schema, names)


def typed(kinds: Any) -> Schema:
    """Return a schema that accepts values of ``kinds`` (see `KINDS`).

    If ``kinds`` contains "fraction" without "integer", fractions are left out, because no type expresses them.
    """
    found = [kind for kind in KINDS if kind in kinds and kind != "fraction"]
    return {"type": ["number" if kind == "integer" and "fraction" in kinds else kind for kind in found]}


def _of_types(schema: dict[str, Any]) -> Iterator[Schema | None]:
    if "type" in schema:
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        left = set(KINDS).difference(*(kinds_of_type(name) for name in wanted))
        if "fraction" in left and "integer" not in left:
            yield None
        if left - {"fraction"}:
            yield typed(left)


def _of_values(meaning: Meaning, values: list[Any]) -> Iterator[Schema | None]:
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        kind = kind_of(value)
        by_kind.setdefault("number" if kind in NUMBERS else kind, []).append(value)
    untouched = set(KINDS) - by_kind.keys()
    if "number" in by_kind:
        untouched -= set(NUMBERS)
        yield from _gaps(sorted(set(by_kind["number"])))
    if untouched:
        yield typed(untouched)
    for value in (True, False):
        if "boolean" in by_kind and value not in by_kind["boolean"]:
            yield {"const": value}
    if "string" in by_kind:
        algebra = meaning.algebra
        texts = algebra.either(*(algebra.text(value) for value in by_kind["string"]))
        yield {"type": "string", "$language": algebra.complement(texts)}
    for kind, key in (("array", "minItems"), ("object", "minProperties")):
        if kind in by_kind:
            yield None
            yield {"type": kind, key: 1 + max(map(len, by_kind[kind]))}


def _gaps(numbers: list[float]) -> Iterator[Schema | None]:
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    yield {"type": "number", "exclusiveMinimum": numbers[-1]}
    if len(numbers) > _MOST_NUMBERS:
        yield None
        return
    for low, high in pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}


def _of_combinations(schema: dict[str, Any], names: tuple[str, ...]) -> Iterator[Schema | None]:
    def no(inner: Schema) -> Schema:
        return {"not": inner, "$names": names}

    for each in sequence(schema, "allOf"):
        yield no(each)
    if "anyOf" in schema:
        yield {"allOf": [no(each) for each in sequence(schema, "anyOf")]}
    if "oneOf" in schema:
        ways = sequence(schema, "oneOf")
        yield {"allOf": [no(each) for each in ways]}
        yield from ({"allOf": [one, other]} for at, one in enumerate(ways) for other in ways[:at])
    if "not" in schema:
        yield schema["not"]
    if "if" in schema:
        if "then" in schema:
            yield {"allOf": [schema["if"], no(schema["then"])]}
        if "else" in schema:
            yield {"allOf": [no(schema["if"]), no(schema["else"])]}


def _of_numbers(schema: dict[str, Any]) -> Iterator[Schema | None]:
    low, above, high, below = bounds(schema)
    if low is not None:
        yield {"type": "number", "maximum" if above else "exclusiveMaximum": low}
    if high is not None:
        yield {"type": "number", "minimum" if below else "exclusiveMinimum": high}
    if number(schema, "multipleOf") is not None:
        yield None


def _of_strings(meaning: Meaning, schema: dict[str, Any]) -> Iterator[Schema | None]:
    for language in meaning.strings(schema):
        yield {"type": "string", "$language": meaning.algebra.complement(language)}


def _of_arrays(schema: dict[str, Any]) -> Iterator[Schema | None]:
    first, rest = tuple_of(schema)
    for at, item in enumerate(first):
        if item is not True:
            yield {"type": "array", "minItems": at + 1, "prefixItems": [*([True] * at), {"not": item}]}
    if rest is False:
        yield {"type": "array", "minItems": len(first) + 1}
    elif rest is not True:
        yield {"type": "array", "minItems": len(first) + 1, "contains": {"not": rest}, "$from": len(first)}
    if count(schema, "minItems", 0):
        yield {"type": "array", "maxItems": count(schema, "minItems") - 1}
    if "maxItems" in schema:
        yield {"type": "array", "minItems": count(schema, "maxItems") + 1}
    if "contains" in schema and count(schema, "minContains", 1) == 1:
        yield {"type": "array", "items": {"not": schema["contains"]}}
    if any(key in schema for key in ("uniqueItems", "minContains", "maxContains", "unevaluatedItems")):
        yield None


def _of_objects(meaning: Meaning, schema: dict[str, Any], names: tuple[str, ...]) -> Iterator[Schema | None]:
    properties, patterns, needed = mapping(schema, "properties"), mapping(schema, "patternProperties"), required(schema)
    for name in dict.fromkeys((*needed, *properties, *names)):
        found = [each for each in meaning.values_of(schema, name) if each is not True]
        values: Schema = {"not": {"allOf": found} if len(found) > 1 else found[0]} if found else False
        if name in needed:
            yield {"type": "object", "properties": {name: values}}
        elif values is not False:
            yield {"type": "object", "required": [name], "properties": {name: values}}
    if patterns or schema.get("additionalProperties", True) is not True:
        yield None
        if not patterns and not properties:
            rest = {"not": schema["additionalProperties"]}
            yield {"type": "object", "minProperties": 1, "additionalProperties": rest}
    if count(schema, "minProperties", 0):
        yield {"type": "object", "maxProperties": count(schema, "minProperties") - 1}
    if "maxProperties" in schema:
        yield {"type": "object", "minProperties": count(schema, "maxProperties") + 1}
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, wanted in mapping(schema, key).items():
            yield {"type": "object", "required": [name], "not": as_schema(wanted), "$names": names}
    if any(key in schema for key in ("propertyNames", "unevaluatedProperties")):
        yield None
