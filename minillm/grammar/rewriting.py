"""Rewrite JSON schemas for llguidance, which supports a part of JSON Schema.

The rewritten schema uses only this part. It accepts the same values as the original schema. If these values cannot be
expressed exactly, it accepts fewer values, but never a value that the original rejects. Schemas that cannot be
rewritten at all are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from minillm.errors import UsageError
from minillm.grammar.array_keywords import ARRAYS, of_arrays
from minillm.grammar.meaning import (
    KINDS,
    REFERENCES,
    Meaning,
    Schema,
    Unsupported,
    as_schema,
    choices,
    kinds_of_type,
    mapping,
    required,
    sequence,
)
from minillm.grammar.object_keywords import OBJECTS, of_objects
from minillm.grammar.opposites import opposites
from minillm.grammar.regular import TooComplex
from minillm.grammar.scalar_keywords import BOUNDS, STRINGS, is_exact, limits_in, of_numbers, of_strings

_MOST_SIZE = 60_000  # maximum subschemas of the result
_MOST_OPPOSITES = 4  # maximum nested negations: each one multiplies the number of alternatives

Write = Callable[["Rewriter", dict[str, Any], dict[str, Any], list[Schema]], bool | None]
# Keywords that one function rewrites together, and the keyword that determines their position in the result. The
# function adds keywords to its third argument, which is the rewritten schema. To its fourth argument it adds schemas
# that a value must satisfy as well. It returns False if the schema accepts nothing, else None.
_GROUPS: tuple[tuple[frozenset[str], str, Write], ...] = (
    (OBJECTS, "properties", of_objects),
    (ARRAYS, "items", of_arrays),
    (STRINGS, "pattern", of_strings),
    (BOUNDS, "minimum", of_numbers),
)


def supported(root: Schema) -> Schema:
    """Rewrite a schema for llguidance. Raises UsageError with the name of an unsupported keyword."""
    try:
        return Rewriter(_tidy(root)).whole()
    except (Unsupported, TooComplex) as error:
        raise UsageError(f"grammar: the JSON schema {error}") from None
    except RecursionError:
        raise UsageError("grammar: the JSON schema refers to itself too deeply; make it flatter") from None


def _tidy(schema: Any) -> Any:
    """Return a copy of a schema in which each object lists its required properties in ``required``.

    In draft 3 of the JSON Schema standard, each required property has the keyword ``required: true`` instead.
    """
    if isinstance(schema, list):
        return [_tidy(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in ("enum", "const") else _tidy(value) for key, value in schema.items()}
    properties = copy.get("properties")
    if isinstance(properties, dict) and not isinstance(copy.get("required"), bool):
        names = [name for name, each in properties.items() if isinstance(each, dict) and each.get("required") is True]
        if names and isinstance(copy.get("required", []), list):
            copy["required"] = [*copy.get("required", []), *names]
    return copy


class Rewriter:
    """Rewrites one schema and the schemas that it refers to."""

    def __init__(self, root: Schema) -> None:
        self.root, self.meaning = root, Meaning(root)
        self.algebra = self.meaning.algebra
        self.limits = set(limits_in(root))  # the bounds for numbers anywhere in the schema
        self._names: dict[int, str] = {}  # names of definitions, by the id() of their original schemas
        self._definitions: dict[str, Schema] = {}
        self._open: list[int] = []  # the id() of schemas that are being written as definitions, or negated
        self._size = self._opposites = 0

    def whole(self) -> Schema:
        """Return the rewritten root schema, including the definitions that its references name."""
        result = self.rewritten(self.root)
        if self._definitions and isinstance(result, dict):
            result = {**result, "$defs": self._definitions}
        return result

    def rewritten(self, schema: Schema) -> Schema:
        """Rewrite ``schema``: a part of the original schema, or a schema that a rewrite created. Raises Unsupported."""
        self._size += 1
        if self._size > _MOST_SIZE:
            raise Unsupported("becomes too large; make it simpler")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UsageError(f"grammar: the JSON schema has {json.dumps(schema)[:40]} where a schema belongs")
        if any(key in schema for key in REFERENCES) and self.meaning.references.is_old:
            return self._reference(schema)
        if "enum" in schema or "const" in schema:
            return self._of_values(schema)
        result, more = self._own(schema)
        if result is False:
            return False
        more = [each for each in more if each is not True]
        if not more:
            return result
        parts = more if result in ({}, True) else [result, *more]
        return parts[0] if len(parts) == 1 else {"allOf": parts}

    def _own(self, schema: dict[str, Any]) -> tuple[Schema, list[Schema]]:
        """Rewrite the keywords of a schema in their order.

        This order determines the order in which an object's properties are generated.

        Returns:
            - the rewritten schema; False if ``schema`` accepts nothing;
            - further rewritten schemas that a value must satisfy as well.
        """
        result: dict[str, Any] = {}
        more: list[Schema] = []
        if "type" in schema:
            result["type"] = self._types(schema["type"])
        done: set[str] = set()
        for key in schema:
            group = next((each[1:] for each in _GROUPS if key in each[0]), None)
            if group is not None:
                first, write = group
                if first not in done and (key == first or first not in schema):
                    done.add(first)
                    if write(self, schema, result, more) is False:
                        return False, []
            elif key in _SINGLE:
                found = _SINGLE[key](self, schema)
                if isinstance(found, dict) and key in found and key not in result:
                    result |= found  # keeps its position
                else:
                    more.append(found)
        return result, more

    def _types(self, named: Any) -> Any:
        names = named if isinstance(named, list) else [named]
        if any(isinstance(name, dict) for name in names):
            raise Unsupported("has a schema within type; use anyOf")
        kinds = {kind for name in names for kind in kinds_of_type(name)}
        ordered = dict.fromkeys(kind for name in names for kind in ([name] if name != "any" else KINDS))
        found = [name for name in ordered if name != "fraction" and not (name == "integer" and "fraction" in kinds)]
        if "fraction" in kinds and "number" not in found:
            found.append("number")
        return found[0] if len(found) == 1 else found

    def _of_values(self, schema: dict[str, Any]) -> Schema:
        [values, *others] = choices(schema)
        rest = {key: value for key, value in schema.items() if key not in ("enum", "const")}
        if others:
            rest["enum"] = others[0]
        base = {key: value for key, value in rest.items() if key in REFERENCES}
        if base:  # references are resolved relative to their own schema
            rest = {key: value for key, value in rest.items() if key not in base}
            rest["allOf"] = [*sequence(schema, "allOf"), self.meaning.target(schema)]
        found = [value for value in values if self.meaning.accepts(rest, value)]
        for value in found:
            _check_exact(value)
        return {"enum": found} if found else False

    def _reference(self, schema: dict[str, Any]) -> Schema:
        target = self.meaning.references.target(schema)
        if id(target) not in self._names:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._definitions[name] = True
            self._open.append(id(target))
            self._definitions[name] = self.rewritten(target)
            self._open.pop()
        name = self._names[id(target)]
        return False if self._definitions[name] is False else {"$ref": f"#/$defs/{name}"}

    def ways(self, ways: Iterable[Schema]) -> Schema:
        """Return the union of the rewritten schemas ``ways``: it accepts a value if at least one of them does."""
        found = [way for way in ways if way is not False]
        if any(way is True or way == {} for way in found):
            return True
        return (found[0] if len(found) == 1 else {"anyOf": found}) if found else False

    def _all_of(self, schema: dict[str, Any]) -> Schema:
        return {"allOf": [self.rewritten(each) for each in sequence(schema, "allOf")]}

    def _any_of(self, schema: dict[str, Any]) -> Schema:
        ways = sequence(schema, "anyOf")
        return {"anyOf": [way for way in map(self.rewritten, ways) if way is not False] or [False]}

    def _one_of(self, schema: dict[str, Any]) -> Schema:
        ways = [each for each in sequence(schema, "oneOf") if each is not False]
        outer = {"type": schema["type"]} if "type" in schema else {}
        known = tuple(mapping(schema, "properties"))
        names = tuple(dict.fromkeys((*known, *(name for way in ways for name in self._names_in(way)))))
        found = []
        for at, way in enumerate(ways):
            against = [
                other
                for index, other in enumerate(ways)
                if index != at and not self.meaning.disjoint({"allOf": [way, outer]}, other)
            ]
            alone = self.rewritten(way)
            if against and any(id(part) in self._open for part in self.meaning.parts(way)):
                alone = False  # llguidance cannot restrict a recursive definition
            if against and alone is not False:
                noes = [self._no({"not": other, "$names": names, "$within": [way, outer]}) for other in against]
                alone = False if False in noes else {"allOf": [alone, *noes]}
            found.append(alone)
        result = self.ways(found)
        if result is False and ways:
            raise Unsupported("has a oneOf with alternatives that overlap; make them disjoint")
        return result

    def _names_in(self, schema: Schema) -> list[str]:
        parts = list(self.meaning.parts(schema))
        found = [name for part in parts for name in (*mapping(part, "properties"), *required(part))]
        inner = [each for part in parts for key in ("anyOf", "oneOf") for each in sequence(part, key)]
        return [*found, *(name for each in inner for name in self._names_in(each))]

    def _no(self, schema: dict[str, Any]) -> Schema:
        """Rewrite ``{"not": inner}`` as a union of schemas.

        Each of them accepts some of the values that ``inner`` rejects.

        The schemas come from `opposites`.
        """
        inner, found = schema["not"], []
        exact = self._opposites < _MOST_OPPOSITES and id(inner) not in self._open
        self._open.append(id(inner))
        self._opposites += 1
        within = {"allOf": list(schema.get("$within", ()))}
        if exact:
            for each in opposites(self.meaning, inner, tuple(schema.get("$names", ()))):
                if each is None or (within["allOf"] and self.meaning.disjoint(within, each)):
                    exact = exact and each is not None
                    continue
                try:
                    found.append(self.rewritten(each))
                except (Unsupported, TooComplex):
                    exact = False
        self._open.pop()
        self._opposites -= 1
        result = self.ways(found)
        if result is False and not exact and not within["allOf"]:
            raise Unsupported("has a not that is not supported; describe the allowed values instead")
        return result

    def _condition(self, schema: dict[str, Any]) -> Schema:
        if "then" not in schema and "else" not in schema:
            return True
        condition = schema["if"]
        yes: Schema = {"allOf": [condition, schema.get("then", True)]}
        no: Schema = {"allOf": [{"not": condition}, schema.get("else", True)]}
        return self.ways([self.rewritten(yes), self.rewritten(no)])

    def _dependencies(self, key: str, schema: dict[str, Any]) -> Schema:
        found = []
        for name, wanted in mapping(schema, key).items():
            need: Schema = {"allOf": [{"type": "object", "required": [name]}, as_schema(wanted)]}
            free: Schema = {"properties": {name: False}}
            found.append(self.ways([free, self.rewritten(need)]))
        return {"allOf": found} if found else True


_SINGLE: dict[str, Callable[[Rewriter, dict[str, Any]], Any]] = {
    "$ref": Rewriter._reference,
    "$recursiveRef": Rewriter._reference,
    "$dynamicRef": Rewriter._reference,
    "allOf": Rewriter._all_of,
    "anyOf": Rewriter._any_of,
    "oneOf": Rewriter._one_of,
    "not": Rewriter._no,
    "if": Rewriter._condition,
    "dependencies": lambda self, schema: self._dependencies("dependencies", schema),
    "dependentRequired": lambda self, schema: self._dependencies("dependentRequired", schema),
    "dependentSchemas": lambda self, schema: self._dependencies("dependentSchemas", schema),
}


def _check_exact(value: Any) -> None:
    if isinstance(value, int | float) and not is_exact(value):
        raise Unsupported(f"has the number {value} in enum or const, which has too many digits")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(each)
