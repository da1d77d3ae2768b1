"""Responses in OpenAI's format, as dictionaries that are encoded as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from minillm.server.client import Answer
from minillm.server.http.sending import HTTPError
from minillm.service.call_messages import Completion, Ended, Text, Token

Json = dict[str, Any]
PING = b": alive\n\n"  # a comment in a stream of events, which clients ignore


@dataclass
class Usage:
    """The token usage of one request, summed over its prompts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    def add(self, ended: Ended, num_tokens: int) -> None:
        """Add the usage of a finished answer. ``num_tokens`` is the number of generated tokens."""
        self.prompt += ended.num_prompt_tokens
        self.cached += ended.num_cached_tokens
        self.completion += num_tokens
        self.reasoning += ended.num_reasoning_tokens

    def json(self, prompt: str = "prompt", completion: str = "completion") -> Json:
        """Return the usage in OpenAI's format. ``prompt`` and ``completion`` are the beginnings of field names."""
        return {
            f"{prompt}_tokens": self.prompt,
            f"{completion}_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            f"{prompt}_tokens_details": {"cached_tokens": self.cached},
            f"{completion}_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True)
class Frame:
    """Encodes the response to one request in OpenAI's format, complete or in chunks.

    It implements `minillm.server.generating.ResponseEncoder`. Every chunk of a response contains the fields of this
    class.
    """

    ping: ClassVar[bytes] = PING
    id: str
    model: str
    kind: str  # "chat.completion" or "text_completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, choices: list[Json], usage: Usage, prompt: Json) -> Json:
        """Return a complete response. ``prompt`` contains the response's fields about the prompt."""
        return {**self._head(self.kind), "choices": choices, "usage": usage.json(), **prompt}

    def chunk(self, choices: list[Json], usage: Usage | None = None, *, has_usage: bool = False) -> Json:
        """Return a chunk of a stream.

        With ``has_usage``, every chunk has the field ``usage``, which is null if the argument ``usage`` is None.
        Without ``has_usage``, a chunk has this field only if the argument ``usage`` is given.
        """
        kind = f"{self.kind}.chunk" if self.kind.startswith("chat") else self.kind
        tail = {"usage": None if usage is None else usage.json()} if has_usage or usage is not None else {}
        return {**self._head(kind), "choices": choices, **tail}

    def opening(self, answers: Sequence[Answer]) -> bytes:
        return b""

    def chunks(self, choices: list[Json], usage: Usage | None, prompt: Json, *, has_usage: bool) -> bytes:
        found = [self.chunk([each], usage, has_usage=has_usage) for each in choices]
        found[0] |= prompt
        return b"".join(map(event, found))

    def closing(self, usage: Usage, *, has_usage: bool) -> bytes:
        last = event(self.chunk([], usage)) if has_usage else b""
        return last + b"data: [DONE]\n\n"

    def error(self, failed: HTTPError) -> Json:
        return failed.json()

    def failed(self, failed: HTTPError) -> bytes:
        return event(failed.json())

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(value: Json, name: str = "") -> bytes:
    """Return a server-sent event with ``value`` as its data. ``name`` is the event's type, which may be empty."""
    head = f"event: {name}\ndata: ".encode() if name else b"data: "
    return head + msgspec.json.encode(value) + b"\n\n"


def extras(each: Text | Completion) -> Json:
    """Return the fields of an answer's text that OpenAI's format does not have, such as ``stop_reason``.

    Fields that are not set are left out.
    """
    found: Json = {}
    if each.stop_reason is not None:
        found["stop_reason"] = each.stop_reason
    if isinstance(each, Completion) and each.score is not None:
        found |= {"score": each.score, "cumulative_logprob": each.cumulative_logprob}
    if each.token_ids:  # if requested
        found["token_ids"] = each.token_ids
    return found


def chat_logprobs(tokens: Sequence[Token]) -> Json:
    """Return log-probabilities in the format of OpenAI's chat completions."""
    return {"content": token_logprobs(tokens), "refusal": None}


def token_logprobs(tokens: Sequence[Token]) -> list[Json]:
    """Return log-probabilities in the format of OpenAI's Responses API."""
    top = [[_entry(*each) for each in token.top] for token in tokens]
    return [{**_entry(t.text, t.raw, t.logprob), "top_logprobs": best} for t, best in zip(tokens, top, strict=True)]


def _entry(text: str, raw: bytes, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def text_logprobs(tokens: Sequence[Token], offset: int = 0) -> Json:
    """Return log-probabilities in the format of OpenAI's completions.

    ``offset`` is the number of characters before the first token.
    """
    texts, offsets = [], []
    for token in tokens:
        texts.append(token.text)
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": offsets,
    }


def _by_text(token: Token) -> dict[str, float] | None:
    """Return a dictionary text -> log-probability, for a token and the most probable tokens at its position.

    Return None for a prompt's first token, which has no log-probability.
    """
    if token.logprob is None:
        return None
    return {**{text: value for text, _, value in token.top}, token.text: token.logprob}


def prompt_entry(token: Token) -> Json | None:
    """Return a prompt token's entry in ``prompt_logprobs``: the token and the most probable tokens at its position.

    Return None for the first token, which has no log-probability.
    """
    if token.logprob is None:
        return None
    best = [{"token": text, "logprob": value} for text, _, value in token.top]
    own = {"token_id": token.token_id, "token": token.text, "logprob": token.logprob, "rank": token.rank}
    return {**own, "top": best}
