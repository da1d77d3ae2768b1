"""Rewrite the object keywords of a JSON schema for llguidance: see `minillm.grammar.rewriting`."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from minillm.grammar.meaning import IN_PLACE, KINDS, Schema, Unsupported, choices, count, mapping, required, sequence
from minillm.grammar.opposites import typed
from minillm.grammar.regular import Language
from minillm.grammar.scalar_keywords import Rewriting, written

OBJECTS = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("required", "propertyNames", "minProperties", "maxProperties"),
    )
)
_MOST_WAYS = 400  # maximum alternatives for the set of optional properties that are present


def of_objects(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite a schema's object keywords. Return False if the schema accepts nothing, else None.

    Args:
        result: the rewritten schema, to which this function adds keywords.
        more: receives schemas that a value must satisfy in addition to ``result``.
    """
    more_names: Schema = schema.get("additionalProperties", True)
    if "unevaluatedProperties" in schema and schema["unevaluatedProperties"] is not True:
        if any(key in schema for key in IN_PLACE):
            raise Unsupported("has unevaluatedProperties next to other combinations; use additionalProperties")
        more_names = schema.get("additionalProperties", schema["unevaluatedProperties"])
    names = required(schema)
    allowed = _names_allowed(rewriter, schema)
    properties = {name: rewriter.rewritten(each) for name, each in mapping(schema, "properties").items()}
    for name in (*properties, *names):
        if allowed is not None and not rewriter.algebra.matches(allowed, name):
            properties[name] = False
    patterns, rest = _patterns(rewriter, schema, allowed, more_names)
    if properties:
        result["properties"] = properties
    if patterns:
        result["patternProperties"] = patterns
    if rest is not True:
        result["additionalProperties"] = rest
    if names:
        result["required"] = names
    return _counted(rewriter, schema, result, more)


def _names_allowed(rewriter: Rewriting, schema: dict[str, Any]) -> Language | None:
    if schema.get("propertyNames", True) is True:
        return None
    return _texts(rewriter, schema["propertyNames"])


def _texts(rewriter: Rewriting, schema: Schema) -> Language:
    """Return the language of the strings that ``schema``, a schema for property names, accepts."""
    ways = []
    for part in rewriter.meaning.parts(schema):
        unknown = [key for key in ("oneOf", "if") if key in part]
        if unknown:
            raise Unsupported(f"has {unknown[0]} within propertyNames")
        ways += rewriter.meaning.strings(part)
        if "string" not in rewriter.meaning.kinds(part):
            ways.append(rewriter.algebra.nothing)
        for values in choices(part):
            ways.append(
                rewriter.algebra.either(*(rewriter.algebra.text(each) for each in values if isinstance(each, str)))
            )
        if "anyOf" in part:
            ways.append(rewriter.algebra.either(*(_texts(rewriter, each) for each in sequence(part, "anyOf"))))
        if "not" in part:
            ways.append(rewriter.algebra.complement(_texts(rewriter, part["not"])))
    return rewriter.algebra.both(*ways)


def _patterns(
    rewriter: Rewriting, schema: dict[str, Any], allowed: Language | None, rest: Schema
) -> tuple[dict[str, Schema], Schema]:
    """Rewrite patternProperties and propertyNames.

    The returned patterns are disjoint, so that each property name matches at most one of them.

    Args:
        allowed: the language of allowed property names; None: all names.
        rest: the schema for properties that match none of the original patterns.

    Returns:
        - the returned patterns, each with the rewritten schema for the properties that it matches;
        - the rewritten schema for properties that match none of the returned patterns.
    """
    algebra, patterns = rewriter.algebra, mapping(schema, "patternProperties")
    if not patterns and allowed is None:
        return {}, rewriter.rewritten(rest)
    if len(patterns) == 1 and allowed is None:
        [(pattern, each)] = patterns.items()
        return {written(rewriter, pattern): rewriter.rewritten(each)}, rewriter.rewritten(rest)
    classes: list[tuple[Language, list[Schema]]] = []
    free = algebra.anything if allowed is None else allowed
    for pattern, each in patterns.items():
        language, split = rewriter.meaning.language(pattern), []
        for known, schemas in classes:
            split.append((algebra.both(known, language), [*schemas, each]))
            split.append((algebra.both(known, algebra.complement(language)), schemas))
        split.append((algebra.both(free, language), [each]))
        free = algebra.both(free, algebra.complement(language))
        classes = [pair for pair in split if not algebra.is_empty(pair[0])]
        if len(classes) > 32:
            raise Unsupported("has too many patternProperties that overlap")
    if allowed is not None:
        if not algebra.is_empty(free):
            classes.append((free, [rest]))
        rest = False
    written_patterns = {algebra.expression(language): _every(rewriter, each) for language, each in classes}
    return written_patterns, rewriter.rewritten(rest)


def _every(rewriter: Rewriting, schemas: list[Schema]) -> Schema:
    found = [each if isinstance(each, bool) else rewriter.rewritten(each) for each in schemas]
    return found[0] if len(found) == 1 else False if False in found else {"allOf": found}


def _counted(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite minProperties and maxProperties. Add them to ``result`` and ``more``, as `of_objects` describes.

    Return False if the schema accepts nothing, because no object is possible. Otherwise return None.
    """
    least, most = count(schema, "minProperties", 0), count(schema, "maxProperties")
    names, properties = required(schema), result.get("properties", {})
    optional = [name for name, each in properties.items() if name not in names and each is not False]
    is_open = result.get("additionalProperties", True) is not False or any(
        each is not False for each in result.get("patternProperties", {}).values()
    )
    if most is not None and not is_open and most >= len(names) + len(optional):
        most = None
    lacking, spare = max(0, least - len(names)), None if most is None else most - len(names)
    if not lacking and spare is None:
        return None
    if (spare is not None and spare < lacking) or (not is_open and lacking > len(optional)):
        if schema.get("type") == "object":
            return False
        more.append(typed(set(KINDS) - {"object"}))
        return None
    bounds = {"minProperties": least} | ({} if most is None else {"maxProperties": most})
    if not optional:
        result |= bounds
        return None
    more.append(_subsets(rewriter, optional, lacking, spare, bounds, is_open))
    return None


def _subsets(
    rewriter: Rewriting, optional: list[str], lacking: int, spare: int | None, bounds: dict[str, int], is_open: bool
) -> Schema:
    """Return a schema that accepts objects with the right number of properties, and all values that are not objects.

    It has one alternative for each set of optional properties that an object may have.

    Args:
        optional: names of the optional properties.
        lacking: minimum number of properties in addition to the required properties.
        spare: maximum number of properties in addition to the required properties; None: no limit.
        bounds: minProperties and maxProperties of the original schema. They are repeated in alternatives in which
            properties without a name in the schema count.
        is_open: properties that the schema does not name are allowed.
    """
    ways: list[Schema] = [typed(set(KINDS) - {"object"})]
    last = min(len(optional), lacking if spare is None else spare)
    for size in range(0 if is_open else lacking, last + 1):
        if len(ways) + math.comb(len(optional), size) > _MOST_WAYS:
            raise Unsupported(f"has {' and '.join(bounds)} with too many optional properties")
        for chosen in combinations(optional, size):
            way: dict[str, Any] = {"type": "object", "required": list(chosen)}
            if spare is not None or size < lacking:  # exactly these optional properties are present
                way |= {"properties": {name: False for name in optional if name not in chosen}, **bounds}
            ways.append(way)
    return rewriter.ways(ways)
