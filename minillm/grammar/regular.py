"""Regular languages with intersection and complement, written as regular expressions.

A *language* is a set of texts. llguidance's regular expressions have no look-around and no complement. Therefore an
expression in JavaScript's syntax is parsed into a language. Languages are combined, and the resulting language is
written as an expression that llguidance accepts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

LAST = 0x10FFFF  # the last code point of Unicode
Chars = tuple[tuple[int, int], ...]  # a set of characters: ranges (first, last) of code points, sorted and not adjacent
_MOST_STEPS = 20_000  # maximum derivatives to compute for all languages of one schema
_MOST_STATES = 400  # maximum states of one automaton
_MOST_LETTERS = 16_000  # maximum characters of one written expression


class TooComplex(ValueError):
    """Raised if a language is too complex to be written as an expression, or takes too much work."""


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Return the union of ranges of code points, sorted and merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def others(of: Chars) -> Chars:
    """Return all code points that are not in ``of``."""
    gaps, begin = [], 0
    for low, high in of:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, LAST)) if begin <= LAST else tuple(gaps)


ALL: Chars = ((0, LAST),)


@dataclass(frozen=True, eq=False)
class Language:
    """A set of texts, represented by a node of an expression tree.

    `Algebra` never creates the same node twice, so equal nodes are identical objects.

    Attributes:
        kind: "set" (one character of ``chars``), "cat" (concatenation), "or", "and", "not" or "rep" (repetition).
        parts: the operands.
        least, most: limits of a repetition; ``most`` is None without a limit.
        has_empty: whether the language contains the empty text.
        number: position in the order of creation.
        derivatives: cached results of `Algebra.step`, by code point.
    """

    kind: str
    parts: tuple[Language, ...] = ()
    chars: Chars = ()
    least: int = 0
    most: int | None = None
    has_empty: bool = False
    number: int = 0
    derivatives: dict[int, Language] = field(default_factory=dict)


class Algebra:
    """Creates and combines languages. Methods raise TooComplex if they take too much work."""

    def __init__(self) -> None:
        self._made: dict[object, Language] = {}
        self._steps = 0
        self.nothing = self._make("or", ())
        self.empty = self._make("cat", (), has_empty=True)
        self.anything = self.repeat(self.one_of(ALL))
        self.something = self.repeat(self.one_of(ALL), 1)

    def _make(
        self,
        kind: str,
        parts: tuple[Language, ...],
        *,
        has_empty: bool = False,
        of: Chars = (),
        least: int = 0,
        most: int | None = None,
    ) -> Language:
        key = (kind, tuple(part.number for part in parts), of, least, most)
        found = self._made.get(key)
        if found is None:
            found = Language(kind, parts, of, least, most, has_empty, len(self._made))
            self._made[key] = found
        return found

    def one_of(self, of: Chars) -> Language:
        """Return a language of single characters: it has one text for each character in ``of``."""
        return self._make("set", (), of=of) if of else self.nothing

    def text(self, text: str) -> Language:
        """Return the language that contains only ``text``."""
        return self.then(*(self.one_of(((ord(each), ord(each)),)) for each in text))

    def then(self, *parts: Language) -> Language:
        """Return the concatenation of languages: texts that join a text of each language, in order."""
        flat: list[Language] = []
        for part in parts:
            if part is self.nothing:
                return self.nothing
            flat += part.parts if part.kind == "cat" else [part]
        if len(flat) == 1:
            return flat[0]
        return self._make("cat", tuple(flat), has_empty=all(part.has_empty for part in flat)) if flat else self.empty

    def either(self, *parts: Language) -> Language:
        """Return the union of languages."""
        flat = {each for part in parts for each in (part.parts if part.kind == "or" else (part,))}
        if self.anything in flat:
            return self.anything
        sets = [each for each in flat if each.kind == "set"]
        if len(sets) > 1:
            flat = flat.difference(sets) | {self.one_of(chars(pair for each in sets for pair in each.chars))}
        if len(flat) == 1:
            return flat.pop()
        ordered = tuple(sorted(flat, key=lambda each: each.number))
        return self._make("or", ordered, has_empty=any(each.has_empty for each in ordered))

    def both(self, *parts: Language) -> Language:
        """Return the intersection of languages."""
        flat = {each for part in parts for each in (part.parts if part.kind == "and" else (part,))}
        flat.discard(self.anything)
        if self.nothing in flat:
            return self.nothing
        if not flat:
            return self.anything
        if len(flat) == 1:
            return flat.pop()
        if self.empty in flat:
            return self.empty if all(each.has_empty for each in flat) else self.nothing
        ordered = tuple(sorted(flat, key=lambda each: each.number))
        return self._make("and", ordered, has_empty=all(each.has_empty for each in ordered))

    def complement(self, of: Language) -> Language:
        """Return the language of all texts that are not in ``of``."""
        if of.kind == "not":
            return of.parts[0]
        if of is self.nothing:
            return self.anything
        return self.nothing if of is self.anything else self._make("not", (of,), has_empty=not of.has_empty)

    def repeat(self, of: Language, least: int = 0, most: int | None = None) -> Language:
        """Return the language of texts that join ``least`` to ``most`` texts of ``of``.

        If ``most`` is None, there is no upper limit.
        """
        if most == 0 or of is self.empty or (of is self.nothing and least == 0):
            return self.empty
        if of is self.nothing or (least == most == 1):
            return of
        if of.kind == "rep" and of.least <= 1 and of.most is None and most is None:
            return self.repeat(of.parts[0], of.least * least)
        return self._make("rep", (of,), least=least, most=most, has_empty=least == 0 or of.has_empty)

    def step(self, of: Language, char: int) -> Language:
        """Return the Brzozowski derivative: the texts of ``of`` that begin with ``char``, without this first character.

        ``char`` is a code point.
        """
        found = of.derivatives.get(char)
        if found is None:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise TooComplex("its patterns are too complex together")
            found = of.derivatives[char] = self._step(of, char)
        return found

    def _step(self, of: Language, char: int) -> Language:
        if of.kind == "set":
            return self.empty if any(low <= char <= high for low, high in of.chars) else self.nothing
        if of.kind == "cat":
            ways = []
            for index, part in enumerate(of.parts):
                ways.append(self.then(self.step(part, char), *of.parts[index + 1 :]))
                if not part.has_empty:
                    break
            return self.either(*ways)
        if of.kind == "rep":
            most = None if of.most is None else of.most - 1
            [inner] = of.parts
            return self.then(self.step(inner, char), self.repeat(inner, max(0, of.least - 1), most))
        parts = [self.step(part, char) for part in of.parts]
        if of.kind == "not":
            return self.complement(parts[0])
        return self.either(*parts) if of.kind == "or" else self.both(*parts)

    def matches(self, of: Language, text: str) -> bool:
        """Return whether ``text`` belongs to the language ``of``."""
        for each in text:
            of = self.step(of, ord(each))
        return of.has_empty

    def is_empty(self, of: Language) -> bool:
        """Return whether the language ``of`` contains no text."""
        seen, waiting = {of}, [of]
        letters = [low for (low, _), *_ in _alphabet(of)]
        while waiting:
            state = waiting.pop()
            if state.has_empty:
                return False
            for letter in letters:
                after = self.step(state, letter)
                if after not in seen and after is not self.nothing:
                    seen.add(after)
                    waiting.append(after)
                    if len(seen) > _MOST_STATES:
                        raise TooComplex("its patterns are too complex together")
        return True

    def expression(self, of: Language) -> str:
        """Write a language as a regular expression that matches exactly the texts of the language.

        Raises TooComplex if the expression would be too long.
        """
        written = _written(self._plain(of))
        if len(written) > _MOST_LETTERS:
            raise TooComplex("a pattern is too long to be written without look-around")
        return f"^(?:{written})$"

    def _plain(self, of: Language) -> Language:
        """Return the same language as an expression tree without intersections and complements."""
        if of.kind in ("and", "not"):
            return self._eliminated(of)
        parts = tuple(self._plain(part) for part in of.parts)
        if parts == of.parts:
            return of
        if of.kind == "rep":
            return self.repeat(parts[0], of.least, of.most)
        return self.then(*parts) if of.kind == "cat" else self.either(*parts)

    def _eliminated(self, of: Language) -> Language:
        """Return the same language without intersections and complements, by eliminating the states of an automaton."""
        edges = self._automaton(of)
        into: dict[int, set[int]] = {}
        for state, targets in edges.items():
            for target in targets:
                into.setdefault(target, set()).add(state)
        inner = [state for state in edges if state > 0]
        while inner:
            state = min(inner, key=lambda each: len(edges[each]) * len(into.get(each, ())))
            inner.remove(state)
            out = edges.pop(state)
            loop = self.repeat(out.pop(state)) if state in out else self.empty
            sources = into.pop(state, set()) - {state}
            for target in out:
                into[target].discard(state)
            for source in sources:
                before = edges[source].pop(state)
                for target, after in out.items():
                    way = self.then(before, loop, after)
                    edges[source][target] = self.either(edges[source].get(target, self.nothing), way)
                    into.setdefault(target, set()).add(source)
            if len(self._made) > 50_000:
                raise TooComplex("a pattern is too complex to be written without look-around")
        return edges[-1].get(-2, self.nothing)

    def _automaton(self, of: Language) -> dict[int, dict[int, Language]]:
        """Return the transitions of a deterministic automaton for ``of``: source state -> target state -> language.

        The language of a transition has one text for each of its characters. State 1 is the initial state. Two states
        are added: state -1 leads to state 1, and accepting states lead to state -2. The language of these added
        transitions is the empty text.
        """
        letters = _alphabet(of)
        numbers, waiting = {of: 1}, [of]
        edges: dict[int, dict[int, Language]] = {-1: {1: self.empty}}
        while waiting:
            state = waiting.pop()
            out = edges[numbers[state]] = {-2: self.empty} if state.has_empty else {}
            for letter in letters:
                after = self.step(state, letter[0][0])
                if after is self.nothing:
                    continue
                if after not in numbers:
                    numbers[after] = len(numbers) + 1
                    waiting.append(after)
                    if len(numbers) > _MOST_STATES:
                        raise TooComplex("a pattern has too many states to be written without look-around")
                target = numbers[after]
                out[target] = self.either(out.get(target, self.nothing), self.one_of(letter))
        return edges


def _alphabet(of: Language) -> list[Chars]:
    """Partition all characters into sets. ``of`` treats all characters of one set alike."""
    cuts, seen, waiting = {0, LAST + 1}, {of}, [of]
    ranges: set[Chars] = set()
    while waiting:
        node = waiting.pop()
        if node.kind == "set":
            ranges.add(node.chars)
            cuts.update(edge for low, high in node.chars for edge in (low, high + 1))
        fresh = [part for part in node.parts if part not in seen]
        seen.update(fresh)
        waiting += fresh
    borders = sorted(cuts)
    classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    ordered = list(ranges)
    for low, end in pairwise(borders):
        key = tuple(any(first <= low <= last for first, last in each) for each in ordered)
        classes.setdefault(key, []).append((low, end - 1))
    if len(classes) > 200:
        raise TooComplex("its patterns distinguish too many characters")
    return [chars(each) for each in classes.values()]


def _written(of: Language) -> str:
    if of.kind == "set":
        return _written_set(of.chars)
    if of.kind == "cat":
        return "".join(f"(?:{_written(part)})" if part.kind == "or" else _written(part) for part in of.parts)
    if of.kind == "or":
        if not of.parts:
            return "[^\\x{0}-\\x{10FFFF}]"
        return "|".join(_written(part) for part in of.parts)
    [inner] = of.parts
    body = _written(inner)
    body = body if inner.kind == "set" else f"(?:{body})"
    if (of.least, of.most) in _SIGNS:
        return body + _SIGNS[of.least, of.most]
    return (
        f"{body}{{{of.least}}}" if of.least == of.most else f"{body}{{{of.least},{'' if of.most is None else of.most}}}"
    )


_SIGNS: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def _written_set(of: Chars) -> str:
    if of == ALL:
        return "(?s:.)"
    if of[0][0] == 0 != of[0][1] and not all(any(low <= ord(sign) <= high for low, high in of) for sign in '"\\'):
        # llguidance 1.9 treats a set of all control characters as if it also contained quotation marks and backslashes.
        of = ((1, of[0][1]), *of[1:])
    negated = of[-1][1] == LAST
    body = "".join(_written_range(low, high) for low, high in (others(of) if negated else of))
    return f"[{'^' if negated else ''}{body}]"


def _written_range(low: int, high: int) -> str:
    """Write a range of code points for a character class. Leave out surrogates, because they are not characters."""
    if low <= 0xDFFF and high >= 0xD800:
        below = _written_range(low, 0xD7FF) if low < 0xD800 else ""
        return below + (_written_range(0xE000, high) if high > 0xDFFF else "")
    return _letter(low) if low == high else f"{_letter(low)}-{_letter(high)}"


def _letter(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
