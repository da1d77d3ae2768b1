"""Check the tools that a model may call and the tool calls in a conversation. Render both as text if needed.

The format is OpenAI's. A tool is ``{"type": "function", "function": {"name", "description", "parameters"}}``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from minillm.checks import check_names, shown
from minillm.errors import UsageError
from minillm.text.safe import parse_strict_json

MAX_TOOLS = 128
_MAX_DEPTH = 64  # maximum levels of nesting in a schema and in arguments
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# The prompt that SmolLM2 and Qwen were trained with: https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct.
_INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def plain_tools(tools: Any) -> list[dict[str, Any]]:
    """Return a normalized copy of the tools. Raises UsageError with the position of the first invalid tool."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UsageError(f"tools must be a list, not {shown(tools)}")
    if len(tools) > MAX_TOOLS:
        raise UsageError(f"tools: {len(tools)} of them; at most {MAX_TOOLS} are allowed")
    plain = [_plain_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in plain]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"tools: two have the name {name}; give each its own")
    return plain


def _plain_tool(tool: Any, where: str) -> dict[str, Any]:
    function = _function_of(tool, ("type", "function"), where)
    where = f"{where}.function"
    _check_keys(function, ("name", "description", "parameters", "strict"), where)
    name = _name_of(function, where)
    plain: dict[str, Any] = {"name": name}
    if (description := function.get("description")) is not None:
        if not isinstance(description, str):
            raise UsageError(f"{where}.description must be text, not {shown(description)}")
        plain["description"] = description
    if function.get("strict") not in (None, True, False):
        raise UsageError(f"{where}.strict must be true or false, not {shown(function['strict'])}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"{where}.parameters must be a JSON schema, not {shown(parameters)}")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise UsageError(f"{where}.parameters must be the schema of an object, not of {shown(parameters['type'])}")
    empty = {"type": "object", "properties": {}}
    plain["parameters"] = empty if parameters is None else _plain_json(parameters, f"{where}.parameters")
    return {"type": "function", "function": plain}


def plain_calls(calls: Any) -> list[dict[str, Any]]:
    """Return a normalized copy of the tool calls of an assistant message.

    If ``arguments`` are text, they are parsed to an object, as templates expect. If the text is not a JSON object, for
    example because the model reached its limit of tokens, they become ``{"INVALID_JSON": text}``. Source:
    https://platform.claude.com/docs/en/agents-and-tools/tool-use/fine-grained-tool-streaming

    Raises UsageError with the position of the first invalid call.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise UsageError(f"tool_calls of a message must be a list, not {shown(calls)}")
    return [_plain_call(call, f"tool_calls[{number}]") for number, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = _function_of(call, ("id", "type", "function", "index"), where)
    plain: dict[str, Any] = {"type": "function"}
    if (name := call.get("id")) is not None:
        if not isinstance(name, str):
            raise UsageError(f"{where}.id must be text, not {shown(name)}")
        plain["id"] = name
    where = f"{where}.function"
    _check_keys(function, ("name", "arguments", "parsed_arguments"), where)  # OpenAI's client adds the last one
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        text, arguments = arguments, None
        with suppress(ValueError):
            arguments = parse_strict_json(text or "{}")
        if not isinstance(arguments, Mapping):
            arguments = {"INVALID_JSON": text}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where}.arguments must be an object as JSON, not {shown(arguments)}")
    plain["function"] = {"name": _name_of(function, where), "arguments": _plain_json(arguments, f"{where}.arguments")}
    return plain


def _function_of(value: Any, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f'{where} must be {{"type": "function", "function": {{…}}}}, not {shown(value)}')
    _check_keys(value, keys, where)
    if value.get("type", "function") != "function":
        raise UsageError(f"{where}.type must be 'function', not {shown(value['type'])}")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise UsageError(f"{where}.function must be an object with a name, not {shown(function)}")
    return function


def _check_keys(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    try:
        check_names([key for key in value if value[key] is not None], known, "key")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _name_of(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}.name must be 1 to 64 letters, digits, '_', '-' or '.', not {shown(name)}")
    return name


def _plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of a value. Raises UsageError if it cannot be written as JSON."""
    if depth > _MAX_DEPTH:
        raise UsageError(f"{where} is nested deeper than {_MAX_DEPTH} levels; make it flatter")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{where}: keys are text, not {shown(key)}")
        return {key: _plain_json(each, where, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(each, where, depth + 1) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: JSON has no number {value}; use null or text")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UsageError(f"{where}: JSON has no {type(value).__name__}")


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value with ``change`` applied to each text, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): with_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(each, change) for each in value]
    return value


def knows_tools(template: str) -> bool:
    """Return whether a chat template supports tools, because it mentions the variable ``tools``.

    A key ``tools`` is no variable: Phi-4-mini's template reads ``message['tools']``, which no API has.
    """
    return re.search(r"(?<!['\".])\btools\b(?!['\"])", template) is not None


def written_down(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Write tools, tool calls and tool results into the texts of ordinary messages. Return these messages.

    Use this if the chat template does not support tools.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        if calls := message.pop("tool_calls", None):
            said = [message["content"]] if message["content"] else []
            functions = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            message["content"] = "\n".join([*said, *(f"<tool_call>\n{each}\n</tool_call>" for each in functions)])
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if found and found[-1]["role"] == "user" and found[-1]["content"].startswith("<tool_response>"):
                found[-1]["content"] += f"\n{message['content']}"
                continue
        found.append(message)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = _INSTRUCTIONS.format(tools=listed)
        if found[0]["role"] in ("system", "developer"):
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{text}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found
