"""Test patterns of JSON schemas: they match the same texts as Python's regular expressions."""

from __future__ import annotations

import re
import string
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.bytewise import accepts, matcher
from lib.examples import examples
from minillm.grammar.ecma import BadPattern, language
from minillm.grammar.regular import Algebra, TooComplex, chars, others

ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", "^", "$", r"\.", "-", "(?:)"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])
    looks = st.sampled_from(["(?=", "(?!"])
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, signs).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(looks, inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
    )


EXPRESSIONS = st.recursive(ATOMS, _larger, max_leaves=6)
TEXTS = st.lists(st.text("abc.-1", max_size=5), min_size=12, max_size=12)


@settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(EXPRESSIONS, TEXTS)
def test_a_language_has_the_texts_that_python_finds(pattern: str, texts: list[str]) -> None:
    algebra = Algebra()
    try:
        found = language(algebra, pattern)
    except BadPattern:
        return
    expected = [bool(re.search(pattern, text, re.ASCII)) for text in texts]
    assert [algebra.matches(found, text) for text in texts] == expected
    opposite = algebra.complement(found)
    assert [not algebra.matches(opposite, text) for text in texts] == expected
    for each, turned in ((found, False), (opposite, True)):
        try:
            written = algebra.expression(each)
        except TooComplex:
            continue
        if algebra.is_empty(each):
            assert expected == [turned] * len(texts)
            continue
        assert [bool(re.search(_pythonic(written), text)) != turned for text in texts] == expected, written


def _pythonic(written: str) -> str:
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: f"\\U{int(code[1], 16):08X}", written)


@pytest.mark.parametrize("pattern", ["a", "^a*b$", '^[^"]*$', r"^[^\\]$", "^[^a]$", "(?!a)b", r"^\s+$", "^.$"])
def test_the_library_reads_what_is_written(pattern: str) -> None:
    state = matcher({"type": "string", "pattern": pattern})
    texts = ["", "a", "b", "aab", "ba", '"', "\\", "\n", " \t", "ü", "\x01", 'x"y']
    assert [text for text in texts if accepts(state, text) and not re.search(pattern, text)] == []
    plain = [text for text in texts if "\x00" not in text and re.search(pattern, text) and text != "\n"]
    assert [text for text in plain if not accepts(state, text)] == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\u0041\x42\cJ\t\0$", "AB\n\t\0"),
        (r"^\ud83d\ude00$", "😀"),
        (r"^\u{1F600}$", "😀"),
        (r"^[\w-]+[\]\-]$", "a-b]"),
        (r"^[a\-z]+$", "-za"),
        (r"^[]$|^a{$", "a{"),
        (r"^a{,2}$", "a{,2}"),
        (r"^(?<name>a)(?P<other>b)$", "ab"),
        (r"^a+?b*?c??$", "ab"),
        (r"^[^]$", "\n"),
        (r"^[\b]$", "\b"),
        (r"^\/\_\%$", "/_%"),
        (r"^[\d-x]$", "-"),
        (r"^[]*a$", "a"),
        (r"^(?:a{2}){2}$", "aaaa"),
    ],
)
def test_the_notation_of_javascript_is_read(pattern: str, text: str) -> None:
    algebra = Algebra()
    assert algebra.matches(language(algebra, pattern), text)
    assert not algebra.matches(language(algebra, pattern), text + "?")


def test_classes_and_escapes_are_those_of_ecma_262() -> None:
    """Section 22.2.2: the characters that each one matches, among those where all of them are."""
    plain = {chr(code) for code in (*range(0x2100), *range(0x2FF0, 0x3010), *range(0xFEF0, 0xFF10))}
    spaces = {*"\t\v\f\ufeff", *(char for char in plain if unicodedata.category(char) == "Zs")}
    ends = set("\n\r\u2028\u2029")
    digits = set("0123456789")
    words = set(string.ascii_letters + string.digits + "_")
    expected = {
        r"\s": spaces | ends, r"\S": plain - spaces - ends, r"\d": digits, r"\D": plain - digits, r"\w": words,
        r"\W": plain - words, ".": plain - ends, r"[\b]": {"\b"}, r"\0": {"\0"}, r"\t": {"\t"}, r"\n": {"\n"},
        r"\v": {"\v"}, r"\f": {"\f"}, r"\r": {"\r"}, r"\cJ": {"\n"}, r"\cj": {"\n"},
        r"\x2a": {"*"}, r"\u20aC": {"€"}, r"\u{e9}": {"é"},
        r"[^\w\s]": plain - words - spaces - ends, r"[\x00-\x1f]": set(map(chr, range(32))),
    }  # fmt: skip
    for pattern, characters in expected.items():
        algebra = Algebra()
        found = language(algebra, f"^{pattern}$")
        assert {char for char in plain if algebra.matches(found, char)} == characters, pattern


def test_repetitions_are_written_with_the_usual_signs() -> None:
    algebra = Algebra()
    for sign in ("*", "+", "?", "{2}", "{2,}", "{0,3}", "{2,3}"):
        assert algebra.expression(language(algebra, f"^a{sign}$")) == f"^(?:[a]{sign})$"


WRONG = ["(", ")", "a)", "[a", "*a", "a**", "a{2}{3}", "a{3,2}", "[b-a]", "\\", r"\ud800", r"\u{110000}"]
MISSING = [r"(a)\1", r"\bx", r"\p{L}", "(?<=a)b", "(?i)a", "(?:^a)*", "(" * 60 + ")" * 60]


@pytest.mark.parametrize("pattern", [*WRONG, *MISSING])
def test_what_cannot_be_read_is_said(pattern: str) -> None:
    with pytest.raises(BadPattern, match="it "):
        language(Algebra(), pattern)


@pytest.mark.parametrize("outer", ["*", "+", "?", "{2}", "{2,}", "{2,3}"])
@pytest.mark.parametrize("inner", ["*", "+", "?", "{2}", "{2,}", "{1,2}"])
def test_repetitions_of_repetitions(inner: str, outer: str) -> None:
    pattern = f"^(?:a{inner}){outer}$"
    algebra = Algebra()
    found = language(algebra, pattern)
    texts = ["a" * length for length in range(8)]
    expected = [bool(re.search(pattern, text)) for text in texts]
    assert [algebra.matches(found, text) for text in texts] == expected
    assert [bool(re.search(_pythonic(algebra.expression(found)), text)) for text in texts] == expected


def test_dots_leave_out_the_ends_of_lines() -> None:
    algebra = Algebra()
    assert [text for text in "a\n\r\u2028\u2029\x0b" if algebra.matches(language(algebra, "^.$"), text)] == [
        "a",
        "\x0b",
    ]


def test_sets_of_characters() -> None:
    assert chars([(5, 7), (1, 2), (3, 4), (9, 9), (6, 7)]) == ((1, 7), (9, 9))
    assert others(((0, 3), (9, 0x10FFFF))) == ((4, 8),)
    assert others(()) == ((0, 0x10FFFF),)
    assert others(((0, 0x10FFFE),)) == ((0x10FFFF, 0x10FFFF),)
    assert others(others(((5, 7), (9, 9)))) == ((5, 7), (9, 9))


def test_too_much_work_is_refused() -> None:
    algebra = Algebra()
    found = language(algebra, "^(?:a|b)*a(?:a|b){14}$")
    with pytest.raises(TooComplex):
        algebra.expression(algebra.complement(found))
    with pytest.raises(TooComplex):
        algebra.expression(language(algebra, f"^{'(?:' + '|'.join('ab' * 9000) + ')'}{{2}}{'x' * 17000}$"))
