"""The formats of completions in a response: chat messages, plain text, and events of other protocols.

See `minillm.server.generating.Formatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minillm.server.answers import PING, Json, Usage, chat_logprobs, event, extras, prompt_entry, text_logprobs
from minillm.server.client import Answer
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, Reader, TextPart, ThoughtPart
from minillm.service.call_messages import Completion, Text, Token


@dataclass
class ChatFormatter:
    """Formats answers as assistant messages.

    ``reader`` creates a reader for the text of an answer that has begun.
    """

    has_logprobs: bool
    reader: Callable[[Answer], Reader]
    prompt_logprobs: bool = False
    _readers: dict[int, Reader] = field(default_factory=dict)  # readers of a stream's completions, by index
    _calling: set[int] = field(default_factory=set)  # completions that have called a tool

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        self._readers[index] = self.reader(answer)
        return _choice(index, delta={"role": "assistant", "content": ""})

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        parts = parts_of(self._readers[text.index], text)
        if any(isinstance(part, CallPart) for part in parts):
            self._calling.add(text.index)
        deltas = [_delta(part) for part in parts]
        has_more = text.finish_reason or text.token_ids or (self.has_logprobs and text.tokens)
        if not deltas and not has_more:
            return []
        found = [_choice(text.index, delta=delta) for delta in deltas or [{}]]
        last = found[-1]
        last["finish_reason"] = _reason(text.finish_reason, text.index in self._calling)
        if self.has_logprobs and text.tokens:
            last["logprobs"] = chat_logprobs(text.tokens)
        last |= extras(text)
        return found

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        return [self._whole(each, self.reader(answer)) for each in completions]

    def prompt(self, answers: Sequence[Answer]) -> Json:
        [began] = [answer.began for answer in answers]
        found: Json = {}
        if began is not None and began.prompt_token_ids:
            found["prompt_token_ids"] = began.prompt_token_ids
        if began is not None and self.prompt_logprobs:
            found["prompt_logprobs"] = [prompt_entry(token) for token in began.prompt_tokens]
        return found

    def _whole(self, each: Completion, reader: Reader) -> Json:
        message = _message(parts_of(reader, each))
        logprobs = chat_logprobs(each.tokens) if self.has_logprobs else None
        reason = _reason(each.finish_reason, "tool_calls" in message)
        found = {"index": each.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return found | extras(each)


@dataclass(eq=False)
class EventWriter:
    """Writes the response to a request that has one answer, complete or as a stream of events with a type.

    It implements `Formatter` and `ResponseEncoder` of `minillm.server.generating`. Its choices are events.
    Subclasses implement ``add``, ``end`` and the other methods of ``ResponseEncoder``.

    Attributes:
        reader: creates a reader for the text of an answer that has begun.
        answer: the engine's answer; None before it begins.
    """

    ping: ClassVar[bytes] = PING
    reader: Callable[[Answer], Reader]
    answer: Answer | None = field(default=None, init=False)
    _reader: Reader = field(init=False)

    def add(self, part: Part) -> Iterable[Json]:
        """Return the events for the next part of the answer."""
        raise NotImplementedError

    def end(self, reason: str, stop: str | int | None) -> Iterable[Json]:
        """Return the events after the last part. ``reason`` is the finish reason, ``stop`` the text that ended it."""
        raise NotImplementedError

    def first(self, number: int, index: int, answer: Answer) -> None:
        self.answer, self._reader = answer, self.reader(answer)

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        events = [each for part in parts_of(self._reader, text) for each in self.add(part)]
        return [*events, *self.end(text.finish_reason, text.stop_reason)] if text.finish_reason else events

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        self.first(number, 0, answer)
        return self.pieces(number, completions[0])

    def prompt(self, answers: Sequence[Answer]) -> Json:
        return {}

    def chunks(self, choices: list[Json], usage: Usage | None, prompt: Json, *, has_usage: bool) -> bytes:
        return self.encoded(choices)

    def encoded(self, events: Iterable[Json]) -> bytes:
        """Return server-sent events. The field ``type`` of each value is the event's type."""
        return b"".join(event(each, each["type"]) for each in events)


def parts_of(reader: Reader, text: Text | Completion) -> list[Part]:
    """Return the parts of an answer that its next ``text`` completes."""
    parts = reader.push(text.text)
    return parts + reader.finish() if text.finish_reason else parts


def _message(parts: list[Part]) -> Json:
    """Return the complete message that ``parts`` form together."""
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    message: Json = {"role": "assistant", "content": said, "refusal": None}
    if thought := "".join(part.text for part in parts if isinstance(part, ThoughtPart)):
        message["reasoning_content"] = thought
    calls = [_tool_call(part.id, part.name) for part in parts if isinstance(part, CallPart)]
    for part in parts:
        if isinstance(part, ArgumentsPart):
            calls[part.index]["function"]["arguments"] += part.text
    if calls:
        message |= {"content": said or None, "tool_calls": calls}
    return message


def _delta(part: Part) -> Json:
    """Return the fields that ``part`` adds to a message, in the format of a stream's chunk."""
    match part:
        case TextPart(text):
            return {"content": text}
        case ThoughtPart(text):
            return {"reasoning_content": text}
        case CallPart(index, name, function):
            return {"tool_calls": [{"index": index, **_tool_call(name, function)}]}
        case ArgumentsPart(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _tool_call(name: str, function: str) -> Json:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": ""}}


def _reason(reason: str | None, has_called: bool) -> str | None:
    """Return the finish reason in OpenAI's format: "tool_calls" if the answer called tools and ended by itself."""
    return "tool_calls" if has_called and reason == "stop" else reason


@dataclass
class TextFormatter:
    """Formats answers as plain texts. If requested, each answer begins with its prompt."""

    n: int  # answers per prompt; the answers to all prompts are numbered consecutively
    echo: bool
    has_logprobs: bool
    prompt_logprobs: bool = False
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)  # characters so far, by prompt and completion

    def first(self, number: int, index: int, answer: Answer) -> Json | None:
        began = answer.began
        if began is None or not (self.echo or began.prompt_token_ids):
            return None
        found = self._choice(number, index, self._prompt_of(answer))
        if self.has_logprobs and self.echo:
            found["logprobs"] = self._logprobs(number, index, began.prompt_tokens)
        return _with_prompt_ids(found, answer)

    def pieces(self, number: int, text: Text | Completion) -> list[Json]:
        if not (text.text or text.finish_reason or text.token_ids or (self.has_logprobs and text.tokens)):
            return []
        found = self._choice(number, text.index, text.text, text.finish_reason)
        if self.has_logprobs:
            found["logprobs"] = self._logprobs(number, text.index, text.tokens)
        found |= extras(text)
        return [found]

    def _logprobs(self, number: int, index: int, tokens: list[Token]) -> Json:
        """Return the log-probabilities of a stream's next ``tokens``."""
        offset = self._offsets.get((number, index), 0)
        self._offsets[number, index] = offset + sum(len(token.text) for token in tokens)
        return text_logprobs(tokens, offset)

    def whole(self, number: int, completions: list[Completion], answer: Answer) -> list[Json]:
        choices = []
        for index, each in enumerate(completions[: self.n]):  # more with best_of, the best first
            prompt = self._prompt_of(answer)
            found = self._choice(number, index, prompt + each.text, each.finish_reason)
            before = answer.began.prompt_tokens if answer.began is not None else []
            if self.has_logprobs:
                found["logprobs"] = text_logprobs([*(before if self.echo else ()), *each.tokens])
            if self.prompt_logprobs:
                found["prompt_logprobs"] = [prompt_entry(token) for token in before]
            choices.append(_with_prompt_ids(found | extras(each), answer))
        return choices

    def prompt(self, answers: Sequence[Answer]) -> Json:
        return {}

    def _prompt_of(self, answer: Answer) -> str:
        return answer.began.prompt_text if self.echo and answer.began is not None else ""

    def _choice(self, number: int, index: int, text: str, reason: str | None = None) -> Json:
        return {"index": number * self.n + index, "text": text, "logprobs": None, "finish_reason": reason}


def _with_prompt_ids(choice: Json, answer: Answer) -> Json:
    ids = [] if answer.began is None else answer.began.prompt_token_ids
    return {**choice, "prompt_token_ids": ids} if ids else choice


def _choice(index: int, *, delta: dict[str, Any], reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
