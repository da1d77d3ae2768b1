"""Responses in the format of OpenAI's Responses API, complete or as streams of events.

An answer becomes a list of output items: reasoning, messages and function calls.
"""

from __future__ import annotations

import codecs
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, ClassVar

from minillm.server.answers import Json, Usage, chat_logprobs, event
from minillm.server.engine_process import Answer
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, Reader, TextPart, ThoughtPart
from minillm.service.call_messages import Completion, Ended, Text, Token

_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}  # type of an item -> type of its content, in events
_THOUGHT = {"type": "reasoning"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # type of an item -> prefix of its id


def item_id(kind: str, response_id: str, number: int) -> str:
    """Return the id of item ``number`` of a response. ``kind`` is the item's type."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{number}"


def response_of(name: str) -> str:
    """Return the id of the response that has an item with the id ``name``, if ``name`` comes from `item_id`."""
    return "resp_" + name.partition("_")[2].rpartition("_")[0]


@dataclass(eq=False)
class ResponseWriter:
    """Writes the output of one response. It implements `minillm.server.generating.Form`: its choices are events.

    An item is open while its text or arguments arrive.

    Attributes:
        head: the response's fields that follow from the request, such as ``id`` and ``model``.
        reader: creates a reader for the answer's text. Its argument is whether the answer begins inside the reasoning.
        keep: stores the finished response with the token ids of prompt and answer. The token ids are empty if a stop
            string shortened the answer's text. ``keep`` is called only if token ids were requested.
        answer: the engine's answer; None before it begins.
    """

    head: Json
    reader: Callable[[bool], Reader]
    has_logprobs: bool = False
    keep: Callable[[Json, Sequence[int]], object] = lambda response, token_ids: None
    answer: Answer | None = None
    output: list[Json] = field(default_factory=list)  # finished items
    is_cancelled: bool = False
    _item: Json | None = None  # the open item
    _pieces: list[str] = field(default_factory=list)  # pieces of the open item's text or arguments
    _tokens: list[Token] = field(default_factory=list)  # tokens of the open item's text
    _new_tokens: list[Token] = field(default_factory=list)  # tokens with text that belongs to no item yet
    _token_ids: list[int] = field(default_factory=list)
    _reason: str | None = None  # why the answer ended
    _is_cut: bool = False  # a stop string shortened the text, so the token ids contain more than the text
    _reader: Reader | None = None

    # --- the answer ---------------------------------------------------------------------------------------------------

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        self.answer, self._reader = answer, self.reader(answer.began is not None and answer.began.in_reasoning)
        return None

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        assert self._reader is not None
        self._token_ids += text.token_ids
        if self.has_logprobs:
            self._new_tokens += text.tokens
        parts, events = self._reader.push(text.text), list[Json]()
        if text.finish_reason:
            parts += self._reader.finish()
        for part in parts:
            self._add(part, events)
        if text.finish_reason:
            self._is_cut = isinstance(text.stop_reason, str)
            self.end(text.finish_reason, events)
        return events

    def end(self, reason: str, events: list[Json]) -> None:
        """End the output, and append the events for this to ``events``. ``reason`` is the finish reason."""
        self._reason = reason
        if reason == "stop" and all(item["type"] == "reasoning" for item in (*self.output, self._item or _THOUGHT)):
            self._open("message", events)  # an empty answer
        self._close(events)

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        [each] = completions
        ended = answer.ended
        self.answer, self._reader = answer, self.reader(isinstance(ended, Ended) and ended.in_reasoning)
        self.pieces(number, each)
        return []

    def prompt(self, answers: Sequence[Answer]) -> Json:
        return {}

    def _add(self, part: Part, events: list[Json]) -> None:
        match part:
            case TextPart(text):
                self._open("message", events)
                self._tokens += (tokens := self._tokens_of(text))
                self._extend("output_text.delta", text, events, content_index=0, logprobs=_logprobs(tokens))
            case ThoughtPart(text):
                self._open("reasoning", events)
                self._tokens_of(text)
                self._extend("reasoning_text.delta", text, events, content_index=0)
            case CallPart(_, name, function):
                self._close(events)
                self._open("function_call", events, call_id=name, name=function, arguments="")
            case ArgumentsPart(_, text):
                self._extend("function_call_arguments.delta", text, events)

    def _open(self, kind: str, events: list[Json], **fields: Any) -> None:
        """Begin an item of type ``kind``, and append the events for this to ``events``.

        If an item of this type is open and its content is text, nothing happens: the item continues.
        """
        if self._item is not None and self._item["type"] == kind and kind in _TYPES:
            return
        self._close(events)
        own: Json = {"message": {"role": "assistant", "content": []}, "reasoning": {"summary": [], "content": []}}
        name = item_id(kind, self.head["id"], len(self.output))
        self._item = {"id": name, "type": kind, "status": "in_progress", **own.get(kind, {}), **fields}
        events.append(self._event("output_item.added", item=self._item))
        if kind in _TYPES:
            events.append(self._event("content_part.added", item_id=name, content_index=0, part=self._part("")))

    def _extend(self, kind: str, text: str, events: list[Json], **fields: Any) -> None:
        assert self._item is not None
        self._pieces.append(text)
        events.append(self._event(kind, item_id=self._item["id"], **fields, delta=text))

    def _close(self, events: list[Json]) -> None:
        """End the open item, if there is one, and add it to the output. Append the events for this to ``events``."""
        item = self._item
        if item is None:
            return
        text, kind, at = "".join(self._pieces), item["type"], {"item_id": item["id"]}
        end: Json = {"status": "incomplete" if self._reason not in (None, "stop") else "completed"}
        if kind in _TYPES:
            part, at = self._part(text), {**at, "content_index": 0}
            end["content"] = [part]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            events.append(self._event(f"{_TYPES[kind]}.done", **at, text=text, **more))
            events.append(self._event("content_part.done", **at, part=part))
        else:
            end["arguments"] = text
            events.append(self._event("function_call_arguments.done", **at, name=item["name"], arguments=text))
        item = {**item, **end}
        events.append(self._event("output_item.done", item=item))
        self.output.append(item)
        self._item, self._pieces, self._tokens = None, [], []

    def _tokens_of(self, text: str) -> list[Token]:
        """Return the tokens that contain ``text`` or a part of it. ``text`` is the next piece of the answer.

        Remove these tokens, and all tokens before them, from `_new_tokens`.
        """
        decoder, pieces, is_open = codecs.getincrementaldecoder("utf-8")("replace"), list[str](), list[bool]()
        for token in self._new_tokens:
            pieces.append(decoder.decode(token.raw))
            is_open.append(bool(decoder.getstate()[0]))  # the token ends inside of a character
        ends, whole = list(accumulate(map(len, pieces))), "".join(pieces)
        begin = max(0, whole.find(text))
        end = begin + len(text) if text in whole else len(whole)  # a character may have begun in an earlier token
        first, taken = bisect_right(ends, begin), bisect_left(ends, end) + 1
        while first and is_open[first - 1]:
            first -= 1
        found, self._new_tokens = self._new_tokens[first:taken], self._new_tokens[taken:]
        return found

    def _part(self, text: str) -> Json:
        """Return ``text``, the text of the open item, as a content part in the format of the API."""
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(self._tokens)}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "output_index": len(self.output), **fields}

    # --- the response -------------------------------------------------------------------------------------------------

    def response(self, status: str = "in_progress", usage: Usage | None = None, error: Json | None = None) -> Json:
        """Return the response with all items that have ended so far."""
        used = None if usage is None else {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }  # fmt: skip
        return {
            **self.head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self.output,
            "usage": used,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }

    def finished(self, usage: Usage) -> Json:
        """Return the finished response. If token ids were requested, also call ``keep``, which stores the response."""
        status = "cancelled" if self.is_cancelled else "completed" if self._reason == "stop" else "incomplete"
        found = self.response(status, usage)
        began = None if self.answer is None else self.answer.began
        if began is not None and began.prompt_token_ids:
            self.keep(found, [] if self._is_cut else [*began.prompt_token_ids, *self._token_ids])
        return found


@dataclass(frozen=True)
class ResponseFrame:
    """Encodes a response or its events. It implements `minillm.server.generating.Framing`."""

    writer: ResponseWriter
    ping: ClassVar[bytes] = b": alive\n\n"
    _numbers: count[int] = field(default_factory=count)

    def whole(self, choices: list[Json], usage: Usage, prompt: Json) -> Json:
        return self.writer.finished(usage)

    def opening(self, answers: Sequence[Answer]) -> bytes:
        [self.writer.answer] = answers
        now = self.writer.response()
        return self._encoded([{"type": f"response.{kind}", "response": now} for kind in ("created", "in_progress")])

    def chunks(self, choices: list[Json], usage: Usage | None, prompt: Json, *, has_usage: bool) -> bytes:
        return self._encoded(choices)

    def closing(self, usage: Usage, *, has_usage: bool) -> bytes:
        events: list[Json] = []
        if self.writer.is_cancelled:
            self.writer.end("abort", events)
        found = self.writer.finished(usage)
        kind = "completed" if found["status"] == "completed" else "incomplete"
        return self._encoded([*events, {"type": f"response.{kind}", "response": found}])

    def error(self, error: Json, status: int) -> Json:
        return error

    def failed(self, error: Json, status: int) -> bytes:
        code, message = error["error"]["code"] or "server_error", error["error"]["message"]
        found = self.writer.response("failed", error={"code": code, "message": message})
        return self._encoded([{"type": "response.failed", "response": found}])

    def _encoded(self, events: Sequence[Json]) -> bytes:
        return b"".join(event({**each, "sequence_number": next(self._numbers)}, each["type"]) for each in events)


def _logprobs(tokens: Sequence[Token]) -> list[Json]:
    found: list[Json] = chat_logprobs(tokens)["content"]
    return found
