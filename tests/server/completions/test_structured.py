"""Test structured output over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from lib.server import Server

MESSAGES: Any = [{"role": "user", "content": "A person"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Max"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=150)


def post(server: Server, **body: Any) -> Any:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES, **body}, timeout=120).json()


def test_openai_parses_into_a_class(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id, messages=MESSAGES, response_format=Person, max_tokens=200, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("more", [{"n": 4, "seed": 3}, {"beam_width": 4, "n": 4}, {"temperature": 0}])
def test_every_answer_is_valid(server: Server, more: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = post(server, response_format=form, max_tokens=100, **more)
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert ended or "beam_width" in more, "a search may go on and on about spaces"
    for choice in ended:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_choices_and_expressions(server: Server) -> None:
    answer = post(server, guided_choice=["yes", "no"], max_tokens=20, n=3)
    assert {choice["message"]["content"] for choice in answer["choices"]} <= {"yes", "no"}
    answer = post(server, guided_regex="[a-c]{3}-[0-9]{2}", max_tokens=40)
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["abc"], "allowed_token_ids": [5]},
        {"no_repeat_ngram_size": 1, "allowed_token_ids": [5, 6]},
        {"no_repeat_ngram_size": 1, "allowed_token_ids": [5, 6], "beam_width": 2},
    ],
    ids=["sampled with a grammar", "sampled", "beams"],
)
def test_parameters_that_exclude_every_token_are_the_clients_fault(
    server: Server, body: dict[str, Any], streamed: bool
) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "ignore_eos": True, "stream": streamed, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    *_, last = answer.text.strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "invalid_request_error", error
    assert error["message"].startswith("no token is possible any more")
    assert answer.status_code == 400 or (streamed and last != answer.text.strip())


CLIENTS: dict[str, dict[str, Any]] = {
    "vLLM": {"structured_outputs": {"regex": "[a-c]{3}", "disable_fallback": True}},
    "SGLang": {"regex": "[a-c]{3}"},
    "vLLM's choice": {"structured_outputs": {"choice": ["abc", "cab"]}},
    "vLLM's grammar": {"structured_outputs": {"grammar": "start: /[a-c]{3}/"}},
    "guidance": {"guided_decoding_backend": "guidance", "guided_regex": "[a-c]{3}"},
}


@pytest.mark.parametrize("name", CLIENTS)
def test_texts_in_the_forms_that_other_clients_write(server: Server, name: str) -> None:
    [choice] = post(server, max_tokens=20, **CLIENTS[name])["choices"]
    assert re.fullmatch("[a-c]{3}", choice["message"]["content"])


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_json_in_the_forms_that_other_clients_write(server: Server, form: dict[str, Any]) -> None:
    [choice] = post(server, max_tokens=100, seed=1, **form)["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_any_object_in_the_form_of_vllm(server: Server) -> None:
    [choice] = post(server, max_tokens=1, temperature=0, structured_outputs={"json_object": True})["choices"]
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one grammar"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "one grammar"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "json_object"),
        ({"guided_regex": "("}, "regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "one grammar"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "JSON schema"),
        ({"guided_regex": "(a{1,1000}){1,1000}" * 10}, "too many"),
        ({"guided_choice": []}, "choice"),
    ],
)
def test_a_form_that_is_none_is_refused(server: Server, body: dict[str, Any], words: str) -> None:
    assert words in post(server, max_tokens=5, **body)["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("completions", {"prompt": "a", "guided_regex": "("}, "guided_regex"),
        ("chat/completions", {"messages": MESSAGES, "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema":
            {"name": "a", "schema": {"type": "b"}}}}, "response_format"),
        ("responses", {"input": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)  # fmt: skip
def test_an_error_of_a_grammar_names_its_field(server: Server, path: str, fields: Any, field: str) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}", json=fields, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
