"""The bodies of OpenAI's Responses API, and their conversion to chat requests. Input items become messages.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from minillm.checks import check_names, shown
from minillm.errors import UsageError
from minillm.server.answers import Json
from minillm.server.bodies import BadField, ChatBody, CommonFields, Effort, ResponseFormat, SchemaFormat
from minillm.server.parsers.tool_choice import earlier_call

Summary = Literal["auto", "concise", "detailed"]

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")  # the second has no effect: items contain reasoning as text
_NOT_SUPPORTED = ("background", "conversation", "prompt", "context_management", "moderation")
_MOST_REFERENCED = 16 << 20  # maximum size in bytes of the items that a request refers to
# Names of a chat request's fields -> names of the same fields in this API.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_ITEM_KEYS = ("type", "id", "status")
_KEYS = {
    "message": ("role", "content", "phase"),
    "reasoning": ("summary", "content", "encrypted_content"),
    "function_call": ("call_id", "name", "arguments", "parsed_arguments", "namespace", "caller", "async"),
    "function_call_output": ("call_id", "output", "name", "namespace", "caller"),
    "item_reference": (),
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")  # supported types of parts


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The grammar of an answer. A JSON schema is always enforced, even if ``strict`` is false."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Json | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def of_chat(self) -> ResponseFormat:
        """Return the equivalent field of a chat request. Raises BadField."""
        if (self.type == "json_schema") != (self.schema is not None):
            raise BadField("text.format: the type json_schema needs a schema; other types have none", "text.format")
        return ResponseFormat(self.type, None if self.schema is None else SchemaFormat(self.schema))


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint for OpenAI's own models; has no effect


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    effort: Effort | None = None
    summary: Summary | None = None  # has no effect: reasoning is returned as it is
    generate_summary: Summary | None = None  # older name of ``summary``


class ResponseBody(CommonFields):
    """The body of ``/v1/responses`` and ``/v1/responses/input_tokens``."""

    input: str | list[Json] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # true by default
    stream_options: Json | None = None  # has no effect: OpenAI's only option pads texts
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: Literal["disabled", "auto"] | None = None  # "auto" is rejected
    max_tool_calls: int | None = None  # has no effect: it counts calls of built-in tools
    client_metadata: Json | None = None  # labels that Codex sets; they have no effect
    background: bool | None = None  # true is rejected
    conversation: str | Json | None = None  # rejected, like the next three fields
    prompt: Json | None = None
    context_management: list[Json] | None = None
    moderation: Json | None = None
    chat_template_kwargs: Json | None = None  # our own field, as in chat requests

    def check(self) -> None:
        """Raise BadField for a value that is invalid for every model."""
        for name in _NOT_SUPPORTED:
            if getattr(self, name) not in (None, False):
                raise BadField(f"{name}: not supported; leave it out", name)
        if self.truncation == "auto":
            raise BadField("truncation: auto is not supported; leave it out, and shorten the input", "truncation")
        for each in self.include or ():
            if each not in _INCLUDES:
                raise BadField(f"include: {shown(each)} is not supported; known: {', '.join(_INCLUDES)}", "include")

    def chat(self, conversation: Sequence[Json]) -> ChatBody:
        """Return the equivalent chat request, in which ``conversation`` follows the instructions. Raises BadField."""
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        format_ = None if self.text is None else self.text.format
        has_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return ChatBody(
            **{name: getattr(self, name) for name in CommonFields.__struct_fields__},
            messages=[*told, *conversation],
            max_completion_tokens=self.max_output_tokens,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
            tools=None if self.tools is None else [_tool(tool, number) for number, tool in enumerate(self.tools)],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=None if format_ is None else format_.of_chat(),
        )


class NoBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request without fields."""


def _tool(tool: Json, number: int) -> Json:
    """Convert a tool to the format of a chat request, in which ``function`` has the other fields. Raises BadField."""
    kind = tool.get("type")
    if kind != "function":
        raise BadField(f"tools[{number}]: the type {shown(kind)} is not supported; only functions are", "tools")
    return {"type": kind, "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(wanted: str | Json | None) -> str | Json | None:
    """Convert ``tool_choice`` to the format of a chat request. Raises BadField."""
    if not isinstance(wanted, dict):
        return wanted
    if wanted.get("type") == "allowed_tools" and isinstance(tools := wanted.get("tools"), list):
        allowed = {"mode": wanted.get("mode"), "tools": [_choice(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if wanted.get("type") != "function" or set(wanted) != {"type", "name"}:
        form = '{"type": "function", "name": "…"}'
        raise BadField(f"tool_choice must be none, auto, required, {form} or allowed_tools", "tool_choice")
    return {"type": "function", "function": {"name": wanted["name"]}}


def messages_of(items: str | Sequence[Json], stored: Callable[[str], bytes | None] = lambda name: None) -> list[Json]:
    """Convert input items to messages of a chat request. Raises BadField.

    Args:
        items: the items, or the text of a user message.
        stored: returns the stored item with a given id, as JSON; None if no such item is stored.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    num_bytes = 0  # of the stored items
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            name = item.get("id")
            found = stored(name) if isinstance(name, str) else None
            if found is None:
                raise BadField(f"{where}: no item {shown(name)} is stored; send the item itself", "input")
            num_bytes += len(found)
            if num_bytes > _MOST_REFERENCED:  # a short body may refer to a long item many times
                raise BadField(f"input: item references stand for more than {_MOST_REFERENCED:,} bytes", "input")
            item = msgspec.json.decode(found)
            kind = item["type"]
        _add(messages, item, kind, where)
    return messages


def _add(messages: list[Json], item: Json, kind: Any, where: str) -> None:
    """Append an item of type ``kind`` to ``messages``. Raises BadField.

    Reasoning, text and calls of one answer are separate items, and become one message.
    """
    if not isinstance(kind, str) or kind not in _KEYS:
        raise BadField(f"{where}: an item of type {shown(kind)} is not supported; known: {', '.join(_KEYS)}", "input")
    try:
        check_names([name for name in item if item[name] is not None], (*_ITEM_KEYS, *_KEYS[kind]), "key")
    except UsageError as error:
        raise BadField(f"{where}: {error}", "input") from None
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        call_id, name, arguments = (_text(item, key, where) for key in ("call_id", "name", "arguments"))
        call = earlier_call(call_id, name, arguments, where, "arguments", "input")
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        name, output = _text(item, "call_id", where), _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": name, "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if thought := _content(parts, f"{where}.content"):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
        if role not in ("user", "assistant", "system", "developer"):
            raise BadField(f"{where}.role must be user, assistant, system or developer, not {shown(role)}", "input")
        if role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})


def _text(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadField(f"{where}.{name} must be text, not {shown(value)}", "input")
    return value


def _content(value: Any, where: str) -> str:
    """Return an item's content, which is a string or a list of texts, as one text of several lines. Raises BadField."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadField(f"{where} must be text or a list of parts, not {shown(value)}", "input")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise BadField(f"{where}[{number}]: a part of type {shown(kind)}: only text is supported", "input")
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{where}[{number}]"))
    return "\n".join(texts)
