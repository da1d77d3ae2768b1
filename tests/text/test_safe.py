"""Untrusted text before it reaches a terminal."""

from __future__ import annotations

import json
import random

import pytest

from minillm.text.safe import clean, clean_line, json_line, parse_json, parse_strict_json

HOSTILE = [
    "\x1b]52;c;ZXZpbA==\x07",  # writes the clipboard
    "\x1b]0;title\x07",
    "\x1b[6n",  # asks for the cursor; the terminal types the answer
    "\x9b31m",
    "\x90+q\x9c",
    "\x1b[?1049h\x1b[2J",
    "a\rb",
    "\x7f\x08\x08",
    "\u202egnp.exe\u202c",
    "\u2066x\u2069",
    "x\U000e0041\U000e007f",
    "\ud83d",
]


def obeyed(text: str) -> bool:
    return any((ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_terminal_obeys_comes_through(text: str) -> None:
    cleaned = clean(text)
    assert not obeyed(cleaned)
    cleaned.encode("utf-8")
    assert cleaned, "it is shown, not dropped"


def test_every_code_point_is_safe_wherever_text_is_cut() -> None:
    everything = "".join(map(chr, range(0x3000))) + "".join(HOSTILE)
    rng = random.Random(0)
    start, pieces = 0, []
    while start < len(everything):
        end = start + rng.randint(1, 7)
        pieces.append(clean(everything[start:end]))
        start = end
    assert not obeyed("".join(pieces))


def test_ordinary_text_is_left_alone() -> None:
    for text in ("plain\n\ttabs", "naïve 北京 🎉👩‍👩‍👧 عربي עברית", "می‌خواهم", "[b]markup[/b] [/INST] {}"):
        assert clean(text) == text
    assert clean("a\r\nb") == "a\nb"


def test_a_line_is_one_line_and_short() -> None:
    assert clean_line("a\n\n b\tc") == "a b c"
    assert len(clean_line("x" * 500)) == 200
    assert clean_line("x" * 500, 10) == "x" * 9 + "…"


def test_json_for_a_terminal_says_what_json_says() -> None:
    everything = [chr(code) for code in range(0x110000)]
    line = json_line(everything)
    assert json.loads(line) == everything
    assert not obeyed(line)
    assert clean(line) == line
    assert len(line.splitlines()) == 1
    line.encode("utf-8")
    assert json_line({"naïve": "北京 🎉"}) == '{"naïve": "北京 🎉"}', "what is harmless stays legible"


@pytest.mark.parametrize("text", ["", "junk", "[" * 5000, b"\xff", '{"a":' * 5000])
def test_json_that_is_none_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e400", "[-1e999]", "[" * 5000, "1" * 5000])
def test_numbers_that_json_cannot_carry_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_strict_json(text)


def test_strict_json_can_always_be_encoded() -> None:
    text = r'{"\ud83d": ["\ude00\ud83d", "\ud83d\ude00", "\\ud83d", 1e308, -0.1, 12345678901234567890]}'
    value = parse_strict_json(text)
    assert value == {"\ufffd": ["\ufffd\ufffd", "\U0001f600", r"\ud83d", 1e308, -0.1, 12345678901234567890]}
    json.dumps(value, ensure_ascii=False).encode("utf-8")
