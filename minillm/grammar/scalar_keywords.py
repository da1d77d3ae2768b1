"""Rewrite the string and number keywords of a JSON schema for llguidance: see `minillm.grammar.rewriting`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Protocol

from minillm.errors import UsageError
from minillm.grammar.formats import PATTERNS
from minillm.grammar.meaning import Meaning, Schema, Unsupported, bounds, count, number
from minillm.grammar.regular import Algebra

STRINGS = frozenset(("pattern", "format", "minLength", "maxLength", "$language"))
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
EXACT = 1 << 53  # larger integers are not exact in llguidance
_DIGITS = 15  # llguidance may misread fractions with more digits
_FARTHEST = (1 << 63) - 1024  # the largest integer of llguidance


class Rewriting(Protocol):
    """The methods of `minillm.grammar.rewriting.Rewriter` that the rewriting functions for groups of keywords call."""

    meaning: Meaning
    algebra: Algebra
    limits: set[float]

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
        low, above = _inner(rewriter, low, above, up=True)
        result["exclusiveMinimum" if above else "minimum"] = low
    if high is not None:
        high, below = _inner(rewriter, high, below, up=False)
        result["exclusiveMaximum" if below else "maximum"] = high
    step = number(schema, "multipleOf")
    if step is not None:
        if step <= 0:
            raise UsageError("grammar: the JSON schema's multipleOf must be above 0")
        result["multipleOf"] = step
    return None


def limits_in(node: Any) -> Iterator[float]:
    """Yield the values of all bounds for numbers in a schema and its subschemas."""
    if isinstance(node, dict):
        for key in BOUNDS - {"multipleOf"}:
            if isinstance(node.get(key), int | float) and not isinstance(node[key], bool):
                yield node[key]
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from limits_in(each)


def is_exact(value: float) -> bool:
    """Return whether llguidance reads a number of a schema as exactly this number."""
    if isinstance(value, int):
        return abs(value) <= EXACT or int(float(value)) == value
    if math.isinf(value):
        return False
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) <= EXACT and abs(int(exponent)) <= 22  # powers of 10 that float64 can hold


def _inner(rewriter: Rewriting, bound: float, excluded: bool, *, up: bool) -> tuple[float, bool]:
    """Return a bound of the same or a smaller range that llguidance represents exactly, and whether it is excluded.

    ``up``: ``bound`` is a minimum, so the result is ``bound`` or larger. Otherwise ``bound`` is a maximum, and the
    result is ``bound`` or smaller.
    """
    step = _step(rewriter, bound, up=up) if excluded else None
    return _rounded(bound, step, up=up), excluded and step is None


def _step(rewriter: Rewriting, bound: float, *, up: bool) -> Decimal | None:
    """Return by how much to move an excluded bound inwards to include it. Return None if it can stay excluded.

    llguidance allows an excluded integer if the range ends before the next integer: 0 for ``0 < x <= 0.5``. The other
    end of the range may be in another subschema, so all bounds of the schema count.
    """
    sign = 1 if up else -1
    if math.isinf(bound) or bound != int(bound) or bound * sign < 0:
        return None
    distances = [distance for each in rewriter.limits if 0 < (distance := (each - bound) * sign) < 1]
    return Decimal(10) ** (math.floor(math.log10(min(distances))) - 6) if distances else None


def _rounded(bound: float, step: Decimal | None, *, up: bool) -> float:
    """Move a bound inwards by ``step``, then round it inwards to a number that llguidance represents exactly."""
    if abs(bound) <= EXACT:
        if step is None and bound == int(bound):
            return bound
        context = Context(_DIGITS, ROUND_CEILING if up else ROUND_FLOOR)
        shift = step or Decimal()
        return float((context.add if up else context.subtract)(Decimal(repr(bound)), shift))
    bound = max(bound, -_FARTHEST) if up else min(bound, _FARTHEST)
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near) if isinstance(bound, int) else near
