"""Tools over HTTP, with OpenAI's own client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from lib.server import Server, served

MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a town", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SAYS = 'I see.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Bern", "days": 2}}\n</tool_call>'


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NOTHING = {"type": "object", "properties": {"a": {"type": "nothing"}}}


def allowing(mode: str, *names: str) -> Any:
    """Return the ``tool_choice`` that allows these tools."""
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def said(arguments: str) -> dict[str, Any]:
    """An assistant's message with a call that has these arguments."""
    function = {"name": "clock", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with room for a prompt that tells of tools, a token a byte."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    with served(directory, "--num-blocks", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def create(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 900, "seed": 1, **more}
    return client.chat.completions.create(**fields)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("more", [{"n": 4}, {"temperature": 0}, {"parallel_tool_calls": False}], ids=str)
def test_a_call_that_must_be_is_valid(client: openai.OpenAI, choice: Any, more: dict[str, Any]) -> None:
    for each in create(client, tool_choice=choice, **more).choices:
        assert each.finish_reason == "tool_calls"
        assert each.message.content is None
        assert each.message.tool_calls
        for call in each.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if choice is NAMED:
                assert call.function.name == "weather"
            if call.function.name == "weather":
                jsonschema.validate(arguments, SCHEMA)
            else:
                assert arguments == {}
        if choice is NAMED or "parallel_tool_calls" in more:
            assert len(each.message.tool_calls) == 1


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_can_be_called(client: openai.OpenAI, mode: str) -> None:
    """pydantic-ai, dspy and LiteLLM send it. The model sees the other tools, so the prompt stays cached."""
    for each in create(client, tool_choice=allowing(mode, "clock"), n=4).choices:
        called = [call.function.name for call in each.message.tool_calls or ()]
        assert called == ["clock"] * len(called)
        assert called or mode == "auto"
        assert "<tool_call>" not in (each.message.content or "")
    counts = [create(client, **fields).usage.prompt_tokens for fields in ({}, {"tool_choice": allowing(mode, "clock")})]
    assert counts[0] == counts[1]


def test_a_stream_tells_the_name_first_and_then_the_arguments(client: openai.OpenAI) -> None:
    whole = create(client, tool_choice=NAMED).choices[0].message.tool_calls[0].function
    text, pieces, reasons = "", 0, []
    for chunk in create(client, tool_choice=NAMED, stream=True):
        for each in chunk.choices:
            reasons += [each.finish_reason] if each.finish_reason else []
            for call in each.delta.tool_calls or ():
                assert call.index == 0
                if pieces == 0:
                    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", "")
                    assert call.id
                else:
                    assert call.id is None
                text += call.function.arguments
                pieces += 1
    assert text == whole.arguments
    assert pieces > 3, "the arguments come as they are written"
    assert reasons == ["tool_calls"]


def test_openais_own_stream_puts_a_call_together(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 900}
    with client.chat.completions.stream(**fields, seed=3) as stream:
        done = stream.get_final_completion()
    assert done.choices[0].message.tool_calls
    for call in done.choices[0].message.tool_calls:
        json.loads(call.function.arguments)


def test_a_free_answer_may_call(client: openai.OpenAI) -> None:
    body = {"guided_choice": [SAYS]}
    [choice] = create(client, extra_body=body).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Bern", "days": 2})
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS, extra_body=body) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "I see."
    assert message.tool_calls
    assert message.tool_calls[0].function.arguments == call.function.arguments
    for more in ({"tool_choice": "none"}, {"tools": [TOOLS[1]]}):
        [choice] = create(client, extra_body=body, **more).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", SAYS)


@pytest.mark.parametrize(
    "says",
    [
        '<tool_call>{"name": "clock", "arguments": null}{"name": "weather", "arguments": {"town": "Bern", "days": 2}}',
        '[clock(), weather(town="Bern", days=2)]',
        '[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]weather[ARGS]{"town": "Bern", "days": 2}',
        '<function=clock>{}</function><function=weather>{"town": "Bern", "days": 2}</function>',
        "<tool_call><function=clock></function><function=weather><parameter=town>Bern</parameter>"
        "<parameter=days>2</parameter></function></tool_call>",
        '```json\n[{"name": "clock", "arguments": {}}, {"name": "weather", "parameters": {"town": "Bern", "days": 2}}]'
        "\n```",
    ],
    ids=["hermes", "python", "mistral", "llama", "qwen", "code"],
)
def test_every_format_is_read_alike_whole_and_as_a_stream(client: openai.OpenAI, says: str) -> None:
    body = {"guided_choice": [says]}
    [choice] = create(client, extra_body=body).choices
    calls = [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls]
    assert calls == [("clock", {}), ("weather", {"town": "Bern", "days": 2})]
    assert choice.message.content is None
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS, extra_body=body) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    calls = [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls]
    assert calls == [("clock", {}), ("weather", {"town": "Bern", "days": 2})]


def test_a_tool_may_have_the_keywords_that_answers_may_have(client: openai.OpenAI) -> None:
    kinds = [{"type": "integer", "enum": [number]} for number in (1, 2)]
    schema = {
        "type": "object",
        "properties": {"a": {"oneOf": kinds}, "u": {"type": "string", "format": "uri-template", "maxLength": 3}},
        "required": ["a"],
    }
    message = create(client, tools=[tool("f", schema)], tool_choice="required").choices[0].message
    assert all(json.loads(call.function.arguments)["a"] in (1, 2) for call in message.tool_calls)


def test_a_strict_tool_may_be_called_or_not(client: openai.OpenAI) -> None:
    tools = [tool("weather", SCHEMA, strict=True), TOOLS[1]]
    for choice in create(client, tools=tools, n=3, max_tokens=20).choices:
        assert choice.message.content or choice.message.tool_calls


def begins_with(server: Server, text: str) -> dict[str, int]:
    """A bias with which an answer begins with this character, if a grammar allows it."""
    [token_id] = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"][-1:]
    return {str(token_id): 100}


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_follows_its_schema_or_calls_a_tool(client: openai.OpenAI, server: Server, strict: bool) -> None:
    """Cover agents whose final answer has a type, and which call tools before."""
    tools = [tool("weather", SCHEMA, strict=strict), TOOLS[1]]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": "<tool_call>"}}}}
    fields: Any = {"tools": tools, "response_format": form, "temperature": 0}
    [choice] = create(client, **fields, logit_bias=begins_with(server, "{")).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert json.loads(choice.message.content) == {"a": "<tool_call>"}
    fields["logit_bias"] = begins_with(server, "<")
    [choice] = create(client, **fields, parallel_tool_calls=False).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    if strict and call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    streamed = [chunk.choices[0].delta for chunk in create(client, **fields, parallel_tool_calls=False, stream=True)]
    pieces = [each.function.arguments for delta in streamed for each in delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments
    assert not any(delta.content for delta in streamed)


def test_a_call_that_must_be_leaves_the_schema_of_answers_out(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 3}}}
    [choice] = create(client, tool_choice=NAMED, response_format=form).choices
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_an_answer_of_a_schema_is_no_call(client: openai.OpenAI, server: Server) -> None:
    for properties in ({"name": "clock", "arguments": {}}, {"name": "clock", "age": 3}):
        schema = {
            "type": "object",
            "properties": {key: {"const": value} for key, value in properties.items()},
            "required": list(properties),
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        [choice] = create(client, response_format=form, logit_bias=begins_with(server, "{")).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert json.loads(choice.message.content) == properties


def test_arguments_with_half_a_character_are_sent_back_and_forth(client: openai.OpenAI) -> None:
    """Cover lone surrogates, which have no UTF-8: a model can write their escapes."""
    says = r'<tool_call>{"name": "clock", "arguments": {"zone": "\ud83d"}}</tool_call>'
    [choice] = create(client, extra_body={"guided_choice": [says]}).choices
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"zone": "\ufffd"}
    streamed = create(client, extra_body={"guided_choice": [says]}, stream=True)
    pieces = [each.function.arguments for chunk in streamed for each in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    half = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": r'{"zone": "\ud83d"}'}}
    for asked in (choice.message, {"role": "assistant", "tool_calls": [half]}):
        assert create(client, messages=[*MESSAGES, asked, answer], max_tokens=2).usage.completion_tokens


def test_the_conversation_goes_on_with_the_tools_answer(client: openai.OpenAI) -> None:
    asked = create(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    answer: Any = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "rain"}
    done = create(client, messages=[*MESSAGES, asked, answer], max_tokens=5)
    assert done.usage.prompt_tokens > create(client, max_tokens=5).usage.prompt_tokens


def test_tools_are_part_of_the_prompt(client: openai.OpenAI, server: Server) -> None:
    with_tools = create(client, max_tokens=1).usage.prompt_tokens
    without = create(client, max_tokens=1, tool_choice="none").usage.prompt_tokens
    assert with_tools > without + 50
    count = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()["count"]
    assert count == with_tools


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function"}]}, "tools", r"tools\[0\]\.function"),
        ({"tools": "x"}, "tools", "tools"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "two have the name clock"),
        ({"tool_choice": "always"}, "tool_choice", "must be none, auto, required, "),
        ({"tool_choice": {"type": "function", "function": {"name": "w"}}}, "tool_choice", "there is no tool 'w'"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "must be none"),
        ({"tool_choice": allowing("auto", "w", "clock")}, "tool_choice", "there is no tool 'w'"),
        ({"tool_choice": allowing("auto")}, "tool_choice", "must be none"),
        ({"tool_choice": allowing("none", "clock")}, "tool_choice", "must be none"),
        ({"tool_choice": allowing("auto", "clock"), "extra_body": {"guided_choice": ["x"]}}, "tool_choice", "grammar"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "extra_body": {"guided_choice": ["x"]}}, "tool_choice", "other grammar"),
        ({"tool_choice": "required", "response_format": {"type": "text"}, "extra_body": {"guided_choice": ["x"]}},
            "tool_choice", "other grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOTHING}}},
            "response_format", "response_format: the answer: the JSON schema"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "nothing"}}}}}]}, "tools", "tools: f: the JSON schema"),
        ({"tool_choice": "required", "tools": [*TOOLS, tool("bad", NOTHING)]}, "tools", "tools: bad: the JSON schema"),
        ({"tools": [tool("bad", NOTHING, strict=True), *TOOLS]}, "tools", "tools: bad: the JSON schema"),
        ({"tools": [tool("strict", SCHEMA, strict=True)], "extra_body": {"guided_choice": ["x"]}}, "tools", "strict"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, None, r"tool_calls\[0\]"),
        ({"messages": [*MESSAGES, {"role": "user", "content": "x", "tool_calls": []}]}, None, "unknown key"),
        ({"messages": [*MESSAGES, said('{"a":' * 70 + "1" + "}" * 70)]}, None, "arguments is nested deeper than 64"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        create(client, **fields)
    assert caught.value.param == param
    assert "Lark" not in caught.value.message


class Weather(pydantic.BaseModel):
    town: Literal["Bern", "Rome"]


def test_answers_that_the_client_has_parsed_are_taken_back(client: openai.OpenAI) -> None:
    """The client adds keys to the messages that it has parsed, and sends these keys with the message."""
    tools: Any = [openai.pydantic_function_tool(Weather)]
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 900, "seed": 1}
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    asked: Any = client.chat.completions.parse(**fields, **forced).choices[0].message
    said: Any = client.chat.completions.parse(**fields, response_format=Weather).choices[0].message
    [call] = asked.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert isinstance(said.parsed, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    for messages in ([asked, result, said], [asked.to_dict(), result, said.to_dict()]):
        assert create(client, messages=[*MESSAGES, *messages, *MESSAGES], max_tokens=1).usage.completion_tokens == 1
