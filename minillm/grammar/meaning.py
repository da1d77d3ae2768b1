"""The meaning of JSON schemas: which values a schema accepts, and whether two schemas are disjoint.

Every value has a kind, one of `KINDS`. Kinds are like JSON Schema's types, except that a number is either an "integer"
or a "fraction".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from minillm.errors import UsageError
from minillm.grammar import ecma
from minillm.grammar.formats import PATTERNS
from minillm.grammar.references import References
from minillm.grammar.regular import Algebra, Language, TooComplex

Schema = dict[str, Any] | bool
KINDS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
NUMBERS = ("integer", "fraction")
REFERENCES = ("$ref", "$recursiveRef", "$dynamicRef")
# Keywords with subschemas that apply to the same value as the schema itself.
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", *REFERENCES)
_DEEPEST = 8  # maximum nesting levels to which two schemas are compared
_MOST_VISITS = 60_000


class Unsupported(ValueError):
    """Raised for a keyword, or a combination of keywords, that is not supported. The message names the keywords."""


def kinds_of_type(name: Any) -> tuple[str, ...]:
    """Return the kinds of value that a schema's type name includes. Raises UsageError if the name is unknown."""
    if name == "number":
        return NUMBERS
    if name == "any":
        return KINDS
    if name not in KINDS or name == "fraction":
        raise UsageError(f"grammar: the JSON schema has an unknown type: {str(name)[:40]!r}")
    return (name,)


def kind_of(value: Any) -> str:
    """Return the kind of a value. 1.0 is an integer, as in the JSON Schema standard."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or (math.isfinite(value) and value == int(value)) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, true is not equal to 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def mapping(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at keyword ``key``; empty if absent. Raises UsageError if the value is not a mapping."""
    return _checked(schema, key, dict, {})


def sequence(schema: dict[str, Any], key: str) -> list[Any]:
    """Return the list at keyword ``key``; empty if absent. Raises UsageError if the value is not a list."""
    return _checked(schema, key, list, [])


def _checked(schema: dict[str, Any], key: str, kind: type, otherwise: Any) -> Any:
    value = schema.get(key, otherwise)
    if not isinstance(value, kind):
        raise UsageError(f"grammar: the JSON schema's {key} must be {'an object' if kind is dict else 'a list'}")
    return value


def count(schema: dict[str, Any], key: str, otherwise: int | None = None) -> Any:
    """Return the count at keyword ``key``, or ``otherwise`` if absent.

    Raises UsageError if the value is not an integer of 0 or more.
    """
    value = schema.get(key, otherwise)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise UsageError(f"grammar: the JSON schema's {key} must be a count, not {str(value)[:40]!r}")
    return int(value)


def number(schema: dict[str, Any], key: str) -> Any:
    """Return the number at keyword ``key``; None if absent. Raises UsageError if the value is not a number."""
    value = schema.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UsageError(f"grammar: the JSON schema's {key} must be a number, not {str(value)[:40]!r}")
    return value


def bounds(schema: dict[str, Any]) -> tuple[Any, bool, Any, bool]:
    """Return the limits that a schema sets for numbers.

    Returns:
        The minimum, or None; whether it is excluded; the maximum, or None; whether it is excluded.
    """
    found: list[Any] = []
    for plain, exclusive, closer in (("minimum", "exclusiveMinimum", max), ("maximum", "exclusiveMaximum", min)):
        bound = number(schema, plain)
        if isinstance(schema.get(exclusive), bool):  # as in draft 4
            found += [bound, schema[exclusive] and bound is not None]
            continue
        strict = number(schema, exclusive)
        if strict is not None and (bound is None or closer(bound, strict) == strict):
            found += [strict, True]
        else:
            found += [bound, False]
    return found[0], found[1], found[2], found[3]


class Meaning:
    """A schema and everything needed to interpret it and its subschemas.

    Attributes:
        algebra: creates the languages of the schema's patterns.
        references: resolves the schema's references.
    """

    def __init__(self, root: Any) -> None:
        self.algebra = Algebra()
        self.references = References(root)
        self._languages: dict[str, Language] = {}
        self._disjoint_pairs: dict[tuple[int, int], bool] = {}
        self._visits = 0

    def visit(self) -> None:
        """Count a step of work on this schema, to limit the work. Raises Unsupported after too many steps."""
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise Unsupported("is too complex; make it simpler")

    def language(self, pattern: Any) -> Language:
        """Return the language of a pattern. Raises Unsupported if the pattern is invalid or not supported."""
        if not isinstance(pattern, str):
            raise UsageError("grammar: the JSON schema has a pattern that is not a text")
        if pattern not in self._languages:
            try:
                self._languages[pattern] = ecma.language(self.algebra, pattern)
            except ecma.BadPattern as error:
                raise Unsupported(f"has the pattern {pattern[:80]!r}: {error}") from None
        return self._languages[pattern]

    def target(self, schema: dict[str, Any]) -> Schema | None:
        """Return the schema that the keyword ``$ref`` of a schema names. Return None if the schema has no ``$ref``."""
        if not any(key in schema for key in REFERENCES):
            return None
        found: Schema = self.references.target(schema)
        return found

    def parts(self, schema: Schema, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Split ``schema`` into schemas. A value is valid under ``schema`` if it satisfies each yielded schema.

        The yielded schemas are ``schema`` itself, the schemas in its allOf, and the schema that its reference names,
        recursively. So the caller must ignore allOf and references in a yielded schema.
        """
        self.visit()
        if depth > 20:
            return
        if isinstance(schema, bool):
            yield {} if schema else {"enum": []}
            return
        target = self.target(schema)
        if target is None or not self.references.is_old:
            yield schema
            for each in sequence(schema, "allOf"):
                yield from self.parts(each, depth + 1)
        if target is not None:
            yield from self.parts(target, depth + 1)

    def kinds(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """Return a set that contains all kinds of value that a schema accepts. It may contain other kinds as well."""
        found = frozenset(KINDS)
        if depth > _DEEPEST:
            return found
        for part in self.parts(schema):
            if "type" in part:
                names = part["type"] if isinstance(part["type"], list) else [part["type"]]
                found &= {kind for name in names if not isinstance(name, dict) for kind in kinds_of_type(name)}
            for values in choices(part):
                found &= {kind_of(value) for value in values}
            for key in ("anyOf", "oneOf"):
                if key in part:
                    found &= frozenset().union(*(self.kinds(each, depth + 1) for each in sequence(part, key)))
        return found

    def strings(self, schema: dict[str, Any]) -> list[Language]:
        """Return the limits that a schema's own keywords set for strings, such as ``pattern``, as languages.

        A string is valid if it belongs to all of these languages.
        """
        found = [schema["$language"]] if "$language" in schema else []
        if "pattern" in schema:
            found.append(self.language(schema["pattern"]))
        if schema.get("format") in PATTERNS:
            found.append(self.language(PATTERNS[schema["format"]]))
        least, most = count(schema, "minLength", 0), count(schema, "maxLength")
        if least or most is not None:
            any_one = self.algebra.one_of(((0, 0x10FFFF),))
            found.append(
                self.algebra.repeat(any_one, least, most) if most is None or least <= most else self.algebra.nothing
            )
        return found

    def values_of(self, part: dict[str, Any], name: str) -> list[Schema]:
        """Return the schemas that ``part`` sets for the value of property ``name``. ``part`` is yielded by `parts`."""
        found = [mapping(part, "properties")[name]] if name in mapping(part, "properties") else []
        patterns = mapping(part, "patternProperties")
        found += [each for key, each in patterns.items() if self.algebra.matches(self.language(key), name)]
        if not found and "additionalProperties" in part:
            found.append(part["additionalProperties"])
        return found

    def disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Return whether two schemas are disjoint: no value is valid under both. Return False if this is unknown."""
        if one is False or other is False:
            return True
        if depth > _DEEPEST or one is True or other is True:
            return False
        pair = (id(one), id(other))
        if pair in self._disjoint_pairs:
            return self._disjoint_pairs[pair]
        try:
            found = self._disjoint(list(self.parts(one)), list(self.parts(other)), depth)
        except (TooComplex, Unsupported):
            found = False
        if self.references.has(one) and self.references.has(other):
            self._disjoint_pairs[pair] = found
        return found

    def _disjoint(self, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], depth: int) -> bool:
        for parts, against in ((ours, theirs), (theirs, ours)):
            for part in parts:
                for values in choices(part):
                    if not any(self._may_accept(against, value) for value in values):
                        return True
        we: Schema = {"allOf": ours}
        they: Schema = {"allOf": theirs}
        kinds = self.kinds(we) & self.kinds(they)
        if all(self._disjoint_in(kind, ours, theirs, depth) for kind in kinds):
            return True
        for parts, whole in ((ours, they), (theirs, we)):
            for part in parts:
                for key in ("anyOf", "oneOf"):
                    if key in part and all(self.disjoint(each, whole, depth + 1) for each in sequence(part, key)):
                        return True
        return False

    def _may_accept(self, parts: list[dict[str, Any]], value: Any) -> bool:
        try:
            return all(self.accepts(part, value) for part in parts)
        except Unsupported:
            return True

    def _disjoint_in(self, kind: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], depth: int) -> bool:
        parts = [*ours, *theirs]
        if kind in NUMBERS:
            return _no_number(parts)
        if kind == "string":
            languages = [each for part in parts for each in self.strings(part)]
            return len(languages) > 1 and self.algebra.is_empty(self.algebra.both(*languages))
        if kind == "array":
            least = max(count(part, "minItems", 0) for part in parts)
            most = min((count(part, "maxItems") for part in parts if "maxItems" in part), default=least)
            return least > most or any(
                self.disjoint({"allOf": [items_at(part, at) for part in ours]},
                              {"allOf": [items_at(part, at) for part in theirs]}, depth + 1)
                for at in range(min(least, 4))
            )  # fmt: skip
        if kind == "object":
            names = dict.fromkeys(name for part in parts for name in required(part))
            return any(
                self.disjoint({"allOf": [each for part in ours for each in self.values_of(part, name)]},
                              {"allOf": [each for part in theirs for each in self.values_of(part, name)]}, depth + 1)
                for name in names
            )  # fmt: skip
        return False

    def accepts(self, schema: Schema, value: Any) -> bool:
        """Return whether a value is valid under a schema. Raises Unsupported if the answer cannot be determined."""
        self.visit()
        if isinstance(schema, bool):
            return schema
        target = self.target(schema)
        if target is not None and not self.accepts(target, value):
            return False
        if target is not None and self.references.is_old:
            return True
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not any(kind_of(value) in kinds_of_type(name) for name in names):
                return False
        if not all(any(same(value, each) for each in values) for values in choices(schema)):
            return False
        if not self._accepts_combinations(schema, value):
            return False
        kind = kind_of(value)
        if kind in NUMBERS:
            return _accepts_number(schema, value)
        if kind == "string":
            return all(self.algebra.matches(each, value) for each in self.strings(schema))
        if kind == "array":
            return self._accepts_array(schema, value)
        return kind != "object" or self._accepts_object(schema, value)

    def _accepts_combinations(self, schema: dict[str, Any], value: Any) -> bool:
        if not all(self.accepts(each, value) for each in sequence(schema, "allOf")):
            return False
        if "anyOf" in schema and not any(self.accepts(each, value) for each in sequence(schema, "anyOf")):
            return False
        if "oneOf" in schema and sum(self.accepts(each, value) for each in sequence(schema, "oneOf")) != 1:
            return False
        if "not" in schema and self.accepts(schema["not"], value):
            return False
        branch = "then" if "if" in schema and self.accepts(schema["if"], value) else "else"
        return "if" not in schema or self.accepts(schema.get(branch, True), value)

    def _accepts_array(self, schema: dict[str, Any], value: list[Any]) -> bool:
        if "unevaluatedItems" in schema:
            raise Unsupported("uses unevaluatedItems")
        if not count(schema, "minItems", 0) <= len(value) <= count(schema, "maxItems", len(value)):
            return False
        if "contains" in schema:
            fitting = sum(self.accepts(schema["contains"], each) for each in value)
            if not count(schema, "minContains", 1) <= fitting <= count(schema, "maxContains", fitting):
                return False
        if schema.get("uniqueItems") is True and any(
            same(each, before) for at, each in enumerate(value) for before in value[:at]
        ):
            return False
        return all(self.accepts(items_at(schema, at), each) for at, each in enumerate(value))

    def _accepts_object(self, schema: dict[str, Any], value: dict[str, Any]) -> bool:
        if "unevaluatedProperties" in schema:
            raise Unsupported("uses unevaluatedProperties")
        if not count(schema, "minProperties", 0) <= len(value) <= count(schema, "maxProperties", len(value)):
            return False
        if not all(name in value for name in required(schema)):
            return False
        names = schema.get("propertyNames", True)
        if not all(self.accepts(names, name) for name in value):
            return False
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in mapping(schema, key).items():
                if name in value and not self.accepts(as_schema(wanted), value):
                    return False
        return all(self.accepts(each, value[name]) for name in value for each in self.values_of(schema, name))


def choices(schema: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the schema's lists of allowed values, from enum and const. A value must be in each list."""
    if "enum" in schema:
        yield sequence(schema, "enum")
    if "const" in schema:
        yield [schema["const"]]


def required(schema: dict[str, Any]) -> list[str]:
    """Return the names of an object's required properties."""
    if isinstance(schema.get("required"), bool):  # as in draft 3: it applies to the property itself
        return []
    names = sequence(schema, "required")
    if not all(isinstance(name, str) for name in names):
        raise UsageError("grammar: the JSON schema's required must be a list of names")
    return list(dict.fromkeys(names))


def as_schema(dependency: Any) -> Schema:
    """Return a value of the keyword ``dependencies`` as a schema. Property names in it mean required properties."""
    if isinstance(dependency, str):
        dependency = [dependency]
    return {"type": "object", "required": dependency} if isinstance(dependency, list) else dependency


def items_at(schema: dict[str, Any], at: int) -> Schema:
    """Return the schema that ``schema`` sets for the array item at ``at``.

    Ignore allOf and references in ``schema``.
    """
    first, rest = tuple_of(schema)
    return first[at] if at < len(first) else rest


def tuple_of(schema: dict[str, Any]) -> tuple[list[Schema], Schema]:
    """Return the schemas for an array's first items by position, and the schema for all further items."""
    if isinstance(schema.get("items"), list):
        return schema["items"], schema.get("additionalItems", True)
    return sequence(schema, "prefixItems"), schema.get("items", True)


def _no_number(parts: list[dict[str, Any]]) -> bool:
    """Return whether no number lies within the bounds that all schemas ``parts`` set together."""
    found = [bounds(part) for part in parts]
    least = max(((low, strict) for low, strict, _, _ in found if low is not None), default=None)
    most = min(((high, not strict) for _, _, high, strict in found if high is not None), default=None)
    if least is None or most is None:
        return False
    return least[0] > most[0] or (least[0] == most[0] and (least[1] or not most[1]))


def _accepts_number(schema: dict[str, Any], value: float) -> bool:
    low, above, high, below = bounds(schema)
    if low is not None and not (value > low if above else value >= low):
        return False
    if high is not None and not (value < high if below else value <= high):
        return False
    step = number(schema, "multipleOf")
    return step is None or step == 0 or Fraction(str(value)) % Fraction(str(step)) == 0
