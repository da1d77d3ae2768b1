"""Bodies of any kind: each gets an answer, or an error in OpenAI's form that is the client's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import Server

from minillm.server.openapi import document

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
LIKELY: dict[str, Any] = {
    "tools": TOOLS,
    "messages": MESSAGES,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "stream": st.booleans(),
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


def fields_of(path: str) -> list[str]:
    content = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document()["components"]["schemas"][content["$ref"].split("/")[-1]]
    return sorted(schema["properties"].keys() - {"max_tokens", "max_completion_tokens", "n", "beam_width", "best_of"})


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_is_the_servers_fault(server: Server, path: str, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(fields_of(path)), max_size=3, unique=True))
    given_fields = {name: data.draw(LIKELY.get(name, VALUES) | VALUES) for name in names}
    body = {**VALID[path], **given_fields}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]
