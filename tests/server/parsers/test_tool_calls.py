"""Test that tool calls are found in a text, in any pieces."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lib.calls import read, together
from minillm.grammar.grammar import Grammar, grammar_of
from minillm.server.bodies import ChatBody
from minillm.server.parsers.call_formats import Scanner
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, TextPart
from minillm.server.parsers.thoughts import ThoughtReader
from minillm.server.parsers.tool_calls import FORMATS, CallReader, ForcedReader
from minillm.server.parsers.tool_choice import CallForm, ToolChoice, call_form, call_formats, choice_of
from minillm.service.prepare import with_arguments

F = '{"name": "f", "arguments": {"a": "} </tool_call> \\" {", "b": [1, {}]}}'
G = '{"name": "g", "parameters": {}}'
F_ARGUMENTS = {"a": '} </tool_call> " {', "b": [1, {}]}
BOTH = [("f", F_ARGUMENTS), ("g", {})]
BROKEN = "<tool_call>{x}</tool_call>"
NO_OBJECT = '<tool_call>{"name": "g", "arguments": [1]}</tool_call>'
HALF = r'<tool_call>{"name": "g", "arguments": {"a": "\ud83d", "\ude00": 1}}</tool_call>'
NO_NUMBER = '<tool_call>{"name": "g", "arguments": {"a": NaN}}</tool_call>'
TOO_LARGE = '<tool_call>{"name": "g", "arguments": {"a": [-1e400]}}</tool_call>'
IN_TEXT = r'<tool_call>{"name": "g", "arguments": "{\"a\": Infinity}"}</tool_call>'
# text, content, calls
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "words": ("Hello  you\n", "Hello  you\n", []),
    "hermes": (f"<tool_call>\n{F}\n</tool_call>", "", [("f", F_ARGUMENTS)]),
    "hermes, twice": (f"<tool_call>{F}</tool_call>\n<tool_call>\n{G}</tool_call>\n", "", BOTH),
    "hermes, a list": (f"<tool_call>[{F}, {G}]</tool_call>", "", [("f", F_ARGUMENTS), ("g", {})]),
    "hermes, not closed": (f"<tool_call>{G}", "", [("g", {})]),
    "words before": (f"Let me see.\n\n<tool_call>{G}</tool_call>", "Let me see.", [("g", {})]),
    "words behind": (f"A <tool_call>{G}</tool_call> B", "A\nB", [("g", {})]),
    "llama": (G, "", [("g", {})]),
    "llama, python": (f"<|python_tag|>{F}; {G}", "", [("f", F_ARGUMENTS), ("g", {})]),
    "llama, typed": ('{"type": "function", "name": "g", "parameters": {}}', "", [("g", {})]),
    "openai's": ('{"type": "function", "function": {"name": "g", "arguments": "{\\"x\\": 1}"}}', "", [("g", {"x": 1})]),
    "mistral": (f" [{F}, {G}]", "", [("f", F_ARGUMENTS), ("g", {})]),
    "an unknown tool": ('<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": "h"}</tool_call>', []),
    "broken": ('<tool_call>{"name": "g", x}</tool_call>', '<tool_call>{"name": "g", x}</tool_call>', []),
    "cut short": ('<tool_call>{"name": "g", "argu', '<tool_call>{"name": "g", "argu', []),
    "broken, then a call": (f"{BROKEN} <tool_call>{G}</tool_call>", BROKEN, [("g", {})]),
    "other JSON": ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    "no object": (NO_OBJECT, NO_OBJECT, []),
    "a list of words": ("[1] is one\n[2] is two", "[1] is one\n[2] is two", []),
    "in words": (f"So {G}", f"So {G}", []),
    "the tag alone": ("<tool_call>", "<tool_call>", []),
    "tags within tags": (f"<tool_call><tool_call>{G}</tool_call>", "<tool_call>", [("g", {})]),
    "half a character": (HALF, "", [("g", {"a": "\ufffd", "\ufffd": 1})]),
    "no number": (NO_NUMBER, NO_NUMBER, []),
    "too large a number": (TOO_LARGE, TOO_LARGE, []),
    "no number in text": (IN_TEXT, IN_TEXT, []),
    "nothing": ("", "", []),
    "spaces": (" \n", " \n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_wherever_the_text_is_cut(name: str) -> None:
    text, said, calls = CASES[name]
    for cuts in ([], list(range(len(text))), *([cut] for cut in range(len(text)))):
        assert together(read(CallReader({"f": {}, "g": {}}, 16), text, cuts)) == (said, calls), cuts


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", G, F, "{", "}", '"', " ", "\n", "x", "<", "["])), st.data()
)
def test_a_reading_does_not_depend_on_the_cuts(pieces: list[str], data: Any) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = together(read(CallReader({"f": {}, "g": {}}, 16), text, []))
    assert together(read(CallReader({"f": {}, "g": {}}, 16), text, cuts)) == whole
    if not whole[1]:
        assert whole[0] == text, "where there is no call, nothing is lost"


def test_words_do_not_wait_for_the_end() -> None:
    reader = CallReader({"f": {}}, 16)
    assert reader.push("Hello") == [TextPart("Hello")]
    assert reader.push(" you <") == [TextPart(" you")]
    assert reader.push("b>") == [TextPart(" <b>")]
    reader = CallReader({"f": {}}, 16)
    assert reader.push('{"x') == [TextPart('{"x')], "that can be no call any more"


def test_calls_beyond_the_most_are_dropped() -> None:
    text = f"<tool_call>{G}</tool_call><tool_call>{F}</tool_call>"
    assert together(read(CallReader({"f": {}, "g": {}}, 1), text, [])) == ("", [("g", {})])


def test_a_long_call_is_read_in_linear_time() -> None:
    scanner = Scanner()
    text = json.dumps({"a": "x{" * 50_000})
    assert [scanner.feed(each) for each in text] == [None] * (len(text) - 1) + [1]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
def test_the_end_of_json_is_found(value: Any) -> None:
    text = json.dumps({"v": value})
    assert Scanner().feed(text + "} ]x") == len(text)


TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}, "s": {"$ref": "#/$defs/s"}}, "required": ["n"],
        "$defs": {"s": {"type": "string", "maxLength": 3}}}}},
    {"type": "function", "function": {"name": "g.h-1", "parameters": {"type": "object"}}},
]  # fmt: skip
FORMS = {
    "hermes": call_form(""),
    "llama": call_form('{% if tools %}{"name": …, "parameters": {}}<|python_tag|>'),
    "mistral": call_form("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]"),
}


def test_a_template_without_tools_tells_no_form_of_calls() -> None:
    assert call_form("[TOOL_CALLS]") == FORMS["hermes"] != FORMS["mistral"]


@pytest.mark.parametrize(
    ("template", "read", "not_read"),
    [
        ("{% if tools %}<tool_call>", "<tool_call>", "json"),
        ("{% if tools %}<function=", "<function=", "json"),
        ("{% if tools %}[TOOL_CALLS]", "[TOOL_CALLS]", "<tool_call>"),
        ("{% if tools %}<|python_tag|>", "python", "[TOOL_CALLS]"),
        ("no tools", "json", "named"),
    ],
)
def test_a_template_tells_the_formats_of_calls(template: str, read: str, not_read: str) -> None:
    assert read in call_formats(template)
    assert not_read not in call_formats(template)


def test_forms_are_told_apart() -> None:
    assert len({form.delimiters for form in FORMS.values()}) == 3


def allowed(lark: str, text: str) -> tuple[str, bool]:
    """The beginning of a text that a grammar allows, and whether an answer may end there."""
    import llguidance

    bytes_of = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(bytes_of, llguidance.LLMatcher.grammar_from_lark(lark))
    ids = bytes_of.tokenize_str(text)
    return bytes(ids[: matcher.try_consume_tokens(ids)]).decode(), matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_forced_call_is_what_the_grammar_allows(form: CallForm) -> None:
    choice = ToolChoice(tuple(TOOLS), required=True, most=3)
    grammar = grammar_of("grammar", {"lark": with_arguments(choice.grammar(form)["lark"], choice.schemas)})
    assert isinstance(grammar, Grammar)
    call = f'{{"name": "f", "{form.arguments}": {{"n": 3, "s": "a{{\\""}}}}'
    other = f'{{"name": "g.h-1", "{form.arguments}": {{}}}}'
    before, between, behind = form.delimiters
    good = [before + call + behind, before + other + behind]
    if form.has_many:
        good.append(before + between.join([call, other, call]) + behind)
    bad = [call[:-1], before + call.replace("3", '"3"') + behind, before + call.replace('"f"', '"h"') + behind]
    bad += [before + call.replace('"n": 3', '"x": 3') + behind, before + between.join([call] * 4) + behind, "Hi"]
    for text in (*good, *bad):
        assert (allowed(grammar.source, text) == (text, True)) == (text in good), text
    for text in good:
        for cuts in ([], list(range(len(text))), [len(text) // 2]):
            said, calls = together(read(ForcedReader(), text, cuts))
            assert said == ""
            assert [name for name, _ in calls] == ["f", "g.h-1", "f"][: len(calls)] or calls == [("g.h-1", {})]
            for name, arguments in calls:
                jsonschema.validate(
                    arguments, next(t for t in TOOLS if t["function"]["name"] == name)["function"]["parameters"]
                )


FREE = ["Hello", "", "  \n", "a < b <tool", "I see [1] {"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_strict_call_is_what_the_schema_allows_in_an_answer_that_is_free(form: CallForm) -> None:
    choice = ToolChoice(tuple(TOOLS), strict=frozenset({"f"}), most=2)
    grammar = grammar_of("grammar", {"lark": with_arguments(choice.grammar(form)["lark"], choice.schemas)})
    assert isinstance(grammar, Grammar)
    before, between, behind = form.delimiters
    call = f'{{"name": "f", "{form.arguments}": {{"n": 3}}}}'
    loose = f'{{"name": "g.h-1", "{form.arguments}": {{"x": [null]}}}}'
    good = [before + call + behind, before + loose + behind, *FREE]
    if form.has_many:
        good.append(before + between.join([loose, call]) + behind)
    if form.tag:
        good += [f"Hm.\n{before}{call}{behind} So."]
    bad = [before + call.replace("3", '"3"') + behind, before + call.replace('"f"', '"h"') + behind, before + call[:-1]]
    bad += [f"\n {before}{call.replace('n', 'm')}", before + between.join([call] * 3) + behind]
    for text in (*good, *bad):
        assert (allowed(grammar.source, text) == (text, True)) == (text in good), text
    for text in good:
        said, calls = together(read(choice.reader(form, FORMATS), text, list(range(len(text)))))
        assert len(calls) == text.count('"name"')
        assert calls or said == text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_tool_that_is_not_allowed_cannot_be_called(form: CallForm) -> None:
    wanted = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = choice_of(ChatBody(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": wanted}))
    grammar = with_arguments(choice.grammar(form)["lark"], choice.schemas)
    before, _, behind = form.delimiters
    call = f'{before}{{"name": "f", "{form.arguments}": {{"n": 3}}}}{behind}'
    for text in (call, *FREE):
        assert allowed(grammar, text) == (text, True)
    assert allowed(grammar, call.replace('"f"', '"g.h-1"'))[1] is False
    assert len(choice.tools) == 2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_is_calls_alone_or_what_the_schema_allows(form: CallForm) -> None:
    choice = ToolChoice(tuple(TOOLS), strict=frozenset({"f"}), most=2, answer={"type": ["array", "object", "string"]})
    grammar = grammar_of("grammar", {"lark": with_arguments(choice.grammar(form)["lark"], choice.schemas)})
    assert isinstance(grammar, Grammar)
    before, _, after = form.delimiters
    call = f'{before}{{"name": "f", "{form.arguments}": {{"n": 3}}}}{after}'
    texts = [
        '{"a": "<tool_call>"}',
        json.dumps(call),
        '{"name": "f"}',
        "[",
        '[{"a": 1}]',
        '{"name": "h", "arguments": {}}',
    ]
    for text in (call, *texts, f"Hm. {call}"):
        assert (allowed(grammar.source, text) == (text, True)) == (text not in ("[", f"Hm. {call}")), text
    for text in (call, *texts):
        for cuts in ([], list(range(len(text)))):
            said, calls = together(read(choice.reader(form, FORMATS), text, cuts))
            assert (said, calls) == (("", [("f", {"n": 3})]) if text == call else (text, []))


@example(["<think>", "</think>", '{"name": "f", "', "parameters", '": {"m": 3', "}}"], FORMS["llama"])
@example(["<|python_tag|>", '{"name": "f", "', "parameters", '": {"m": 3', "}}"], FORMS["llama"])
@given(st.lists(st.sampled_from([
    "<tool_call>", "\n", '{"name": "f", "', "arguments", "parameters", '": {"n": 3', '": {"m": 3', "}}",
    "\n</tool_call>", "[", "]", "```json\n", "```", "[f(m=3)]", "<function=f>", '{"m": 3}', "</function>",
    "<|python_tag|>", "x", " ", "<think>", "</think>",
]), max_size=9), st.sampled_from(list(FORMS.values())))  # fmt: skip
def test_no_other_call_of_a_strict_tool_is_found(pieces: list[str], form: CallForm) -> None:
    """Read whatever the grammar allows as the server reads it, with all formats of the model."""
    choice, text = ToolChoice(tuple(TOOLS[:1]), strict=frozenset({"f"})), "".join(pieces)
    grammar = with_arguments(choice.grammar(form)["lark"], choice.schemas)
    text, _ = allowed(grammar, text)
    reader = ThoughtReader(choice.reader(form, FORMATS), opened=False)
    calls = [part.text for part in [*reader.push(text), *reader.finish()] if isinstance(part, ArgumentsPart)]
    for arguments in calls:
        assert json.loads(arguments) == {"n": 3}


def test_arguments_of_a_forced_call_do_not_wait_for_the_end() -> None:
    reader = ForcedReader()
    [called, first] = reader.push('<tool_call>\n{"name": "f", "arguments": {"n"')
    assert isinstance(called, CallPart)
    assert (called.name, first) == ("f", ArgumentsPart(0, '{"n"'))
    assert reader.push(": 1}") == [ArgumentsPart(0, ": 1}")]
    assert reader.push("}\n</tool_call>") == []


class Counting(CallReader):
    """Counts the characters that are looked at."""

    num_read = 0

    def _read(self, *, final: bool) -> list[Part]:
        self.num_read += len(self._buffer) + sum(map(len, self._blanks))
        return super()._read(final=final)


@pytest.mark.parametrize("blank", [" ", "\n", " ;"])
@pytest.mark.parametrize(
    "beginning",
    [
        "",
        "<tool_call>",
        "<tool_call><function=f>",
        '<tool_call>{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {}}',
        "<|python_tag|>",
        "[",
        "```",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[CALL_ID]",
    ],
)
def test_blanks_are_looked_at_a_few_times(beginning: str, blank: str) -> None:
    """A model may say nothing else until its context is full: then it must not take the square of their number."""
    reader = Counting({"f": {}}, 9)
    parts = reader.push(beginning)
    for _ in range(3000):
        parts += reader.push(blank)
    parts += reader.push("end") + reader.finish()
    assert reader.num_read < 3000 * 1000
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    assert said.endswith("end")
    if blank == " " and not any(isinstance(part, CallPart) for part in parts):
        assert len(said) >= 3000, "none of it is lost"
