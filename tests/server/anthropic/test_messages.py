"""Anthropic's Messages API with Anthropic's own client, next to the chat route's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.examples import examples
from lib.server import Server, served
from lib.tokens import THINKING
from minillm.server.anthropic.answers import MessageWriter, message_error
from minillm.server.http.sending import HTTPError
from minillm.server.parsers.parts import PlainReader

USER: Any = [{"role": "user", "content": "Weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "weather", "description": "Of a town", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "clock", "input_schema": {"type": "object"}, "type": "custom"},
]
CALLS = (
    'I see.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Bern", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
DEEP: Any = json.loads('{"a":' * 70 + "{}" + "}" * 70)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def says(*texts: str, **more: Any) -> dict[str, Any]:
    """Return fields that make the model say one of these texts."""
    return {"structured_outputs": {"choice": list(texts)}, **more}


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and a context for prompts with tools: a token is a byte."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    with served(directory, "--num-blocks", "1024", environment={"MINILLM_API_KEY": "key-of-anna"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="key-of-anna", max_retries=0)


def create(client: anthropic.Anthropic, body: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Create a message. The client has no parameter for the fields of ``body``."""
    fields = {"model": "tiny", "max_tokens": 600, "messages": USER, **fields}
    return client.messages.create(**fields, extra_body={"temperature": 0, **(body or {})})


def streamed(client: anthropic.Anthropic, body: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, list[Any]]:
    """Stream a message. Return it as the client has put it together, and the events."""
    fields = {"model": "tiny", "max_tokens": 600, "messages": USER, **fields}
    with client.messages.stream(**fields, extra_body={"temperature": 0, **(body or {})}) as stream:
        events = [each for each in stream if each.type not in ("text", "thinking", "input_json", "signature")]
        return stream.get_final_message(), events


def post(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    headers = {"x-api-key": "key-of-anna", "anthropic-version": "2023-06-01", **headers}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def content_of(message: Any) -> list[dict[str, Any]]:
    """Return the content blocks without fields of the client's own."""
    names = ("type", "text", "thinking", "signature", "name", "input")
    return [{name: value for name, value in each.to_dict().items() if name in names} for each in message.content]


@pytest.mark.parametrize(
    "system",
    ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]],
    ids=["text", "blocks"],
)
def test_a_message_is_the_answer_of_a_chat(server: Server, client: anthropic.Anthropic, system: Any) -> None:
    message = create(client, system=system, max_tokens=12)
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *USER], "max_tokens": 12, "temperature": 0}
    bearer = {"authorization": "Bearer key-of-anna"}
    theirs = httpx.post(f"{server.url}/v1/chat/completions", json=chat, headers=bearer, timeout=60).json()
    [block] = message.content
    assert block.text == theirs["choices"][0]["message"]["content"]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == theirs["usage"]["prompt_tokens"]
    assert usage.output_tokens == theirs["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "kinds", "reason"),
    [
        ({}, ["text"], "max_tokens"),
        (says("A town."), ["text"], "end_turn"),
        (says("<think>\nHm,\n so </think>\n\nBern."), ["thinking", "text"], "end_turn"),
        (says("<think>Hm.</think>" + CALLS), ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
        (says(CALLS), ["text", "tool_use", "tool_use"], "tool_use"),
        (says(CALLS, stop_sequences=["ee"]), ["text"], "stop_sequence"),
    ],
    ids=["free", "text", "thought", "thought and calls", "calls", "stop"],
)
def test_a_stream_builds_the_whole_message(
    client: anthropic.Anthropic, body: dict[str, Any], kinds: list[str], reason: str
) -> None:
    more: Any = {"tools": TOOLS, "max_tokens": 300 if body else 30}
    whole = create(client, body, **more)
    message, events = streamed(client, body, **more)
    assert [each.type for each in whole.content] == kinds
    assert whole.stop_reason == message.stop_reason == reason
    assert whole.stop_sequence == message.stop_sequence == ("ee" if reason == "stop_sequence" else None)
    plain = [{**each, "signature": each.get("signature") and "…"} for each in content_of(whole)]
    assert [{**each, "signature": each.get("signature") and "…"} for each in content_of(message)] == plain
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.cache_read_input_tokens is not None
    order = [each.type for each in events]
    assert (order[0], order[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0].message.usage.input_tokens > 0
    starts = [each for each in events if each.type == "content_block_start"]
    stops = [each for each in events if each.type == "content_block_stop"]
    assert [each.index for each in starts] == [each.index for each in stops] == list(range(len(kinds)))
    assert [each.content_block.type for each in starts] == kinds


def test_calls_have_names_and_arguments_and_take_results(client: anthropic.Anthropic) -> None:
    first = create(client, says("<think>Hm.</think>" + CALLS), tools=TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [(each.name, each.input) for each in calls] == [("weather", {"town": "Bern", "days": 2}), ("clock", {})]
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "Rain"}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "It stands still", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    turn: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert content_of(create(client, says("Rain."), tools=TOOLS, messages=turn)) == [{"type": "text", "text": "Rain."}]


def test_a_conversation_with_results_is_the_same_as_that_of_a_chat(server: Server, client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "a1", "name": "weather", "input": {"town": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "a1", "content": "Rain", "is_error": True}
    turn: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    function = {"name": "weather", "arguments": '{"town": "Bern"}'}
    chat = [
        {"role": "user", "content": "Hi\nBe kind.\nWeather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a1", "content": "Error: Rain"},
        {"role": "user", "content": "And?"},
    ]
    bearer = {"authorization": "Bearer key-of-anna"}
    theirs = httpx.post(f"{server.url}/tokenize", json={"messages": chat}, headers=bearer, timeout=60).json()
    assert client.messages.count_tokens(model="tiny", messages=turn).input_tokens == theirs["count"]
    ours = create(client, messages=turn, max_tokens=8)
    body = {"messages": chat, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=bearer, timeout=60).json()
    assert ours.content[0].text == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "clock"]),
        ({"type": "any"}, ["weather", "clock"]),
        ({"type": "tool", "name": "weather"}, ["weather"]),
    ],
    ids=str,
)
def test_a_call_that_must_be_follows_its_schema(client: anthropic.Anthropic, choice: Any, names: list[str]) -> None:
    message = create(client, tools=TOOLS, tool_choice=choice, max_tokens=900)
    assert message.stop_reason == "tool_use"
    assert {block.type for block in message.content} == {"tool_use"}
    assert {block.name for block in message.content} <= set(names)
    if choice != {"type": "any"}:
        assert len(message.content) == 1
    for block in message.content:
        if block.name == "weather":
            jsonschema.validate(block.input, SCHEMA)


def test_the_clients_tool_runner_continues_without_a_thread(server: Server, client: anthropic.Anthropic) -> None:
    results = []

    @anthropic.beta_tool
    def clock() -> str:
        """Tell the time."""
        results.append("noon")
        return "noon"

    body = {"temperature": 0, **says('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')}
    fields: Any = {"model": "tiny", "max_tokens": 600, "messages": USER, "tools": [clock], "extra_body": body}
    messages = list(client.beta.messages.tool_runner(**fields, max_iterations=2))
    assert [content_of(each) for each in messages] == 2 * [[{"type": "tool_use", "name": "clock", "input": {}}]]
    assert results
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = post(server, path, {"messages": USER, "thread": {"type": "create"}})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "type": "invalid_request_error",
            "message": "thread: not supported; send the whole conversation",
            "details": {"error_code": "thread_unsupported_request"},
        }


def test_tools_that_may_not_be_called_are_not_shown(client: anthropic.Anthropic) -> None:
    message = create(client, says(CALLS), tools=TOOLS, tool_choice={"type": "none"})
    assert content_of(message) == [{"type": "text", "text": CALLS}]
    fields: Any = {"model": "tiny", "messages": USER}
    bare = client.messages.count_tokens(**fields).input_tokens
    assert client.messages.count_tokens(**fields, tools=TOOLS, tool_choice={"type": "none"}).input_tokens == bare
    assert client.messages.count_tokens(**fields, tools=TOOLS).input_tokens > bare


def test_arguments_that_are_cut_short_are_no_arguments(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    message = create(client, tools=TOOLS, tool_choice=choice, max_tokens=60)
    assert message.stop_reason == "max_tokens"
    assert content_of(message) == [{"type": "tool_use", "name": "weather", "input": {}}]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_answers_follow_a_schema(client: anthropic.Anthropic, field: str) -> None:
    """inspect_ai and LiteLLM send the older name."""
    form: Any = {"type": "json_schema", "schema": SCHEMA}
    message = create(client, {field: {"format": form, "effort": "low"} if field == "output_config" else form})
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


def test_the_last_message_of_the_assistant_is_continued(server: Server, client: anthropic.Anthropic) -> None:
    begun: Any = [*USER, {"role": "assistant", "content": "In Bern"}]
    message = create(client, messages=begun, max_tokens=8)
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 8}
    theirs = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={**body, "temperature": 0},
        headers={"authorization": "Bearer key-of-anna"},
        timeout=60,
    ).json()
    assert message.content[0].text == theirs["choices"][0]["message"]["content"]
    assert client.messages.count_tokens(model="tiny", messages=begun).input_tokens == theirs["usage"]["prompt_tokens"]


def test_thoughts_come_back_and_may_be_omitted(client: anthropic.Anthropic) -> None:
    body = says("<think>Hm.</think>Bern.")
    first = create(client, body)
    assert content_of(first)[0] == {"type": "thinking", "thinking": "Hm.", "signature": first.id}
    turn: Any = [*USER, {"role": "assistant", "content": first.content}, *USER]
    assert create(client, says("Yes."), messages=turn).content[0].text == "Yes."
    adaptive: Any = {"type": "adaptive", "display": "omitted"}
    for message in (create(client, body, thinking=adaptive), streamed(client, body, thinking=adaptive)[0]):
        assert content_of(message)[0] == {"type": "thinking", "thinking": "", "signature": message.id}
        assert message.content[1].text == "Bern."


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"thinking": {"type": "disabled"}},
    ],
    ids=str,
)
def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic, more: dict[str, Any]) -> None:
    salt = {"cache_salt": f"{sorted(more)}"}  # nothing is cached
    counted = client.messages.count_tokens(model="tiny", messages=USER, **more).input_tokens
    usage = create(client, salt, max_tokens=300 if "tool_choice" in more else 2, **more).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted, 0)
    usage = create(client, salt, max_tokens=300 if "tool_choice" in more else 2, **more).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens > 0


def test_the_line_that_claude_code_changes_every_time_is_no_part_of_the_prompt(client: anthropic.Anthropic) -> None:
    def count(*system: str) -> int:
        blocks: Any = [{"type": "text", "text": text} for text in system]
        return client.messages.count_tokens(model="tiny", messages=USER, system=blocks).input_tokens

    line = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"
    assert count(line, "Be brief.") == count(f"{line}\nBe brief.") == count("Be brief.")
    assert count("Be brief.", "Be kind.") > count("Be brief.")


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"context_management": {"edits": []}, "speed": "standard", "inference_geo": None, "stop_sequences": []},
        {"top_p": 0.9, "top_k": 5, "seed": 3, "temperature": 1.0, "thinking": {"type": "adaptive"}},
    ],
    ids=str,
)
def test_fields_of_anthropics_own_service_are_taken(server: Server, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 1, **more}
    answer = post(server, "/v1/messages?beta=true", body, **{"anthropic-beta": "a,b"})
    assert answer.status_code == 200, answer.text


def calling(name: str, arguments: Any) -> Any:
    """Return a conversation with a call."""
    call = {"type": "tool_use", "id": "t", "name": name, "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    return [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages[0].content[0]: 'image' blocks"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]: role must be user or assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0]: content must be text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0]: text must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "'thinking' blocks"),
        ({"messages": []}, "the conversation is empty"),
        ({"system": [IMAGE]}, "system.content[0]: 'image' blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: 'web_search_20250305' tools"),
        ({"tools": [{"name": "f"}]}, "tools[0]: input_schema must be"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "].function.x", "input_schema": {}}]}, "not '].function.x'"),
        ({"messages": calling("f g", {})}, "messages[1].content[0].name must be 1 to"),
        ({"messages": calling("f", {"a": DEEP})}, "messages[1].content[0].input is nested deeper"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice: name is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: there is no tool 'x'"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "enabled"}}, "thinking: budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking.budget_tokens must be from 0"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format: the JSON schema has",
        ),
        ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, "output_format: the JSON schema has"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(server: Server, more: dict[str, Any], words: str) -> None:
    answer = post(server, "/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": 1, **more})
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"type", "error"}
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


def test_a_result_with_an_image_and_a_call_without_its_result_are_named(server: Server) -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
    for turn, words in (
        ([*USER, call], "the last message has calls"),
        ([*USER, call, {"role": "user", "content": [result]}], "'image' blocks are not supported in a tool_result"),
    ):
        error = post(server, "/v1/messages", {"messages": turn, "max_tokens": 1}).json()["error"]
        assert words in error["message"]


def test_every_error_has_anthropics_format(server: Server, client: anthropic.Anthropic) -> None:
    """Raise the client's own exception for each status."""
    fields: Any = {"model": "tiny", "messages": USER, "max_tokens": 1}
    for key, error in (("key-of-ben", anthropic.AuthenticationError), ("key-of-anna", anthropic.NotFoundError)):
        other = anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)
        with pytest.raises(error) as caught:
            other.messages.create(**{**fields, "model": "claude"})
        assert caught.value.type in ("authentication_error", "not_found_error")
    long: Any = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        client.messages.create(**{**fields, "messages": long})
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long: "),
        client.messages.stream(**{**fields, "messages": long}) as stream,
    ):
        stream.get_final_message()


@pytest.mark.parametrize(
    ("status", "kind", "how"),
    [
        (401, "authentication_error", {"headers": {"x-api-key": "key-of-ben"}}),
        (403, "permission_error", {"headers": {"host": "example.com"}}),
        (404, "not_found_error", {"path": "/v1/messages/batches"}),
        (405, "invalid_request_error", {"method": "GET"}),
        (413, "request_too_large", {"content": b" " * (9 << 20)}),
        (415, "invalid_request_error", {"headers": {"content-type": "text/plain"}}),
    ],
)
def test_errors_before_the_route_have_the_format_as_well(
    server: Server, status: int, kind: str, how: dict[str, Any]
) -> None:
    headers = {"x-api-key": "key-of-anna", "content-type": "application/json", **how.get("headers", {})}
    method, path, content = how.get("method", "POST"), how.get("path", "/v1/messages"), how.get("content", b"{}")
    answer = httpx.request(method, server.url + path, content=content, headers=headers, timeout=60)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["error"]["message"]


def test_both_headers_have_the_key_and_one_is_enough(server: Server) -> None:
    body = {"messages": USER}
    for headers in ({"x-api-key": "key-of-anna"}, {"authorization": "Bearer key-of-anna"}):
        for more in ({}, {"x-api-key": "key-of-ben"} if "authorization" in headers else {"authorization": "Bearer x"}):
            url = f"{server.url}/v1/messages/count_tokens"
            assert httpx.post(url, json=body, headers={**headers, **more}, timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/tokenize", json=body, headers={"x-api-key": "key-of-anna"}).status_code == 401


def test_what_is_not_seen_above_has_the_format_as_well() -> None:
    assert MessageWriter.ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    frame = MessageWriter(lambda answer: PlainReader(), "msg_1", "tiny")
    for status, kind in ((500, "api_error"), (501, "api_error"), (503, "overloaded_error")):
        expected = {"type": "error", "error": {"type": kind, "message": "it broke"}}
        failed = HTTPError(status, "it broke")
        assert message_error(failed) == frame.error(failed) == expected
        event, data = frame.failed(failed).decode().split("\n", 1)
        assert (event, json.loads(data.removeprefix("data: "))) == ("event: error", expected)


@pytest.fixture(scope="module")
def thinking(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A client of a model with thoughts and a switch for them."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": THINKING}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    with served(directory, "--num-blocks", "256") as running:
        yield anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)


@pytest.mark.parametrize(
    ("fields", "thoughts", "kinds"),
    [
        ({}, 90, ["thinking"]),
        ({"thinking": {"type": "adaptive"}}, 90, ["thinking"]),
        ({"thinking": {"type": "disabled"}}, 0, ["text"]),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, 0, ["text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5, ["thinking", "text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, 0, ["text"]),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "clock"}}, 0, ["tool_use"]),
    ],
    ids=str,
)
def test_thoughts_have_a_switch_and_a_limit(
    thinking: anthropic.Anthropic, fields: Any, thoughts: int, kinds: list[str]
) -> None:
    for message in (create(thinking, max_tokens=90, **fields), streamed(thinking, max_tokens=90, **fields)[0]):
        assert [each.type for each in message.content] == kinds
        assert message.usage.output_tokens_details.thinking_tokens == thoughts
        if kinds == ["thinking", "text"]:
            assert message.content[0].thinking.endswith("I will answer now.")
        counted = thinking.messages.count_tokens(model="tiny", messages=USER, **fields).input_tokens
        assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_effort_limits_adaptive_thoughts(thinking: anthropic.Anthropic) -> None:
    low: Any = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    message = create(thinking, max_tokens=700, **low)
    assert message.usage.output_tokens_details.thinking_tokens <= 512
    assert [each.type for each in message.content] == ["thinking", "text"]


SMALL = st.none() | st.booleans() | st.integers(-9, 99) | st.floats(0, 2) | st.text(max_size=9)
VALUES = st.recursive(
    SMALL, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each), max_leaves=6
)
TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)})
BLOCK = TEXT | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"])},
    optional={
        "text": VALUES, "thinking": st.text(max_size=9) | VALUES, "id": st.text(max_size=5) | VALUES,
        "name": st.sampled_from(["f", ""]) | VALUES, "input": VALUES, "tool_use_id": st.text(max_size=5) | VALUES,
        "content": st.text(max_size=9) | st.lists(TEXT | VALUES, max_size=2) | VALUES, "is_error": VALUES,
    },
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=9) | st.lists(BLOCK | VALUES, max_size=3) | VALUES,
    }
)
TOOL = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", ""]) | VALUES, "input_schema": st.just({"type": "object"}) | VALUES},
    optional={"type": st.sampled_from(["custom", "bash_20250124"]) | VALUES, "strict": VALUES, "description": VALUES},
)
LIKELY: dict[str, Any] = {
    "messages": st.lists(MESSAGE, max_size=4),
    "system": st.text(max_size=9) | st.lists(TEXT | VALUES, max_size=2),
    "tools": st.lists(TOOL, max_size=3),
    "tool_choice": st.sampled_from(
        [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}]
    ),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "disabled", "adaptive"])}, optional={"budget_tokens": VALUES}
    ),
    "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
    "output_config": VALUES,
    "stream": st.booleans(),
}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_is_the_servers_fault(server: Server, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(LIKELY)), max_size=3, unique=True))
    body = {"messages": USER, "max_tokens": 2, **{name: data.draw(LIKELY[name] | VALUES) for name in names}}
    path = data.draw(st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
    answer = post(server, path, body)
    assert answer.status_code in (200, 400), (body, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        kinds = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        assert kinds[-1] in ("message_stop", "error"), body
        return
    found = answer.json()
    if answer.status_code == 400:
        assert found["type"] == "error"
        assert found["error"]["message"]
        assert "\n" not in found["error"]["message"]
    else:
        assert "input_tokens" in (found if "count" in path else found["usage"])
