"""Test the formats of tool calls: each is found in any pieces, and none in similar text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.calls import read, together
from minillm.server.parsers.call_formats import Scanner, python_calls, xml_call
from minillm.server.parsers.tool_calls import FORMATS, NAMED, CallReader
from minillm.server.parsers.tool_choice import call_formats

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {
        "town": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"},
        "exact": {"type": "boolean"}, "unit": {"enum": ["1", "C"]}, "note": {"type": ["string", "null"]}, "any": {}}},
    "get": {"type": "object", "properties": {}},
    "g.h-1": {},
}  # fmt: skip
BERN = ("get_weather", {"town": "Bern"})
GET: tuple[str, Any] = ("get", {})
W = '{"name": "get_weather", "arguments": {"town": "Bern"}}'
G = '{"name": "get", "arguments": {}}'
ODD = "a\n</tool_call> <tool_call> } ] \" ' <b>"
QWEN = "<tool_call>\n<function=get_weather>\n<parameter=town>\nBern\n</parameter>\n</function>\n</tool_call>"
QWEN_GET = "<tool_call>\n<function=get>\n</function>\n</tool_call>"
# formats that are read besides the usual ones, text, content, calls
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "two in one tag": (f"<tool_call>{W}\n{G}</tool_call>", "", [BERN, GET]),
    "two in one tag, with a comma": (f"<tool_call>\n{W},\n{G}\n</tool_call> Ok", "Ok", [BERN, GET]),
    "two in one tag, one is none": (f"<tool_call>{W}\n{{x}}</tool_call>", "{x}</tool_call>", [BERN]),
    "arguments null": ('<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [GET]),
    "arguments null, in parameters": ('{"name": "get", "parameters": null}', "", [GET]),
    "arguments empty text": ('<tool_call>{"name": "get", "arguments": ""}</tool_call>', "", [GET]),
    "no arguments in a tag": ('<tool_call>{"name": "get"}</tool_call>', "", [GET]),
    "no arguments, no tag": ('{"name": "get"}', '{"name": "get"}', []),
    "other keys": ('{"name": "get", "age": 3}', '{"name": "get", "age": 3}', []),
    "other keys and arguments": ('{"name": "get", "arguments": {}, "age": 3}',) * 2 + ([],),
    "a list of other things": (f'[{G}, {{"name": "Ada", "arguments": {{}}}}]',) * 2 + ([],),
    "mistral": ('[TOOL_CALLS]get_weather[ARGS]{"town": "Bern"}', "", [BERN]),
    "mistral, twice": ('[TOOL_CALLS]get_weather[ARGS]{"town": "Bern"}[TOOL_CALLS]get[ARGS]{}', "", [BERN, GET]),
    "mistral, with an id": ('[TOOL_CALLS]get[CALL_ID]abc123XYZ[ARGS]{}', "", [GET]),
    "mistral, without args": ('Wait.[TOOL_CALLS] get {}', "Wait.", [GET]),
    "mistral, a list": (f"[TOOL_CALLS] [{W}, {G}]", "", [BERN, GET]),
    "mistral, unknown": ("[TOOL_CALLS]getter[ARGS]{}", "[TOOL_CALLS]getter[ARGS]{}", []),
    "mistral, broken": ("[TOOL_CALLS]get[ARGS]{x}", "[TOOL_CALLS]get[ARGS]{x}", []),
    "mistral, no arguments": ("[TOOL_CALLS]get it", "[TOOL_CALLS]get it", []),
    "python": ('[get_weather(town="Bern"), get()]', "", [BERN, GET]),
    "python, with all kinds": (
        "[get_weather(town='B\\'n ]', days=-3, any=[1, {'a': None, \"b\": true}, (2.5,)], exact=False)]",
        "",
        [("get_weather", {"town": "B'n ]", "days": -3, "any": [1, {"a": None, "b": True}, [2.5]], "exact": False})]),
    "python, after its tag": ("<|python_tag|>[ get ( ) ]", "", [GET]),
    "python, no literal": ("[get(a=open('x'))]", "[get(a=open('x'))]", []),
    "python, not by name": ("[get(1)]", "[get(1)]", []),
    "python, unpacked": ("[get(**{'a': 1})]", "[get(**{'a': 1})]", []),
    "python, infinite": ("[get(a=1e999)]", "[get(a=1e999)]", []),
    "python, half a character": ("[get(a='\\ud83d')]", "", [("get", {"a": "\ufffd"})]),
    "python, unknown": ("[getter()]", "[getter()]", []),
    "python, one unknown": ("[get(), getter()]", "[get(), getter()]", []),
    "python, in words": ("Use [get()]", "Use [get()]", []),
    "python, broken": ("[get(]) and so on", "[get(]) and so on", []),
    "function": ('<function=get_weather>{"town": "Bern"}</function>', "", [BERN]),
    "function, twice": ('Two: <function=get>{}</function>\n<function=get_weather>{"town": "Bern"}</function>.',
                        "Two:\n.", [GET, BERN]),
    "function, comma": ("<function=get>{}</function>, yes", ", yes", [GET]),
    "function, not closed": ("<function=get>{}", "", [GET]),
    "function, unknown": ("<function=getter>{}</function>", "<function=getter>{}</function>", []),
    "function, no call": ("<function=get> is a tag", "<function=get> is a tag", []),
    "function, cut short": ('<function=get>{"a', '<function=get>{"a', []),
    "qwen coder": (QWEN, "", [BERN]),
    "qwen coder, twice": (f"Let me see.\n{QWEN}\n{QWEN_GET}\n", "Let me see.", [BERN, GET]),
    "qwen coder, two in one tag": (f"{QWEN[:-12]}<function=get></function></tool_call>", "", [BERN, GET]),
    "qwen coder, without its tag": (QWEN[12:-13], "", [BERN]),
    "qwen coder, odd values": (
        f"<tool_call><function=get_weather><parameter=town>\n{ODD}\n</parameter>\n<parameter=days>\n3\n</parameter>"
        "<parameter=where>{\"a\": [1]}</parameter><parameter=exact>True</parameter><parameter=unit>1</parameter>"
        "<parameter=note>null</parameter><parameter=any>[2]</parameter><parameter=more>5</parameter></function></tool_call>",
        "", [("get_weather", {"town": ODD, "days": 3, "where": {"a": [1]}, "exact": True, "unit": "1", "note": None,
                              "any": [2], "more": "5"})]),
    "qwen coder, tags in a value": (QWEN.replace("Bern", "<a></function></a>"), "",
                                    [("get_weather", {"town": "<a></function></a>"})]),
    "qwen coder, cut short": (QWEN[:-40], QWEN[:-40], []),
    "qwen coder, unknown": (QWEN.replace("get_w", "w"), QWEN.replace("get_w", "w"), []),
    "a code block": (f"```json\n{W}\n```", "", [BERN]),
    "a code block, two calls": (f"```\n{W}\n{G}\n```\nDone", "Done", [BERN, GET]),
    "a code block of python": ('```tool_code\n[get_weather(town="Bern")]\n```', "", [BERN]),
    "a code block in a tag": (f"<tool_call>\n```json\n{W}\n```\n</tool_call>", "", [BERN]),
    "a code block, other code": ("```python\nget()\n```",) * 2 + ([],),
    "a code block, other JSON": ('```json\n{"name": "get", "age": 3}\n```',) * 2 + ([],),
    "a code block after words": (f"So:\n```json\n{G}\n```",) * 2 + ([],),
    "ticks": ("``` x", "``` x", []),
    "another tool's name": ('<tool_call>{"name": "g.h-1", "arguments": {}}</tool_call>', "", [("g.h-1", {})]),
}  # fmt: skip
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=get>", "</function>", "<parameter=a>",
    "```json\n", "</parameter>", "```", "[get()]", "get", "{}", G, W, "[", "]", "{", '"', "'", ",", " ", "\n", "x",
    "<|python_tag|>",
]  # fmt: skip


def reading(text: str, cuts: list[int], formats: frozenset[str] = FORMATS) -> Any:
    return together(read(CallReader(TOOLS, 16, formats), text, cuts))


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    text, said, calls = CASES[name]
    for cuts in ([], list(range(len(text))), *([cut] for cut in range(len(text)))):
        assert reading(text, cuts) == (said, calls), cuts


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from([FORMATS, FORMATS | {NAMED}]), st.data())
def test_a_reading_does_not_depend_on_the_cuts(pieces: list[str], formats: frozenset[str], data: Any) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = reading(text, [], formats)
    assert reading(text, cuts, formats) == whole == reading(text, list(range(len(text))), formats)
    if not whole[1]:
        assert whole[0] == text, "where there is no call, nothing is lost"


HIDDEN = 'get_weather{"town": "Bern"}get{}'  # Mistral's, whose markers have no text


def test_names_without_markers_are_calls_of_mistrals_models_only() -> None:
    for cuts in ([], list(range(len(HIDDEN)))):
        assert reading(HIDDEN, cuts, FORMATS | {NAMED}) == ("", [BERN, GET])
        assert reading(HIDDEN, cuts) == (HIDDEN, [])
    assert reading("get it {}", [], FORMATS | {NAMED}) == ("get it {}", [])


@pytest.mark.parametrize(
    ("template", "text", "is_call"),
    [
        ("{{ tools }} <tool_call>", f"<tool_call>{G}</tool_call>", True),
        ("{{ tools }} <tool_call>", G, False),
        ("{{ tools }} <tool_call>", "[get()]", False),
        ("{{ tools }} <tool_call><function=", QWEN_GET, True),
        ("{{ tools }} [TOOL_CALLS]", f"[{G}]", True),
        ("{{ tools }} [TOOL_CALLS]", "get{}", True),
        ("{{ tools }} <|python_tag|>", G, True),
        ("{{ tools }} <|python_tag|>", "[get()]", True),
        ("{{ tools }} <|python_tag|>", f"<tool_call>{G}</tool_call>", False),
        ("no such thing", G, True),
        ("no such thing", f"<tool_call>{G}</tool_call>", True),
        ("no such thing", "get{}", False),
    ],
)
def test_the_template_tells_what_a_call_is(template: str, text: str, is_call: bool) -> None:
    assert reading(text, [], call_formats(template)) == (("", [GET]) if is_call else (text, []))


def test_words_do_not_wait_for_the_end() -> None:
    for text in ("Hello", "`x`", "[x", "{x", "```python\nx", "get up", "<x", "[getter(", "<|x"):
        reader = CallReader(TOOLS, 16)
        assert together(reader.push(text)) == (text, []), text
    reader = CallReader(TOOLS, 16)
    assert together(reader.push("The tag <function=get> is")) == ("The tag <function=get> is", [])


def test_white_space_is_read_in_linear_time() -> None:
    reader = CallReader(TOOLS, 16)
    assert [part for _ in range(200_000) for part in reader.push(" \n")] == []
    assert together(reader.push("x"))[0] == " \n" * 200_000 + "x"


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=9,
))  # fmt: skip
def test_python_literals_are_read_as_python_reads_them(value: Any) -> None:
    text = f"[get(a={value!r})]"
    assert Scanner("\"'").feed(text + ")]'") == len(text)
    [(name, arguments)] = python_calls(text, TOOLS)
    assert (name, json.loads(arguments)) == ("get", {"a": value})


def test_no_python_is_run(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text in (f"[get(a=open({str(file)!r}, 'w'))]", f"[open(file={str(file)!r}, mode='w')]", "[get(a=f'{1}')]"):
        assert python_calls(text, TOOLS) == []
    for text in (
        "[" * 9000,
        "[get(a=" + "-" * 90_000 + "1)]",
        "[get(a=" + "(" * 9000 + ")]",
        "[get(a='\0')]",
        "[get(a=b'')]",
        "[get]",
    ):
        assert python_calls(text, TOOLS) == []
    assert not file.exists()


def test_values_of_xml_have_the_types_of_the_schema() -> None:
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}  # pydantic's schema of an optional text
    either = {"anyOf": [{"type": "string"}, {"type": "array"}]}
    for text, schema, value in (
        ("5", {"type": "string"}, "5"), ("5", {"type": "integer"}, 5), ("5", {}, 5), ("5", None, "5"), ("x", {}, "x"),
        ("{\"a\": 1}", {"type": "object"}, {"a": 1}), ("NaN", {"type": "number"}, "NaN"), ("1e999", {}, "1e999"),
        ("null", {"type": ["string", "null"]}, None), ("5", {"type": ["string", "null"]}, "5"),
        ("", {"type": "string"}, ""), ("5", optional, "5"), ("null", optional, None), ("[1]", either, [1]),
        ("5", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, 5), ("5", {"type": None, "enum": None}, 5),
    ):  # fmt: skip
        call = xml_call("f", f"<parameter=a>\n{text}\n</parameter>", {"f": {"properties": {"a": schema}}})
        assert call is not None
        assert json.loads(call[1]) == {"a": value}, (text, schema)
