"""Regular expressions of JSON schemas: parse JavaScript's syntax into a `minillm.grammar.regular.Language`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby

from minillm.grammar.regular import Algebra, Chars, Language, chars, others

_DIGITS: Chars = ((48, 57),)
_WORD: Chars = chars([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACES = (9, 10, 11, 12, 13, 32, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
_SPACE: Chars = chars((each, each) for each in _SPACES)
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): others(each) for name, each in _CLASSES.items()}
_NOT_DOT: Chars = chars([(10, 10), (13, 13), (0x2028, 0x2029)])
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_COUNTS = re.compile(r"\{(\d{1,6})(,?)(\d{0,6})\}")
_OPENINGS = re.compile(r"\?(?::|<?[=!]|P?<[A-Za-z_]\w*>)")
_UNROLLED = 4  # maximum repetitions of a group that contains an anchor or a look-ahead


class BadPattern(ValueError):
    """Raised for an expression that is invalid, or that has an unsupported feature."""


@dataclass(frozen=True)
class _Node:
    """A node of a parsed expression.

    Attributes:
        kind: "set" (one character of ``chars``), "cat" (concatenation), "or", "rep" (repetition), "begin" and "end"
            (anchors), or "look" (look-ahead).
        parts: the operands.
        least, most: limits of a repetition; ``most`` is None without a limit. For a negative look-ahead, ``most`` is 0.
    """

    kind: str
    parts: tuple[_Node, ...] = ()
    chars: Chars = ()
    least: int = 0
    most: int | None = None

    @cached_property
    def asserts(self) -> bool:
        """Return whether the node contains an anchor or a look-ahead."""
        return self.kind in ("begin", "end", "look") or any(part.asserts for part in self.parts)


def language(algebra: Algebra, pattern: str) -> Language:
    """Return the language of all texts in which the expression ``pattern`` matches somewhere.

    Raises BadPattern if the expression is invalid or not supported.
    """
    return _found(algebra, _PatternReader(pattern).read())


def _found(algebra: Algebra, node: _Node) -> Language:
    def rest(_: bool) -> Language:
        return algebra.anything

    at_begin = _continued(algebra, node, rest, True)
    later = _continued(algebra, node, rest, False)
    if at_begin is later:
        return algebra.then(algebra.anything, later)
    return algebra.either(at_begin, algebra.then(algebra.something, later))


def _continued(algebra: Algebra, node: _Node, rest: Callable[[bool], Language], begin: bool) -> Language:
    """Return the language of ``node`` followed by the rest of the expression.

    Args:
        rest: returns the language of the rest of the expression. Its argument: the rest begins at the start of the
            text.
        begin: ``node`` begins at the start of the text.
    """
    if not node.asserts:
        return _followed(algebra, _alone(algebra, node), rest, begin)
    if node.kind == "or":
        return algebra.either(*(_continued(algebra, part, rest, begin) for part in node.parts))
    if node.kind == "cat":
        following = rest
        for part in reversed(node.parts[1:]):
            following = _later(algebra, part, following)
        return _continued(algebra, node.parts[0], following, begin)
    if node.kind == "begin":
        return rest(begin) if begin else algebra.nothing
    if node.kind == "end":
        return algebra.both(algebra.empty, rest(begin))
    [inner] = node.parts
    if node.kind == "look":
        ahead = _continued(algebra, inner, lambda _: algebra.anything, begin)
        return algebra.both(algebra.complement(ahead) if node.most == 0 else ahead, rest(begin))
    if node.most is None or node.most > _UNROLLED:
        raise BadPattern("it repeats a group with an anchor or look-around")
    counts = range(node.least, node.most + 1)
    return algebra.either(*(_continued(algebra, _cat((inner,) * count), rest, begin) for count in counts))


def _later(algebra: Algebra, part: _Node, following: Callable[[bool], Language]) -> Callable[[bool], Language]:
    @cache
    def rest(begin: bool) -> Language:
        return _continued(algebra, part, following, begin)

    return rest


def _followed(algebra: Algebra, body: Language, rest: Callable[[bool], Language], begin: bool) -> Language:
    if not (begin and body.has_empty) or rest(True) is rest(False):
        return algebra.then(body, rest(False))
    return algebra.either(rest(True), algebra.then(algebra.both(body, algebra.something), rest(False)))


def _alone(algebra: Algebra, node: _Node) -> Language:
    """Return the language of a node of a parsed expression. The node contains neither anchors nor look-aheads."""
    if node.kind == "set":
        return algebra.one_of(node.chars)
    parts = [_alone(algebra, part) for part in node.parts]
    if node.kind == "rep":
        return algebra.repeat(parts[0], node.least, node.most)
    return algebra.either(*parts) if node.kind == "or" else algebra.then(*parts)


def _cat(parts: tuple[_Node, ...]) -> _Node:
    return parts[0] if len(parts) == 1 else _Node("cat", parts)


@dataclass
class _PatternReader:
    """A recursive-descent parser of an expression. Each method raises BadPattern on an error."""

    pattern: str
    at: int = 0
    depth: int = field(default=0)

    def read(self) -> _Node:
        node = self._alternatives()
        if self.at < len(self.pattern):
            raise BadPattern("it has a ) without a (")
        return node

    def _takes(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            raise BadPattern("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _alternatives(self) -> _Node:
        self.depth += 1
        if self.depth > 50:
            raise BadPattern("it is nested too deep")
        ways = [self._sequence()]
        while self._takes("|"):
            ways.append(self._sequence())
        self.depth -= 1
        return ways[0] if len(ways) == 1 else _Node("or", tuple(ways))

    def _sequence(self) -> _Node:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._counted(self._atom()))
        runs = [tuple(run) for _, run in groupby(parts, key=lambda part: part.asserts)]
        return _cat(tuple(part for run in runs for part in (run if run[0].asserts else [_cat(run)])))

    def _counted(self, atom: _Node) -> _Node:
        if self.at >= len(self.pattern):
            return atom
        sign = self.pattern[self.at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (-1, None))
        if least >= 0:
            self.at += 1
        elif counts := _COUNTS.match(self.pattern, self.at):
            least = int(counts[1])
            most = int(counts[3]) if counts[3] else None if counts[2] else least
            if most is not None and most < least:
                raise BadPattern("it has a count with bounds in the wrong order")
            self.at = counts.end()
        else:
            return atom
        self._takes("?")  # laziness does not change the language
        if self.at < len(self.pattern) and (self.pattern[self.at] in "*+?" or _COUNTS.match(self.pattern, self.at)):
            raise BadPattern("it has a count of a count")
        return _Node("rep", (atom,), least=least, most=most)

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _Node("set", chars=self._class())
        if char == ".":
            return _Node("set", chars=others(_NOT_DOT))
        if char in "^$":
            return _Node("begin" if char == "^" else "end")
        if char == "\\":
            return _Node("set", chars=self._escape())
        if char in "*+?":
            raise BadPattern("it has a count of nothing")
        return _one(ord(char))

    def _group(self) -> _Node:
        look = ""
        if self.pattern.startswith("?", self.at):
            opening = _OPENINGS.match(self.pattern, self.at)
            if opening is None:
                raise BadPattern("it has flags or a kind of group that JavaScript does not have")
            self.at, look = opening.end(), opening[0]
        if look in ("?<=", "?<!"):
            raise BadPattern("it has a look-behind")
        inner = self._alternatives()
        if not self._takes(")"):
            raise BadPattern("it has a ( without a )")
        return _Node("look", (inner,), most=0 if look == "?!" else 1) if look in ("?=", "?!") else inner

    def _class(self) -> Chars:
        negated = self._takes("^")
        found: list[tuple[int, int]] = []
        while not self._takes("]"):
            first = self._class_part()
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                before = self.at
                self.at += 1
                last = self._class_part()
                if len(first) == len(last) == 1 and first[0][0] == first[0][1] and last[0][0] == last[0][1]:
                    if last[0][0] < first[0][0]:
                        raise BadPattern("it has a range with ends in the wrong order")
                    first = ((first[0][0], last[0][0]),)
                else:  # a class cannot end a range: the hyphen is a character
                    self.at = before
            found += first
        return others(chars(found)) if negated else chars(found)

    def _class_part(self) -> Chars:
        char = self._next()
        if char == "\\":
            return ((8, 8),) if self._takes("b") else self._escape()
        return ((ord(char), ord(char)),)

    def _escape(self) -> Chars:
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in "bBpPkAzZ" or char in "123456789":
            raise BadPattern(f"it has \\{char}")
        code = _CONTROLS.get(char, ord(char))
        if char == "c":
            code = ord(self._next()) % 32
        elif char == "x":
            code = self._hex(2, code)
        elif char == "u":
            code = self._unicode(code)
        return ((code, code),)

    def _hex(self, digits: int, otherwise: int) -> int:
        found = re.compile(f"[0-9a-fA-F]{{{digits}}}").match(self.pattern, self.at)
        if found is None:
            return otherwise
        self.at = found.end()
        return int(found[0], 16)

    def _unicode(self, otherwise: int) -> int:
        if braces := re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self.pattern, self.at):
            self.at = braces.end()
            code = int(braces[1], 16)
        else:
            code = self._hex(4, otherwise)
            if 0xD800 <= code < 0xDC00 and self._takes("\\u"):
                code = 0x10000 + (code - 0xD800) * 0x400 + self._hex(4, 0xDC00) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise BadPattern("it has a code that is not a character")
        return code


def _one(code: int) -> _Node:
    return _Node("set", chars=((code, code),))
