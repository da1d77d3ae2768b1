"""OpenAI's Responses API, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import codecs
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from lib.server import Server, served
from minillm.server.bodies import BadField
from minillm.server.client import Answer as RunningAnswer
from minillm.server.http.sending import HTTPError
from minillm.server.parsers.parts import PlainReader
from minillm.server.parsers.thoughts import ThoughtReader
from minillm.server.parsers.tool_calls import CallReader
from minillm.server.responses import bodies as response_bodies
from minillm.server.responses.answers import ResponseWriter, item_id, response_of
from minillm.server.responses.bodies import messages_of
from minillm.server.responses.store import ResponseStore, Stored
from minillm.service.call_messages import Text, Token

SCHEMA = {"type": "object", "properties": {"town": {"enum": ["Bern", "Rome"]}}, "required": ["town"]}
TOOLS: Any = [{"type": "function", "name": "weather", "description": "Of a town", "parameters": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call>'
SAYS = f"<think>Hm, rain?</think>\n\nI see.\n{CALL}"
DEEP = '{"a":' * 70 + "1" + "}" * 70


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with a context for long histories, and with two keys."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "keys").write_text("anna: key-of-anna\nben: key-of-ben\n")
    directory = shutil.copytree(tiny, folder / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16_384}))
    with served(directory, "--num-blocks", "1024", "--api-key-file", str(folder / "keys")) as running:
        yield running


def client_of(server: Server, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"key-of-{name}", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server, "anna")


def create(client: openai.OpenAI, says: str = "", **more: Any) -> Any:
    """Return a response, which ``says`` certain words if they are given."""
    script = {"extra_body": {"structured_outputs": {"choice": [says]}}} if says else {}
    fields = {"model": "tiny", "input": "Say it", "max_output_tokens": 200, "temperature": 0, **script, **more}
    return client.responses.create(**fields)


def test_a_response_is_what_the_chat_answers(client: openai.OpenAI) -> None:
    own = create(client, instructions="Be brief.", max_output_tokens=12, metadata={"a": "b"})
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert own.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert (own.usage.input_tokens, own.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert (own.status, own.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (own.metadata, own.instructions, own.store) == ({"a": "b"}, "Be brief.", True)
    counted = client.responses.input_tokens.count(model="tiny", instructions="Be brief.", input="Say it")
    assert counted.input_tokens == own.usage.input_tokens


def test_a_stream_builds_the_response_event_by_event(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    whole = create(client, SAYS, tools=TOOLS, include=include, top_logprobs=2)
    events = list(create(client, SAYS, tools=TOOLS, include=include, top_logprobs=2, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for n, kind in enumerate(kinds) if kinds[n - 1] != kind or n == 0] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = events[-1].response
    for number, item in enumerate(done.output):
        own = [event for event in events if getattr(event, "output_index", None) == number]
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
        assert own[-1].item == item
    said = done.output[1].content[0].logprobs
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    for logprobs in (said, streamed, whole.output[1].content[0].logprobs):
        assert b"".join(bytes(each.bytes) for each in logprobs).decode().strip() == "I see."
        assert all(len(each.top_logprobs) >= 2 for each in logprobs)
    for response in (whole, done):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert (response.status, response.output_text) == ("completed", "I see.")
        assert json.loads(response.output[2].arguments) == {"town": "Bern"}
        assert response.output[0].content[0].text == "Hm, rain?"


def test_openais_own_stream_puts_the_response_together(client: openai.OpenAI) -> None:
    script: Any = {"structured_outputs": {"choice": [SAYS]}}
    with client.responses.stream(model="tiny", input="Weather?", tools=TOOLS, extra_body=script) as stream:
        done: Any = stream.get_final_response()
    assert done.output_text == "I see."
    assert done.output[2].name == "weather"


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "weather"}, ALLOWED], ids=["required", "named", "allowed"]
)
def test_a_call_can_be_required(client: openai.OpenAI, choice: Any) -> None:
    response = create(client, tools=TOOLS, parallel_tool_calls=False, tool_choice=choice)
    [call] = response.output
    assert json.loads(call.arguments)["town"] in ("Bern", "Rome")
    assert response.to_dict()["tool_choice"] == choice


class Answer(BaseModel):
    town: str
    days: int


def test_a_schema_is_parsed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"enum": ["Bern"]}, "days": {"enum": [2]}},
        "required": ["town", "days"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    found = client.responses.parse(model="tiny", input="Weather?", text=form, text_format=openai.omit)
    assert json.loads(found.output_text) == {"town": "Bern", "days": 2}
    assert found.text is not None
    assert found.text.to_dict() == form
    typed = client.responses.parse(model="tiny", input="Weather?", text_format=Answer, max_output_tokens=900)
    assert typed.status == "incomplete" or isinstance(typed.output_parsed, Answer)


def test_results_of_tools_continue_a_response_or_are_sent_with_it(client: openai.OpenAI) -> None:
    first = create(client, SAYS, tools=TOOLS)
    result: Any = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    second = create(client, "It rains.", tools=TOOLS, previous_response_id=first.id, input=[result])
    assert second.output_text == "It rains."
    assert second.previous_response_id == first.id
    sent = [{"role": "user", "content": "Say it"}, *(item.to_dict() for item in first.output), result]
    again = create(client, "It rains.", tools=TOOLS, input=sent, store=False)
    assert again.output_text == "It rains."
    named = [sent[0], *({"type": "item_reference", "id": item.id} for item in first.output), result]
    assert create(client, "It rains.", tools=TOOLS, input=named).usage.input_tokens == again.usage.input_tokens


@pytest.mark.parametrize(("says", "length"), [("", 8_000), (SAYS, 500)])
def test_a_second_turn_computes_little_more_than_its_input(client: openai.OpenAI, says: str, length: int) -> None:
    same: Any = {"tools": TOOLS, "instructions": "Be brief.", "max_output_tokens": 150}
    first = create(client, says, input="w" * length, **same)
    known = first.usage.total_tokens
    assert known > length
    turns = [create(client, input="Go on", previous_response_id=first.id, **same) for _ in range(2)]
    for second in turns:
        new = second.usage.input_tokens - known
        assert 0 < new < 50, "the tokens of the first turn are the beginning of the second one's prompt"
        assert second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens < new + 40
        assert second.output_text == turns[0].output_text
    third = create(client, input="And on", previous_response_id=turns[1].id, **same)
    assert third.usage.input_tokens_details.cached_tokens > known


def test_evicted_blocks_are_computed_again(client: openai.OpenAI, server: Server) -> None:
    first = create(client, input="x" * 2_000, max_output_tokens=20)
    fields = {"previous_response_id": first.id, "input": "Go on", "max_output_tokens": 20}
    before = create(client, **fields)
    prompts = [f"{number} {letter * 4_000}" for number, letter in enumerate("abcde")]
    client.completions.create(model="tiny", prompt=prompts, max_tokens=1)
    after = create(client, **fields)
    assert before.usage.input_tokens_details.cached_tokens > 2_000
    assert after.usage.input_tokens_details.cached_tokens < 1_000
    assert after.output_text == before.output_text


def test_the_end_of_an_answer_is_not_repeated(client: openai.OpenAI, server: Server) -> None:
    body, headers = {"prompt": "<|im_end|>", "parse_special": True}, {"authorization": "Bearer key-of-anna"}
    *_, end = httpx.post(f"{server.url}/tokenize", json=body, headers=headers).json()["tokens"]
    first = create(client, extra_body={"logit_bias": {str(end): 100}})
    assert (first.status, first.output_text, first.usage.output_tokens) == ("completed", "", 1)
    items = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": ""}]
    two: Any = {"role": "user", "content": "Two"}
    one = create(client, previous_response_id=first.id, input=[two], max_output_tokens=4)
    assert one.usage.input_tokens == create(client, input=[*items, two], max_output_tokens=4).usage.input_tokens


def test_text_after_a_stop_string_is_not_part_of_the_conversation(client: openai.OpenAI) -> None:
    first = create(client, extra_body={"structured_outputs": {"choice": ["One STOP"]}, "stop": "STOP"})
    assert first.output_text == "One "
    items = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "One "}]
    two: Any = {"role": "user", "content": "Two"}
    one = create(client, previous_response_id=first.id, input=[two], max_output_tokens=4)
    assert one.usage.input_tokens == create(client, input=[*items, two], max_output_tokens=4).usage.input_tokens


def test_other_instructions_or_tools_begin_another_prompt(client: openai.OpenAI) -> None:
    first = create(client, "One", instructions="Be brief.")
    items = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "One"}]
    for more in ({"instructions": "Be long."}, {"instructions": "Be brief."}, {"tools": TOOLS}, {}):
        one = create(client, previous_response_id=first.id, input="Two", max_output_tokens=4, **more)
        other = create(client, input=[*items, {"role": "user", "content": "Two"}], max_output_tokens=4, **more)
        assert one.usage.input_tokens == other.usage.input_tokens


def test_a_response_belongs_to_its_key(client: openai.OpenAI, server: Server) -> None:
    own, ben = create(client, "One"), client_of(server, "ben")
    for use in (
        lambda: ben.responses.retrieve(own.id),
        lambda: ben.responses.delete(own.id),
        lambda: ben.responses.cancel(own.id),
        lambda: create(ben, previous_response_id=own.id),
    ):
        with pytest.raises(openai.NotFoundError):
            use()
    with pytest.raises(openai.BadRequestError, match="no item"):
        create(ben, input=[{"type": "item_reference", "id": own.output[0].id}])
    assert client.responses.retrieve(own.id) == own
    assert client.responses.cancel(own.id) == own, "it has ended already"
    client.responses.delete(own.id)
    for gone in (own.id, create(client, store=False).id, "resp_x", "\u202e\n"):
        with pytest.raises(openai.NotFoundError) as caught:
            create(client, previous_response_id=gone)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools", r"tools\[1\].*web_search.*not supported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", r"tools\[0\]\.name must be"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {**ALLOWED, "tools": 1}}, "tool_choice", "none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}},
            "tool_choice",
            "none, auto, required",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"include": ["web_search_call.results"]}, "include", "web_search_call"),
        ({"max_output_tokens": -5}, "max_output_tokens", "^.*max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort: this model"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format", "x"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown field"),
        ({"input": []}, None, "empty"),
        ({"input": [{"type": "computer_call_output"}]}, "input", r"input\[0\].*computer_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", r"content\[0\].*input_image"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", r"input\[0\]\.role"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": 3}]}, "input", r"input\[0\]\.output"),
        ({"tools": [{"type": "function", "name": "f", "extra": 1}]}, "tools", r"tools\[0\]: .*extra"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": DEEP}]},
            "input",
            r"input\[0\]\.arguments is nested deeper than 64",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", r"input\[0\]\.call_id"),
        ({"input": [{"role": "user", "content": "x", "wight": 1}]}, "input", "wight"),
        ({"input": [{"id": "msg_1_0"}]}, "input", "no item"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        create(client, **fields, stream=stream)
    assert caught.value.param == param


def test_fields_that_clients_send_are_taken(client: openai.OpenAI) -> None:
    """Include nulls, hints, and items as clients return them."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}], "type": "message", "id": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "One", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
    ]  # fmt: skip
    own = create(
        client, input=items, include=["reasoning.encrypted_content"], reasoning={"effort": None, "summary": "auto"},
        text={"verbosity": "low"}, service_tier="auto", truncation="disabled", background=False, prompt_cache_key="x",
        extra_body={"client_metadata": {"a": 1}}, stream_options=None, max_tool_calls=3,
        user="u", safety_identifier="s", max_output_tokens=2,
    )  # fmt: skip
    assert own.status == "incomplete"


def test_a_running_response_can_be_read_and_cancelled(client: openai.OpenAI, server: Server) -> None:
    fields: Any = {"ignore_eos": True}
    with create(client, max_output_tokens=8_000, extra_body=fields, stream=True) as stream:
        name = next(stream).response.id
        assert client.responses.retrieve(name).status == "in_progress"
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        assert client.responses.cancel(name).status == "cancelled"
        *_, last = stream
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert last.response.output[0].status == "incomplete"
    assert client.responses.retrieve(name).to_dict() == last.response.to_dict()
    server.wait_until(lambda: server.figure("engine_requests_running") == 0)


def test_a_response_ends_with_its_client(client: openai.OpenAI, server: Server) -> None:
    with create(client, max_output_tokens=8_000, extra_body={"ignore_eos": True}, stream=True) as stream:
        name = next(stream).response.id
    headers = {"authorization": "Bearer key-of-anna"}
    server.wait_until(lambda: httpx.get(f"{server.url}/v1/responses/{name}", headers=headers).status_code == 404)


def test_a_stream_that_fails_ends_with_the_error() -> None:
    frame = ResponseWriter(lambda answer: PlainReader(), {"id": "resp_1"})
    for code, expected in ((None, "server_error"), ("rate_limit_exceeded", "rate_limit_exceeded")):
        name, data = frame.failed(HTTPError(500, "It broke", code=code)).decode().split("\n", 1)
        last = json.loads(data.removeprefix("data: "))
        assert name == "event: response.failed"
        assert last["response"]["error"] == {"code": expected, "message": "It broke"}
        assert last["response"]["status"] == "failed"


@pytest.mark.parametrize("num_texts", [1, 2, 12])
def test_logprobs_are_of_the_message_also_after_bytes_that_are_no_text(num_texts: int) -> None:
    """Tokens can end inside of a character, and their bytes can be invalid UTF-8."""
    thought = [b"<think>", b"H", b"\xff", b"m\xe3", b"</think>"]
    message = [b"\n\xe3\x81", b"\x82", b"A\xf0", b"\x9f\x8e", b"\x89", b"B", b"."]
    tokens = [Token(number, "", raw, -1.0) for number, raw in enumerate(thought + message)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    writer = ResponseWriter(lambda answer: ThoughtReader(PlainReader(), opened=False), {"id": "resp_1"})
    writer.first(0, 0, RunningAnswer("1", news=asyncio.Event()))
    step = len(tokens) // num_texts
    for start in range(0, len(tokens), step):
        new = tokens[start : start + step]
        text = "".join(decoder.decode(token.raw) for token in new)
        writer.pieces(0, Text("1", 0, text, len(new), new, "stop" if start + step == len(tokens) else None))
    said = writer.output[-1]["content"][0]
    assert said["text"] == "あA🎉B."
    assert [bytes(each["bytes"]) for each in said["logprobs"]] == message


TAGGED_CALL = b'<tool_call>{"name": "get", "arguments": {}}</tool_call>'
ITEMS: list[tuple[list[bytes], list[list[bytes]]]] = [  # tokens of an answer, and those of each of its messages
    ([b"ab", b"", b"c\xf0", b"\x9f"], [[b"ab", b"", b"c\xf0", b"\x9f"]]),  # the answer ends inside of a character
    ([b"a", TAGGED_CALL[:20], TAGGED_CALL[20:], b"get"], [[b"a"], [b"get"]]),  # the call has this text, too
    ([b"a<tool", b"_cal", b"l", b"><to", b"ol_call>"], [[b"a<tool", b"_cal", b"l", b"><to", b"ol_call>"]]),  # no call
    ([b"<think>", b"i", b"</think>", b"i"], [[b"i"]]),
]  # fmt: skip


@pytest.mark.parametrize(("raws", "expected"), ITEMS)
@pytest.mark.parametrize("at_once", [True, False])
def test_logprobs_of_whole_and_of_streamed_answers_are_those_of_the_messages(
    raws: list[bytes], expected: list[list[bytes]], at_once: bool
) -> None:
    tokens = [Token(number, "", raw, -1.0) for number, raw in enumerate(raws)]
    writer = ResponseWriter(lambda answer: ThoughtReader(CallReader({"get": {}}, 16), opened=False), {"id": "resp_1"})
    writer.first(0, 0, RunningAnswer("1", news=asyncio.Event()))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(raw) for raw in raws]
    texts[-1] += decoder.decode(b"", final=True)
    pieces = (
        [("".join(texts), tokens)] if at_once else [(text, [token]) for text, token in zip(texts, tokens, strict=True)]
    )
    for number, (text, new) in enumerate(pieces, 1):
        writer.pieces(0, Text("1", 0, text, len(new), new, "stop" if number == len(pieces) else None))
    said = [item["content"][0]["logprobs"] for item in writer.output if item["type"] == "message"]
    assert [[bytes(each["bytes"]) for each in logprobs] for logprobs in said] == expected


def test_references_cannot_make_a_short_body_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_bodies, "_MOST_REFERENCED", 1_000)
    item = {"id": "msg_1_0", "type": "message", "role": "assistant", "content": "x" * 400}
    store = ResponseStore()
    store.put("anna", "resp_1", Stored.of({"output": [item]}, [], b"", []))
    stored = partial(store.item, "anna")
    for count in (1, 2):
        assert len(messages_of([{"id": "msg_1_0"}] * count, stored)) == count
    with pytest.raises(BadField, match="stand for more than"):
        messages_of([{"id": "msg_1_0"}] * 3, stored)
    for name in ("fc_1_0", "msg_1_1", "msg_2_0", "", "_", "msg_", "msg_1_", "msg_1_0_0", "msg_1_\u0660", "\ud800"):
        assert stored(name) is None
    assert store.item("ben", "msg_1_0") is None


def test_ids_of_items_name_their_response() -> None:
    assert response_of(item_id("message", "resp_1a", 12)) == "resp_1a"
