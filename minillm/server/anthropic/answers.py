"""Responses in the format of Anthropic's Messages API: one message, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from minillm.server.answers import Json, Usage, event
from minillm.server.client import Answer
from minillm.server.completions.formatters import EventWriter
from minillm.server.http.sending import CONTEXT_LENGTH, HTTPError
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, TextPart
from minillm.text.safe import parse_strict_json

THREAD = "thread_unsupported_request"  # code of an error after which clients send the whole conversation
# Types of errors by status.
_KINDS = {404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error"}


@dataclass(eq=False)
class MessageWriter(EventWriter):
    """Writes one message.

    Attributes:
        id: the message's id. It is also the signature of thinking blocks. Clients drop thinking blocks without a
            signature. This server never checks the signature.
        omits_thoughts: send thinking blocks without the text of the reasoning.
        stop: the fields of the message that say why the answer ended.
    """

    ping: ClassVar[bytes] = event({"type": "ping"}, "ping")
    id: str
    model: str
    omits_thoughts: bool = False
    stop: Json = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})
    _block: str = ""  # type of the open content block; empty: none is open
    _index: int = -1  # index of the open block, or of the last block
    _has_called: bool = False

    def add(self, part: Part) -> Iterator[Json]:
        match part:
            case CallPart(_, name, function):
                self._has_called = True
                yield from self._open({"type": "tool_use", "id": name, "name": function, "input": {}})
            case ArgumentsPart(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case TextPart(text):
                if self._block != "text":
                    yield from self._open({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case _:
                if self._block != "thinking":
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                if not self.omits_thoughts:
                    yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def end(self, reason: str, stop: str | int | None) -> list[Json]:
        text = stop if isinstance(stop, str) else None
        why = "max_tokens" if reason == "length" else "tool_use" if self._has_called else "end_turn"
        self.stop = {"stop_reason": why if text is None else "stop_sequence", "stop_sequence": text}
        return self._close()

    def _open(self, block: Json) -> list[Json]:
        """Begin a content block. Return the events that close the open block, if there is one, and begin ``block``."""
        closing = self._close()
        self._block, self._index = block["type"], self._index + 1
        return [*closing, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[Json]:
        if not self._block:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": self.id})] if self._block == "thinking" else []
        self._block = ""
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def response(self, choices: list[Json], usage: Usage, prompt: Json) -> Json:
        return self._message(usage, content=_joined(choices))

    def opening(self, answers: Sequence[Answer]) -> bytes:
        count = sum(answer.began.num_prompt_tokens for answer in answers if answer.began is not None)
        return self.encoded([{"type": "message_start", "message": self._message(Usage(prompt=count), content=[])}])

    def closing(self, usage: Usage, *, has_usage: bool) -> bytes:
        last = {"type": "message_delta", "delta": self.stop, "usage": _usage(usage)}
        return self.encoded([last, {"type": "message_stop"}])

    def error(self, failed: HTTPError) -> Json:
        return message_error(failed)

    def failed(self, failed: HTTPError) -> bytes:
        return self.encoded([message_error(failed)])

    def _message(self, usage: Usage, content: list[Json]) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **self.stop, "usage": _usage(usage)}


def _joined(events: list[Json]) -> list[Json]:
    """Combine the events of a stream into complete content blocks."""
    content: list[Json] = []
    for each in events:
        if "content_block" in each:
            content.append(dict(each["content_block"]))
        elif "delta" in each:
            _, (name, text) = each["delta"].items()
            content[-1][name] = content[-1].get(name, "") + text
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = _input(block.pop("partial_json", ""))
    return content


def _input(arguments: str) -> Any:
    """Return a tool call's arguments as raw JSON. If the answer ended inside the arguments, return an empty object."""
    try:
        parse_strict_json(arguments)
    except ValueError:
        return {}
    return msgspec.Raw(arguments.encode())


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached,  # clients add the number of cached tokens
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def message_error(failed: HTTPError) -> Json:
    """Return an error in Anthropic's format. If `_KINDS` does not list its status, it has OpenAI's type."""
    message, kind = str(failed), failed.json()["error"]["type"]
    if failed.code == CONTEXT_LENGTH:  # clients look for these words, and then shorten the conversation
        message = f"prompt is too long: {message}"
    kind = _KINDS.get(failed.status, "api_error" if kind == "server_error" else kind)
    details = {"details": {"error_code": THREAD}} if failed.code == THREAD else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def is_messages(path: str) -> bool:
    """Return whether ``path`` belongs to the Messages API."""
    return f"{path}/".startswith("/v1/messages/")


def error_at(path: str, failed: HTTPError) -> Json:
    """Return an error in the format of the route at ``path``: Anthropic's for the Messages API, else OpenAI's."""
    return message_error(failed) if is_messages(path) else failed.json()
