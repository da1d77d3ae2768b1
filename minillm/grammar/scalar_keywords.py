"""Rewrite the string and number keywords of a JSON schema for llguidance: see `minillm.grammar.rewriting`."""

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
EXACT = 1 << 53  # larger integers are not exact in llguidance
_FARTHEST = (1 << 63) - 1024  # the largest integer of llguidance


class Rewriting(Protocol):
    """The methods of `minillm.grammar.rewriting.Rewriter` that the rewriting functions for groups of keywords call."""

    meaning: Meaning
    algebra: Algebra

    def rewritten(self, schema: Schema) -> Schema:
        """Return a schema, rewritten for llguidance."""

    def ways(self, ways: Iterable[Schema]) -> Schema:
        """Return the union of the rewritten schemas ``ways``: it accepts a value if at least one of them does."""


def written(rewriter: Rewriting, pattern: str) -> str:
    """Return a pattern of a JSON schema in llguidance's syntax."""
    try:
        return rewriter.algebra.expression(rewriter.meaning.language(pattern))
    except Unsupported:
        if any(sign in pattern for sign in ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")):
            raise
        return pattern  # perhaps in the library's own syntax


def of_strings(rewriter: Rewriting, schema: dict[str, Any], result: dict[str, Any], more: list[Schema]) -> bool | None:
    """Rewrite a schema's string keywords. Return None, because these keywords never reject every value.

    Args:
        result: the rewritten schema, to which this function adds the first pattern and the lengths.
        more: receives further patterns, as schemas that a value must satisfy in addition to ``result``.
    """
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
    """Add a schema's number keywords to ``result``. Return None, because these keywords never reject every value."""
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
    """Round a bound inwards to a number that llguidance represents exactly, so that the range never grows.

    ``up``: ``bound`` is a minimum, so the result is ``bound`` or larger. Otherwise ``bound`` is a maximum, and the
    result is ``bound`` or smaller.
    """
    if abs(bound) <= EXACT:
        return bound
    bound = max(bound, -_FARTHEST) if up else min(bound, _FARTHEST)
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near) if isinstance(bound, int) else near
