"""Rewrite the array keywords of a JSON schema for llguidance: see `minillm.grammar.rewriting`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, permutations
from typing import Any

from minillm.grammar.meaning import IN_PLACE, KINDS, Schema, Unsupported, bounds, choices, count, tuple_of
from minillm.grammar.opposites import typed
from minillm.grammar.scalar_keywords import Rewriting

ARRAYS = frozenset(
    ["prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"]
)
_POSITIONS = 8  # number of first positions of an array at which the item that ``contains`` requires may be
_MOST_WAYS = 1600  # maximum alternatives that a rewritten ``uniqueItems`` may list


def of_arrays(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite a schema's array keywords. Return None, because these keywords never reject every value.

    Args:
        result: the rewritten schema, to which this function adds keywords.
        more: receives schemas that a value must satisfy in addition to ``result``.
    """
    first, rest = tuple_of(schema)
    if "unevaluatedItems" in schema and schema["unevaluatedItems"] is not True:
        if any(key in schema for key in (*IN_PLACE, "contains")):
            raise Unsupported("has unevaluatedItems next to other combinations; use items")
        has_rest = "additionalItems" in schema if isinstance(schema.get("items"), list) else "items" in schema
        if not has_rest:
            rest = schema["unevaluatedItems"]
    least, most = count(schema, "minItems", 0), count(schema, "maxItems")
    firsts, others = [rewriter.rewritten(each) for each in first], rewriter.rewritten(rest)
    if firsts:
        result["prefixItems"] = firsts
    if others is not True:
        result["items"] = others
    if least:
        result["minItems"] = least
    if most is not None:
        result["maxItems"] = most
    if "contains" in schema:
        more.append(_containing(rewriter, schema, least, most))
    if schema.get("uniqueItems") is True and (most is None or most > 1):
        more.append(_unique(rewriter, schema, first, rest, least, most))
    return None


def _containing(rewriter: Rewriting, schema: dict[str, Any], least: int, most: int | None) -> Schema:
    """Return a schema for ``contains`` and ``minContains``. It accepts all values that are not arrays.

    In an array, the items that match ``contains`` must be among the first items. So the returned schema accepts fewer
    arrays than the original.

    Args:
        least, most: the limits of the array's length; ``most`` is None without a limit.
    """
    fewest, greatest = count(schema, "minContains", 1), count(schema, "maxContains")
    inner, start = schema["contains"], schema.get("$from", 0)
    ways: list[Schema] = [typed(set(KINDS) - {"array"})]
    if greatest is not None:
        raise Unsupported("has maxContains")
    if fewest == 0:
        return True
    if fewest > 1:
        found = rewriter.rewritten(inner)
        ways.append(
            {"type": "array", "minItems": start + fewest, "prefixItems": [*([True] * start), *([found] * fewest)]}
        )
        return rewriter.ways(ways)
    found = rewriter.rewritten(inner)
    if found is False:
        return ways[0]
    positions = 2 if "$from" in schema else _POSITIONS
    last = start + positions if most is None else min(most, start + positions)
    ways += ({"type": "array", "minItems": at + 1, "prefixItems": [*([True] * at), found]} for at in range(start, last))
    return rewriter.ways(ways)


def _unique(
    rewriter: Rewriting, schema: dict[str, Any], first: list[Schema], rest: Schema, least: int, most: int | None
) -> Schema:
    """Return a schema for ``uniqueItems``. It accepts arrays with distinct items, and all values that are not arrays.

    Raises Unsupported if distinct items cannot be expressed.

    Args:
        first: the schemas of the array's first items, by position.
        rest: the schema of all further items.
        least, most: the limits of the array's length; ``most`` is None without a limit.
    """
    ways: list[Schema] = [typed(set(KINDS) - {"array"}), {"type": "array", "maxItems": 1}]
    size = len(first) if rest is False and most is None else most
    values = None if first else _finite(rewriter, rest)
    if values is not None:
        size = len(values) if size is None else min(size, len(values))
        arrange = permutations if len(values) <= 4 else combinations
        for number_of in range(max(2, least), size + 1):
            for chosen in arrange(values, number_of):
                ways.append({"const": list(chosen)})
                if len(ways) > _MOST_WAYS:
                    raise Unsupported("has uniqueItems for too many values; leave it out")
        return rewriter.ways(ways)
    if _differ(rewriter, first, rest, size):
        return True
    if size != 2:
        raise Unsupported(
            "has uniqueItems for items that are not limited to a few values, which is not supported; leave it out"
        )
    for item, other in _partition():
        ways.append({"type": "array", "prefixItems": [rewriter.rewritten(item), rewriter.rewritten(other)]})
    return rewriter.ways(ways)


def _differ(rewriter: Rewriting, first: list[Schema], rest: Schema, size: int | None) -> bool:
    """Return whether the items of an array are always distinct, because their schemas are disjoint. False if unknown.

    Args:
        first, rest: see `_unique`.
        size: maximum length of the array; None: no limit.
    """
    if size is None or size > 8 or (size > len(first) and rest is not False):
        return False
    return all(rewriter.meaning.disjoint(one, other) for one, other in combinations(first, 2))


def _finite(rewriter: Rewriting, schema: Schema) -> list[Any] | None:
    """Return all values that a schema accepts. Return None if there are too many, or if they cannot be listed."""
    kinds = rewriter.meaning.kinds(schema)
    for part in rewriter.meaning.parts(schema):
        for values in choices(part):
            if len(values) > 200:
                return None
            different: list[Any] = []
            for value in values:
                if value not in different and rewriter.meaning.accepts(schema, value):
                    different.append(value)
            return different
    if kinds <= {"null", "boolean"}:
        return [value for value in (None, False, True) if rewriter.meaning.accepts(schema, value)]
    if kinds <= {"integer", "null", "boolean"} and isinstance(schema, dict):
        low, _, high, _ = bounds(schema)
        if low is not None and high is not None and high - low <= 10:
            numbers = range(math.ceil(low), math.floor(high) + 1)
            return [value for value in (None, False, True, *numbers) if rewriter.meaning.accepts(schema, value)]
    return None


def _partition() -> Iterable[tuple[Schema, Schema]]:
    """Yield pairs of disjoint schemas. They express that two items of an array differ.

    Two items differ if one fits the first schema of a pair, and the other one fits the second schema. Some items differ
    although they fit no pair. So a schema with all pairs as alternatives accepts fewer arrays than the original.
    """
    for first in "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ":
        yield {"type": "string", "pattern": f"^{first}"}, {"type": "string", "pattern": f"^(?!{first})"}
    for number_ in range(-20, 21):
        yield {"type": "number", "minimum": number_, "maximum": number_}, _but(number_, number_)
    for low, high in ((-99, -21), (21, 99), (100, 999), (1000, 9999)):
        yield {"type": "number", "minimum": low, "maximum": high}, _but(low, high)
    for kind in ("null", "boolean", "array", "object"):
        yield (
            {"type": kind},
            {"type": [each for each in ("null", "boolean", "array", "object", "string", "number") if each != kind]},
        )
    yield {"type": "string"}, {"type": ["null", "boolean", "array", "object", "number"]}
    yield {"type": "number"}, {"type": ["null", "boolean", "array", "object", "string"]}


def _but(low: float, high: float) -> Schema:
    return {"anyOf": [{"type": "number", "exclusiveMaximum": low}, {"type": "number", "exclusiveMinimum": high}]}
