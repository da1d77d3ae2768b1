"""The HTTP routes of Anthropic's Messages API. A request is converted to a chat request in OpenAI's format."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minillm.checks import shown
from minillm.server import bodies
from minillm.server.answers import Json
from minillm.server.anthropic.answers import THREAD, MessageWriter
from minillm.server.bodies import BadField, ChatBody, SharedFields
from minillm.server.completions.routes import ChatCall, chat_call, count_prompt_tokens
from minillm.server.generating import GeneratedResponse
from minillm.server.http.sending import HTTPError
from minillm.server.parsers.tool_choice import earlier_call
from minillm.server.service import Service, json_response
from minillm.text.reasoning import CLOSE

# Names of a chat request's fields -> names of the same fields in this API.
_NAMES = {
    "max_reasoning_tokens": "thinking.budget_tokens",
    "parameters": "input_schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# Types of content blocks that a message may have, by role.
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
# Claude Code begins its system prompt with a line that differs in each request. The line is removed, because it would
# make the prefix cache useless.
_BILLING = "x-anthropic-billing-header:"

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The tools that the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # name of the tool, if the type is "tool"
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of the model's reasoning before its answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # maximum reasoning tokens, if the type is "enabled"
    display: Literal["summarized", "omitted"] | None = None  # "omitted": thinking blocks have no text

    def limits(self, effort: Effort | None) -> tuple[bodies.Effort | None, int | None]:
        """Return ``reasoning_effort`` and ``max_reasoning_tokens`` of the chat request. Raises BadField."""
        if self.type == "disabled":
            return "none", None
        if self.type == "enabled" and self.budget_tokens is None:
            raise BadField("thinking: budget_tokens is missing; give a limit, or the type adaptive", "thinking")
        return effort or "high", self.budget_tokens if self.type == "enabled" else None


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None  # limits the reasoning, unless ``thinking`` sets a number of tokens
    format: JsonFormat | None = None


class MessagesBody(SharedFields):
    """The body of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    messages: list[Json]
    system: str | list[Json] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # older name of ``output_config.format``
    thread: Json | None = None  # rejected: this server does not hold conversations
    # labels and hints for Anthropic's own service; they have no effect
    metadata: Json | None = None
    cache_control: Json | None = None  # also allowed in content blocks and tools; prefixes are always cached
    context_management: Json | None = None
    diagnostics: Json | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None

    def chat(self) -> ChatBody:
        """Return the equivalent chat request. Raises BadField."""
        conversation, choice = self._conversation(), self.tool_choice
        last = conversation[-1] if conversation else {}
        if "tool_calls" in last:
            raise BadField("messages: the last message has calls; add a message with their tool_result", "messages")
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        schema = None if form is None else bodies.SchemaFormat(form.schema)
        effort, budget = (None, None) if self.thinking is None else self.thinking.limits(config.effort)
        return ChatBody(
            **{name: getattr(self, name) for name in SharedFields.__struct_fields__},
            messages=conversation,
            max_tokens=self.max_tokens,
            continue_final_message=last.get("role") == "assistant",
            stop=self.stop_sequences or None,
            tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or ())] or None,
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            reasoning_effort=effort,
            max_reasoning_tokens=budget,
            response_format=None if schema is None else bodies.ResponseFormat("json_schema", schema),
        )

    def _conversation(self) -> list[Json]:
        """Return the messages of the chat request. Adjacent messages with the same role become one."""
        found: list[Json] = []
        places = [] if self.system is None else [("system", {"role": "system", "content": self.system})]
        places += [(f"messages[{number}]", each) for number, each in enumerate(self.messages)]
        for where, message in places:
            role = message.get("role")
            if not isinstance(role, str) or role not in _BLOCKS:
                raise BadField(f"{where}: role must be user or assistant, not {shown(role)}", "messages")
            for place, block in _blocks(message.get("content"), where):
                _add(found, role, block, place)
        return found


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the value of each content block of a message. Raises BadField, which names the place."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise BadField(f"{where}: content must be text or a list of content blocks, not {shown(content)}", "messages")
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if not isinstance(block, Mapping):
            raise BadField(f'{place} must be {{"type": "text", "text": "…"}}, not {shown(block)}', "messages")
        yield place, block


def _add(found: list[Json], role: str, block: Mapping[str, Any], where: str) -> None:
    """Add a content block of a message with ``role`` to ``found``, the messages of the chat request. Raises BadField.

    ``where`` names the block in error messages.
    """
    kind = block.get("type")
    if kind not in _BLOCKS[role]:
        known = ", ".join(_BLOCKS[role])
        raise BadField(f"{where}: {shown(kind)} blocks are not supported in a {role} message; use {known}", "messages")
    if kind == "tool_result":
        text = "\n".join(_text(each, "text", place) for place, each in _blocks(block.get("content") or "", where))
        text = f"Error: {text}" if block.get("is_error") else text
        found.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": text})
        return
    if role == "system" and found and found[-1]["role"] != "system":
        role = "user"  # many chat templates allow a system message only at the beginning
    if not found or found[-1]["role"] != role:
        found.append({"role": role, "content": []})
    message = found[-1]
    if kind == "text":
        text = _text(block, "text", where)
        if role == "system" and text.startswith(_BILLING):
            text = text.partition("\n")[2]
        message["content"] += [text] if text else []
    elif kind == "thinking":
        thought = _text(block, "thinking", where)
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))
    elif kind == "tool_use":
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise BadField(f"{where}: input must be an object, not {shown(arguments)}", "messages")
        call = earlier_call(
            _text(block, "id", where), _text(block, "name", where), arguments, where, "input", "messages"
        )
        message.setdefault("tool_calls", []).append(call)


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    kind, text = block.get("type"), block.get(name)
    if name == "text" and kind != "text":
        raise BadField(f"{where}: {shown(kind)} blocks are not supported in a tool_result; use text", "messages")
    if not isinstance(text, str):
        raise BadField(f"{where}: {name} must be text, not {shown(text)}", "messages")
    return text


def _tool(tool: Mapping[str, Any], where: str) -> Json:
    """Convert a tool to OpenAI's format. Raises BadField."""
    kind, schema = tool.get("type") or "custom", tool.get("input_schema")
    if kind != "custom":
        raise BadField(f"{where}: {shown(kind)} tools are not supported; give a name and an input_schema", "tools")
    if not isinstance(schema, Mapping):
        raise BadField(f"{where}: input_schema must be a JSON schema, not {shown(schema)}", "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _choice(choice: ToolChoice) -> str | Json:
    """Convert the field ``tool_choice`` to OpenAI's format. Raises BadField."""
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if not choice.name:
        raise BadField("tool_choice: name is missing; give the name of a tool", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _read(service: Service, request: Request, name: str) -> tuple[MessagesBody, ChatCall]:
    """Return the body of a request, and the engine's call for the equivalent chat request.

    Raises BadField, or HTTPError for a field with an error code of its own.
    """
    body = bodies.read_body(MessagesBody, request.state.body)
    if body.thread is not None:
        raise HTTPError(400, "thread: not supported; send the whole conversation", code=THREAD)
    chat = body.chat()
    if not service.facts.has_thinking_switch and CLOSE not in service.facts.chat_template:
        chat.reasoning_effort = None  # the model does not reason
    names = _NAMES if body.output_format is None else {**_NAMES, "response_format": "output_format"}
    return body, chat_call(service, request.state.tenant, name, chat, names)


async def create_message(service: Service, request: Request) -> GeneratedResponse:
    name = f"msg_{secrets.token_hex(12)}"
    body, made = _read(service, request, name)
    omits = body.thinking is not None and body.thinking.display == "omitted"
    writer = MessageWriter(made.reader, name, service.names[0], omits)
    return made.response(service, writer, writer)


async def count_tokens(service: Service, request: Request) -> Response:
    _, made = _read(service, request, "")
    return json_response({"input_tokens": await count_prompt_tokens(service, made.call)})
