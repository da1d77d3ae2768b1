"""Rewrite the string and number keywords of a JSON schema."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

from minillm.errors import UsageError
from minillm.grammar.formats import PATTERNS
from minillm.grammar.meaning import Meaning, Schema, Unsupported, bounds, count, number
from minillm.grammar.regular import Algebra

STRINGS = frozenset(("pattern", "format", "minLength", "maxLength", "$language"))
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
EXACT = 1 << 53  # larger integers are not exact in the library
_FARTHEST = (1 << 63) - 1024  # the library's largest integer


class Rewriting(Protocol):
    """Rewrites a schema, keyword by keyword."""

    meaning: Meaning
    algebra: Algebra

    def rewritten(self, schema: Schema) -> Schema:
        """Rewrite a schema."""

    def ways(self, ways: Iterable[Schema]) -> Schema:
        """Return the union of schemas."""


def written(rewriter: Rewriting, pattern: str) -> str:
    """Return a pattern in the library's syntax."""
    try:
        return rewriter.algebra.expression(rewriter.meaning.language(pattern))
    except Unsupported:
        if any(sign in pattern for sign in ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")):
            raise
        return pattern  # perhaps in the library's own syntax


def of_strings(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite a schema's string keywords into ``result``, and into further schemas in ``more``."""
    patterns = []
    if "pattern" in schema:
        patterns.append(written(rewriter, schema["pattern"]))
    if schema.get("format") in PATTERNS:
        patterns.append(written(rewriter, PATTERNS[schema["format"]]))
    if "$language" in schema:
        patterns.append(rewriter.algebra.expression(schema["$language"]))
    if patterns:
        result["pattern"] = patterns[0]
        more += [{"pattern": each} for each in patterns[1:]]
    for key in ("minLength", "maxLength"):
        if key in schema:
            result[key] = count(schema, key)
    return None


def of_numbers(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite a schema's number keywords into ``result``."""
    low, above, high, below = bounds(schema)
    if low is not None:
        result["exclusiveMinimum" if above else "minimum"] = _inner(low, up=True)
    if high is not None:
        result["exclusiveMaximum" if below else "maximum"] = _inner(high, up=False)
    step = number(schema, "multipleOf")
    if step is not None:
        if step <= 0:
            raise UsageError("grammar: the JSON schema's multipleOf must be above 0")
        result["multipleOf"] = step
    return None


def _inner(bound: float, *, up: bool) -> float:
    """Return a bound that is exact in the library: the nearest one inside the range."""
    if abs(bound) <= EXACT:
        return bound
    bound = max(bound, -_FARTHEST) if up else min(bound, _FARTHEST)
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near) if isinstance(bound, int) else near
