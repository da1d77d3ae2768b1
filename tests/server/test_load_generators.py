"""Test requests and replies of the load generators `vllm bench serve` and guidellm."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from lib.server import Server

LENGTH = 64  # so many that not all come in one chunk where the machine is busy
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me"}]}]}
VLLM_TEXT = {
    "prompt": "Tell me", "repetition_penalty": 1.0, "max_tokens": LENGTH, "logprobs": None, **STREAM,
}  # fmt: skip
VLLM_CHAT = {**CHAT, "max_completion_tokens": LENGTH, **STREAM}
EXTRA = {
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "temperature": 0.8,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
}
COUNTED = {
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None, "ignore_eos": True,
}  # fmt: skip


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as it should."""
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    headers = {"x-request-id": "bench-0", "authorization": "Bearer any"}
    answer = httpx.post(f"{server.url}{path}", json={"model": model, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


@pytest.mark.parametrize("more", [{}, EXTRA, {"logprobs": 2}], ids=["plain", "extra body", "logprobs"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_serve(server: Server, path: str, more: dict[str, Any]) -> None:
    """It takes the time of each chunk with choices, and the numbers of tokens from a later chunk without choices."""
    chats = "chat" in path
    if chats and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": more["logprobs"]}
    found = events(server, path, {**(VLLM_CHAT if chats else VLLM_TEXT), "ignore_eos": True, **more})
    texts = [chunk for chunk in found if chunk["choices"]]
    assert len(texts) >= 2
    for chunk in texts:
        choice = chunk["choices"][0]
        assert isinstance(choice["delta"].get("content", "") if chats else choice["text"], str)
    [last] = [chunk for chunk in found if not chunk["choices"]]
    assert last is found[-1]
    assert last["usage"]["completion_tokens"] == LENGTH
    assert last["usage"]["prompt_tokens"] > 0
    assert texts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Tell me", "max_tokens": LENGTH, **COUNTED}),
        ("/v1/completions", {"prompt": ["Tell me", "Say"], "max_tokens": LENGTH, "echo": True, "n": 2, **COUNTED}),
        ("/v1/completions", {"prompt": "Tell me", "max_tokens": LENGTH, "beam_width": 2, **COUNTED}),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": LENGTH, **COUNTED}),
    ],
)
def test_each_chunk_tells_the_tokens_so_far(server: Server, path: str, body: dict[str, Any]) -> None:
    """guidellm asks for it."""
    found = events(server, path, body)
    usages = [chunk["usage"] for chunk in found]
    assert all(usage["prompt_tokens"] == usages[-1]["prompt_tokens"] > 0 for usage in usages[-3:])
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    # Of a search, all that comes is the best beam.
    assert counts[-1] == counts[-2] == LENGTH * len(body["prompt"] if "echo" in body else "x") * body.get("n", 1)


def test_numbers_of_tokens_so_far_want_the_last_one_as_well(server: Server) -> None:
    body = {"prompt": "Hi", "stream": True, "stream_options": {"continuous_usage_stats": True}, "max_tokens": 3}
    assert all("usage" not in chunk for chunk in events(server, "/v1/completions", body))
