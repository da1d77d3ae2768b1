"""Fuzz request bodies: each gets an answer, or a client error in OpenAI's format."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.server import Server
from minillm.server.openapi.document import document

SMALL = st.none() | st.booleans() | st.integers(-9, 99) | st.floats(0, 2) | st.text(max_size=9)
VALUES = st.recursive(
    SMALL, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each), max_leaves=6
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", ""])}, optional={"parameters": VALUES, "strict": VALUES}
)
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS | VALUES}), max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.text(max_size=9) | VALUES},
    optional={"tool_calls": TOOLS | VALUES, "tool_call_id": st.text(max_size=9), "name": VALUES},
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "item_reference"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]),
        "content": st.text(max_size=9)
        | st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": VALUES})),
        "output": VALUES,
        **{name: st.sampled_from(["f", "{}", ""]) | VALUES for name in ("id", "name", "arguments", "call_id")},
    },
)
LIKELY: dict[str, Any] = {
    "input": st.text(min_size=1, max_size=9) | st.lists(ITEM, min_size=1, max_size=4),
    "tools": TOOLS,
    "messages": MESSAGES,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "stream": st.booleans(),
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(autouse=True)
def _nothing_stays_pinned(server: Server) -> Iterator[None]:
    """Free every prefix that random bodies have pinned: other tests share the server."""
    yield
    server.free_prefixes()


def fields_of(path: str) -> list[str]:
    content = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document()["components"]["schemas"][content["$ref"].split("/")[-1]]
    lengths = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n", "beam_width", "best_of"}
    return sorted(schema["properties"].keys() - lengths)


def closed(schema: Any) -> Any:
    """Return the schema, changed so that it accepts no field that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) and "type" in schema else {}
    return {name: closed(each) for name, each in schema.items()} | more


CLOSED = closed(document())


def assert_as_documented(method: str, path: str, answer: httpx.Response) -> None:
    """The answer has a status, a content type, a form and no other fields than the OpenAPI document tells of."""
    whole = CLOSED
    content = whole["paths"][path][method]["responses"][str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/json":
        schema = {**content[kind]["schema"], "components": whole["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_is_the_servers_fault(server: Server, path: str, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(fields_of(path)), max_size=3, unique=True))
    given_fields = {name: data.draw(LIKELY.get(name, VALUES) | VALUES) for name in names}
    body = {**VALID[path], **given_fields}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    assert_as_documented("post", path, answer)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]


def test_the_document_names_the_fields_that_a_body_needs() -> None:
    schemas = document()["components"]["schemas"]
    for name, needed in (("ChatBody", {"messages", "fork_of"}), ("TokenizeBody", {"prompt", "messages"})):
        assert {field for each in schemas[name]["anyOf"] for field in each["required"]} == needed
    assert schemas["DetokenizeBody"]["required"] == ["tokens"]


def test_a_null_is_an_absent_field_in_the_document_and_for_the_server(server: Server) -> None:
    whole = document()
    schema = {"$ref": "#/components/schemas/CompletionBody", "components": whole["components"]}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for body, accepted in (
        ({"prompt": "Hi", "max_tokens": 1, "keep": None, "a field of others": None}, True),
        ({"prompt": "Hi", "max_tokens": 1, "a field of others": 0}, False),
        ({"prompt": None}, False),
    ):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert (valid(body), answer.status_code == 200) == (accepted, accepted), answer.text


ROUTES = [(method, path) for path, methods in document()["paths"].items() for method in methods]
BODIES: dict[str, dict[str, Any]] = {
    **VALID,
    "/v1/prefixes": {"prompt": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/{name}/cancel": {},
}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_answers_as_the_document_says(server: Server, method: str, path: str) -> None:
    if path == "/v1/cache/events":  # it has no end
        return
    names = {"/v1/models/{name}": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]}
    if path.startswith("/v1/responses/"):
        names[path] = httpx.post(f"{server.url}/v1/responses", json=VALID["/v1/responses"]).json()["id"]
    elif method == "delete" or path == "/v1/cache":  # a pinned prefix has a table
        names[path] = httpx.post(f"{server.url}/v1/prefixes", json={"prompt": "Hi"}).json()["id"]
    url = server.url + path.replace("{name}", names.get(path, ""))
    answer = httpx.request(method, url, json=BODIES.get(path) if method == "post" else None, timeout=60)
    assert answer.status_code == 200, answer.text
    assert_as_documented(method, path, answer)
    if method == "post":
        wrong = httpx.post(url, json={"prompt": 3, "messages": 3, "tokens": 3})
        assert wrong.status_code == 400
        assert_as_documented(method, path, wrong)
        wrong = httpx.post(url, content=b"{}", headers={"content-type": "text/plain"})
        assert wrong.status_code == 415
        assert_as_documented(method, path, wrong)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi", "x": 1 << 64}]}),
        ("/v1/chat/completions", {**VALID["/v1/chat/completions"], "chat_template_kwargs": {"x": -(1 << 63) - 1}}),
        ("/v1/chat/completions", {**VALID["/v1/chat/completions"], "guided_json": {"const": 1 << 70}}),
        ("/v1/completions", {**VALID["/v1/completions"], "seed": 1 << 70}),
        ("/tokenize", {"messages": [{"role": "user", "content": 1 << 99}]}),
        ("/v1/prefixes", {"messages": [{"role": "user", "content": [1 << 99]}]}),
    ],
)
def test_numbers_of_more_than_64_bits_are_the_clients_fault(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert_as_documented("post", path, answer)
    assert httpx.post(f"{server.url}/v1/completions", json=VALID["/v1/completions"], timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/prefixes"])
@pytest.mark.parametrize("text", [r"\ud83d", r"\uDE00", r"\ude00\ud83d more", r"\ud83d\ud83d\ude00"])
def test_half_a_character_in_a_body_is_named(server: Server, path: str, text: str) -> None:
    data = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'
    answer = httpx.post(server.url + path, content=data, headers={"content-type": "application/json"}, timeout=20)
    assert answer.status_code == 400
    assert f"lone surrogate {text[:6]}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/prefixes"])
def test_values_of_any_depth_get_an_answer(server: Server, path: str) -> None:
    """This includes the limit, where the parser can read a depth that the encoder cannot write."""
    for depth in (*range(1, 1100, 60), *range(880, 1010, 3)):
        nested = "[" * depth + "]" * depth
        data = f'{{"messages": [{{"role": "user", "content": "Hi", "x": {nested}}}]}}'
        answer = httpx.post(server.url + path, content=data, headers={"content-type": "application/json"}, timeout=20)
        assert answer.status_code in (200, 400), (depth, answer.text)
    assert httpx.post(f"{server.url}/v1/completions", json=VALID["/v1/completions"], timeout=20).status_code == 200


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/prefixes", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
        ("/v1/models/x", "GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/responses/x", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(server: Server, path: str, methods: str) -> None:
    answer = httpx.request("PATCH", server.url + path, json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == methods
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\na b: c\r\n\r\n"]
)
def test_bytes_that_are_no_request_are_refused_as_json(server: Server, data: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["message"]
