"""Test the routes for answers. They bypass the router, and have the errors and metrics of any route."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lib.server import Server
from minillm.checks import declared
from minillm.params import BeamSearchParams, SamplingParams
from minillm.server import bodies
from minillm.server.app import make_app
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.server.http.rules import AccessRules
from minillm.server.openapi.document import document

PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_a_request_is_counted_by_its_route_even_if_refused(server: Server, path: str) -> None:
    name = f'http_requests_total{{route="{path}",status="404"}}'

    def count() -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if name in line)

    before = count()
    body = {"model": "another", "prompt": "a"} if "chat" not in path else {"model": "another", "messages": []}
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 404
    assert "not served here" in answer.json()["error"]["message"]
    assert count() == before + 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 1}])
def test_a_stream_says_how_long_the_engine_took(server: Server, path: str, more: dict[str, Any]) -> None:
    body: dict[str, Any] = (
        {"prompt": "a b c"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    )
    if "logprobs" in more and "chat" in path:
        more = {"logprobs": True, "top_logprobs": 1}
    began = time.monotonic()
    asked = {**body, **more, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{server.url}{path}", json=asked, headers={"accept": "text/event-stream"}, timeout=60)
    waited = 1e3 * (time.monotonic() - began)
    comments = [line.removeprefix(": server-timing: ") for line in answer.text.splitlines() if line.startswith(": s")]
    timing = answer.headers.get("server-timing") or comments[0]  # a head that came before the first token has none
    name, _, milliseconds = timing.partition(";dur=")
    assert name == "engine"
    assert 0 < float(milliseconds) < waited


def test_a_request_that_offers_another_protocol_is_answered_with_http_1(server: Server) -> None:
    """Java's client sends these headers with each request, until a server changes to HTTP/2."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAAB"}
    with httpx.Client(headers=offer, timeout=60) as client:
        for path in (*PATHS, *PATHS):
            prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
            answer = client.post(f"{server.url}{path}", json={**prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            assert client.get(f"{server.url}/v1/models").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_another_method_is_refused_and_the_right_one_named(server: Server, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["k" * 100_000, "a\u001b[2Jb", "a\nb"])
def test_the_name_of_an_unknown_field_is_shown_short_and_clean(server: Server, name: str) -> None:
    error = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", name: 1}).json()["error"]
    assert "unknown field" in error["message"]
    for text in (error["message"], error["param"]):
        assert len(text) <= 300
        assert "\x1b" not in text
        assert "\n" not in text


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS)
async def test_a_defect_is_told_and_raised_for_the_log(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(bodies, "read_body", fail)
    service: Any = SimpleNamespace(metrics=Metrics(FairQueue(1, 1), list))
    app: Any = make_app(service, AccessRules())
    for raises in (False, True):
        transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if raises:
                with pytest.raises(ZeroDivisionError):
                    await client.post(path, json={})
            else:
                answer = await client.post(path, json={})
                assert answer.status_code == 500
                assert answer.json()["error"]["message"].startswith("internal error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_codes_tell_clients_what_to_do(server: Server, path: str, stream: bool) -> None:
    """Check OpenAI's codes: clients compact a conversation or choose another model when they see them."""
    text = "word " * 2000
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = httpx.post(f"{server.url}{path}", json={**prompt, "stream": stream}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("this model's maximum context length is "), "LiteLLM looks for these words"
    answer = httpx.post(f"{server.url}{path}", json={**prompt, "stream": stream, "model": "gpt-4o"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "model_not_found", "invalid_request_error")
    ids = [1] * 5000
    if "chat" not in path:
        answer = httpx.post(f"{server.url}{path}", json={"prompt": ids, "stream": stream}, timeout=60)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_codes_of_other_routes(server: Server) -> None:
    for route, body in (("/v1/prefixes", {"prompt": "word " * 2000}), ("/v1/prefixes", {"prompt": [1] * 5000})):
        answer = httpx.post(f"{server.url}{route}", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = httpx.get(f"{server.url}/v1/models/gpt-4o")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "a", "model": "gpt-4o"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": -5})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, None), "no code where clients know none"


def test_the_openapi_document_has_every_route() -> None:
    service: Any = SimpleNamespace(metrics=None)
    app: Any = make_app(service, AccessRules())
    routes = {(method, route.path) for route in app.app.routes for method in route.methods}
    hidden = {"/v1/session", "/v1/session/{name}", "/openapi.json"}  # of the chat app; of the document itself
    documented = {(method.upper(), path) for path, each in document()["paths"].items() for method in each}
    found = {(method, path.replace(":path", "")) for method, path in routes if method != "HEAD"}
    assert documented == {(method, path) for method, path in found if path not in hidden}


def test_the_openapi_document_says_what_each_route_takes() -> None:
    """Check sections 4.8.10 and 4.8.12 of https://spec.openapis.org/oas/v3.1.0."""
    found = document()
    for path, operations in found["paths"].items():
        for method, each in operations.items():
            assert each.keys() <= {"summary", "responses", "requestBody", "parameters"}
            assert (method == "post") == ("requestBody" in each)
            if method == "post":
                [schema] = each["requestBody"]["content"].values()
                assert each["requestBody"]["required"] != path.endswith("/cancel")
                name = schema["schema"]["$ref"].removeprefix("#/components/schemas/")
                assert "properties" in found["components"]["schemas"][name]
            names = [parameter["name"] for parameter in each.get("parameters", ())]
            assert names == re.findall(r"\{(\w+)\}", path)
            for parameter in each.get("parameters", ()):
                assert (parameter["in"], parameter["required"], parameter["schema"]) == (
                    "path",
                    True,
                    {"type": "string"},
                )


def test_the_openapi_document_says_where_a_key_is_needed() -> None:
    found = document(has_keys=True)
    needs = {
        path: {name for each in operations.values() for key in each["security"] for name in key}
        for path, operations in found["paths"].items()
    }
    assert {name for names in needs.values() for name in names} == found["components"]["securitySchemes"].keys()
    assert needs["/health"] == needs["/version"] == set()
    assert needs["/v1/messages"] == {"key", "x-api-key"}
    assert needs["/v1/responses"] == needs["/v1/models"] == {"key"}
    assert not any("security" in each for operations in document()["paths"].values() for each in operations.values())


def test_histograms_have_buckets_from_milliseconds_to_minutes() -> None:
    metrics = Metrics(FairQueue(1, 1), list)
    metrics.first_token.observe(0.007)
    text = metrics.text().decode()
    for name in ("time_to_first_token_seconds", "request_seconds"):
        *bounds, last = map(float, re.findall(rf'minillm_{name}_bucket{{le="(.*)"}}', text))
        assert last == float("inf")
        assert all(1 < after / before <= 5 for before, after in pairwise(bounds)), bounds
        assert bounds[0] <= 0.005 < 300 <= bounds[-1]


def test_every_parameter_of_a_request_has_a_field() -> None:
    """Exceptions are a grammar, which has its own fields, a function, which no client can send, and `LLM.depths`."""
    names = {name for cls in (SamplingParams, BeamSearchParams) for name, _, _ in declared(cls)}
    names -= {"grammar", "logits_processor", "reasoning_depths"}
    assert names <= set(bodies.CompletionBody.__struct_fields__)
    assert names <= set(bodies.ChatBody.__struct_fields__)


def test_nothing_that_the_server_does_by_itself_fails(server: Server) -> None:
    """It prepares the chat template at its start; a chat waits for the same thread, so the start is over afterwards."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert not [line for line in server.said if "failed" in line]
