"""Responses in the format of OpenAI's Responses API, complete or as streams of events.

An answer becomes a list of output items: reasoning, messages and function calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from minillm.server.answers import Json, Usage, token_logprobs
from minillm.server.client import Answer
from minillm.server.completions.formatters import EventWriter
from minillm.server.http.sending import HTTPError
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, TextPart, ThoughtPart
from minillm.server.responses.tokens import TokenFinder, by_token
from minillm.service.call_messages import Completion, Text, Token

_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}  # type of an item -> type of its content, in events
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # type of an item -> prefix of its id
# Further fields of a new item, by its type.
_FIELDS: Json = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
}

Keep = Callable[[Json, Sequence[int]], object]


def item_id(kind: str, response_id: str, number: int) -> str:
    """Return the id of item ``number`` of a response. ``kind`` is the item's type."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{number}"


def response_of(name: str) -> str:
    """Return the id of the response that has an item with the id ``name``, if ``name`` comes from `item_id`."""
    return "resp_" + name.partition("_")[2].rpartition("_")[0]


@dataclass(eq=False)
class ResponseWriter(EventWriter):
    """Writes the output of one response. An item of the output is open while its text or arguments arrive.

    Attributes:
        head: the response's fields that follow from the request, such as ``id`` and ``model``.
        keep: stores the finished response with the token ids of prompt and answer. The token ids are empty if a stop
            string shortened the answer's text. ``keep`` is called only if token ids were requested.
    """

    head: Json
    keep: Keep = lambda response, token_ids: None
    output: list[Json] = field(default_factory=list)  # finished items
    is_cancelled: bool = False
    _item: Json | None = None  # the open item
    _pieces: list[str] = field(default_factory=list)  # pieces of the open item's text or arguments
    _tokens: list[Token] = field(default_factory=list)  # tokens of the open item's text
    _finder: TokenFinder = field(default_factory=TokenFinder)
    _token_ids: list[int] = field(default_factory=list)
    _reason: str | None = None  # why the answer ended
    _is_cut: bool = False  # a stop string shortened the text, so the token ids contain more than the text
    _numbers: count[int] = field(default_factory=count)  # numbers of the events

    # --- the answer ---------------------------------------------------------------------------------------------------

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        self._token_ids += text.token_ids
        events: list[Json] = []
        for each in by_token(text):
            self._finder.add(each.tokens, is_last=bool(each.finish_reason))
            events += super().pieces(number, each)
        return events

    def add(self, part: Part) -> Iterator[Json]:
        match part:
            case TextPart(text):
                yield from self._open("message")
                self._tokens += (tokens := self._finder.take(text, continues=bool(self._tokens)))
                yield self._extend("output_text", text, content_index=0, logprobs=token_logprobs(tokens))
            case ThoughtPart(text):
                yield from self._open("reasoning")
                self._finder.skip(text)
                yield self._extend("reasoning_text", text, content_index=0)
            case CallPart(_, name, function):
                yield from self._open("function_call", call_id=name, name=function, arguments="")
            case ArgumentsPart(_, text):
                self._finder.skip_call()
                yield self._extend("function_call_arguments", text)

    def end(self, reason: str, stop: str | int | None = None) -> Iterator[Json]:
        self._reason, self._is_cut = reason, self._is_cut or isinstance(stop, str)
        items = self.output if self._item is None else [*self.output, self._item]
        if reason == "stop" and all(item["type"] == "reasoning" for item in items):
            yield from self._open("message")  # an empty answer
        yield from self._close()

    def _open(self, kind: str, **fields: Any) -> Iterator[Json]:
        """Begin an item of type ``kind``, and yield the events for this. Text continues an open item of its type."""
        if self._item is not None and self._item["type"] == kind and kind in _TYPES:
            return
        yield from self._close()
        name = item_id(kind, self.head["id"], len(self.output))
        self._item = {"id": name, "type": kind, "status": "in_progress", **_FIELDS.get(kind, {}), **fields}
        yield self._event("output_item.added", item=self._item)
        if kind in _TYPES:
            yield self._event("content_part.added", item_id=name, content_index=0, part=self._part(kind, ""))

    def _extend(self, kind: str, text: str, **fields: Any) -> Json:
        assert self._item is not None
        self._pieces.append(text)
        return self._event(f"{kind}.delta", item_id=self._item["id"], **fields, delta=text)

    def _close(self) -> Iterator[Json]:
        """End the open item, if there is one, and add it to the output. Yield the events for this."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return
        kind, at = item["type"], {"item_id": item["id"]}
        item = {**item, "status": "completed" if self._reason in (None, "stop") else "incomplete"}
        if kind in _TYPES:
            part, at = self._part(kind, text), {**at, "content_index": 0}
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._event(f"{_TYPES[kind]}.done", **at, text=text, **more)
            yield self._event("content_part.done", **at, part=part)
        else:
            item["arguments"] = text
            yield self._event("function_call_arguments.done", **at, name=item["name"], arguments=text)
        yield self._event("output_item.done", item=item)
        self.output.append(item)
        self._item, self._pieces, self._tokens = None, [], []

    def _part(self, kind: str, text: str) -> Json:
        """Return ``text``, the text of the open item of type ``kind``, as a content part in the format of the API."""
        more = {"annotations": [], "logprobs": token_logprobs(self._tokens)} if kind == "message" else {}
        return {"type": _TYPES[kind], "text": text, **more}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "output_index": len(self.output), **fields}

    # --- the response -------------------------------------------------------------------------------------------------

    def now(self, status: str = "in_progress", usage: Usage | None = None, error: Json | None = None) -> Json:
        """Return the response with all items that have ended so far."""
        return {
            **self.head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self.output,
            "usage": None if usage is None else usage.json("input", "output"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }

    def response(self, choices: list[Json], usage: Usage, prompt: Json) -> Json:
        """Return the finished response. If token ids were requested, also call ``keep``, which stores the response."""
        status = "cancelled" if self.is_cancelled else "completed" if self._reason == "stop" else "incomplete"
        found = self.now(status, usage)
        began = None if self.answer is None else self.answer.began
        if began is not None and began.prompt_token_ids:
            self.keep(found, [] if self._is_cut else [*began.prompt_token_ids, *self._token_ids])
        return found

    def opening(self, answers: Sequence[Answer]) -> bytes:
        [self.answer] = answers
        now = self.now()
        return self.encoded({"type": f"response.{kind}", "response": now} for kind in ("created", "in_progress"))

    def closing(self, usage: Usage, *, has_usage: bool) -> bytes:
        events = list(self.end("abort")) if self.is_cancelled else []
        found = self.response([], usage, {})
        kind = "completed" if found["status"] == "completed" else "incomplete"
        return self.encoded([*events, {"type": f"response.{kind}", "response": found}])

    def error(self, failed: HTTPError) -> Json:
        return failed.json()

    def failed(self, failed: HTTPError) -> bytes:
        error = failed.json()["error"]
        found = self.now("failed", error={"code": error["code"] or "server_error", "message": error["message"]})
        return self.encoded([{"type": "response.failed", "response": found}])

    def encoded(self, events: Iterable[Json]) -> bytes:
        return super().encoded({**each, "sequence_number": next(self._numbers)} for each in events)
