"""The tools that an answer may call, and the grammar of an answer that must call one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minillm.errors import UsageError
from minillm.server.bodies import BadField, ChatBody
from minillm.server.parsers.parts import PlainReader, Reader
from minillm.server.parsers.tool_calls import FORMATS, NAMED, CallReader, CallsOrTextReader, ForcedReader
from minillm.text.reasoning import OPEN
from minillm.text.tools import knows_tools, plain_calls, plain_tools

_MOST_CALLS = 16  # maximum number of calls in an answer


@dataclass(frozen=True)
class CallForm:
    """The format in which a model writes tool calls.

    Attributes:
        delimiters: the texts before the first call, between two calls, and after the last call.
        arguments: the key of a call's arguments in JSON.
        has_many: one answer can contain several calls.
        tag: the text that begins each call. If it is empty, the whole answer is one call or a list of calls.
    """

    delimiters: tuple[str, str, str]
    arguments: str = "arguments"
    has_many: bool = True
    tag: str = ""

    @property
    def formats(self) -> frozenset[str]:
        """Return the formats for a `CallReader` that should find only calls in this form."""
        return frozenset((self.tag or "json",))

    def head(self, name: str) -> list[str]:
        """Return the text before the arguments of a call of the tool ``name``, divided into JSON's symbols.

        As one terminal of a grammar, the text would exclude all other objects: llguidance takes the longest terminal.
        """
        return ["{", '"name"', ":", " ", json.dumps(name), ",", " ", f'"{self.arguments}"', ":", " "]


_ANSWER = "the answer"  # no tool has this name, because names have no spaces
_ANY = {"type": "object"}
_UNTAGGED = rf"[{{\[]|<\|python_tag\|>|{OPEN}"  # beginnings of an answer after which a reader may find calls
_HERMES = CallForm(("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"), tag="<tool_call>")
_LLAMA = CallForm(("", "", ""), "parameters", has_many=False)
_MISTRAL = CallForm(("[", ", ", "]"))


def call_form(template: str) -> CallForm:
    """Return the format of calls that a grammar should use for a model with this chat template."""
    if knows_tools(template) and "<tool_call>" not in template:
        if "[TOOL_CALLS]" in template:
            return _MISTRAL
        if _is_llamas(template):
            return _LLAMA
    return _HERMES


def _is_llamas(template: str) -> bool:
    return '"parameters": ' in template or "<|python_tag|>" in template


def call_formats(template: str) -> frozenset[str]:
    """Return the formats in which a model with this chat template may write calls, for a `CallReader`.

    If the template has a tag for calls, JSON without the tag does not count as a call.
    """
    if knows_tools(template):
        if "<tool_call>" in template or "<function=" in template:
            return FORMATS & {"<tool_call>", "<function=", "```"}
        if "[TOOL_CALLS]" in template:
            return FORMATS & {"[TOOL_CALLS]", "```", "json"} | {NAMED}
        if _is_llamas(template):
            return FORMATS & {"<function=", "```", "json", "python"}
    return FORMATS


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request, and whether the answer must call them.

    Attributes:
        tools: the tools shown to the model.
        allowed: the tools that the answer may call. If this is empty, it may call all ``tools``.
        required: the answer must call a tool.
        most: maximum number of calls in the answer.
        strict: names of tools. If the answer calls one of them, the arguments must follow the tool's schema.
        answer: the JSON schema of an answer that does not call a tool. None: such an answer is free text.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    allowed: tuple[Mapping[str, Any], ...] = ()
    required: bool = False
    most: int = _MOST_CALLS
    strict: frozenset[str] = frozenset()
    answer: Any = None

    def reader(self, form: CallForm, formats: Collection[str]) -> Reader:
        """Return a reader that finds the calls in an answer.

        If the answer follows `grammar`, the reader finds only calls in the format ``form``, which the grammar uses.
        Otherwise it finds calls in all ``formats``, the formats in which the model may write calls.
        """
        if self.required:
            return ForcedReader()
        tools = {each["name"]: each["parameters"] for each in self._functions}
        if not tools:
            return PlainReader()
        if self.answer is not None:
            return CallsOrTextReader(tuple(form.delimiters[0] + "".join(form.head(name)) for name in tools))
        return CallReader(tools, self.most, form.formats if self.strict else formats)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schemas that arguments must follow, by tool name, and last the `answer` if there is one.

        Empty if the answer needs no grammar for calls.
        """
        if not (self.required or self.strict or self.answer is not None):
            return {}
        found = {
            each["name"]: _schema(each["parameters"]) if self.required or each["name"] in self.strict else _ANY
            for each in self._functions
        }
        return found if self.answer is None else {**found, _ANSWER: self.answer}

    def grammar(self, form: CallForm) -> dict[str, Any]:
        """Return the parameter ``grammar`` for the answer. It enforces required calls, and the format of all calls.

        The caller must add the rules ``arguments_0``, ``arguments_1`` and so on, one for each of the `schemas`.
        """
        names = [each["name"] for each in self._functions]
        if self.answer is not None:
            lines = [f"start: {_calls(form, self.most)} | arguments_{len(names)}"]
        else:
            lines = [f"start: {_calls(form, self.most)}"] if self.required else _answer(form, self.most)
        lines.append(f"call: {' | '.join(f'call_{number}' for number in range(len(names)))}")
        for number, name in enumerate(names):
            lines.append(f'call_{number}: {" ".join(map(json.dumps, form.head(name)))} arguments_{number} "}}"')
        return {"lark": "\n".join(lines)}

    @property
    def _functions(self) -> list[Mapping[str, Any]]:
        return [tool["function"] for tool in self.allowed or self.tools]


def _calls(form: CallForm, most: int) -> str:
    """Return the Lark expression of an answer that consists of calls."""
    before, between, after = map(json.dumps, form.delimiters)
    calls = "call"
    if form.has_many and most > 1:
        calls += f" ({between} call){{0,{most - 1}}}"
    # Lark has no empty strings.
    return " ".join([*([before] if form.delimiters[0] else ()), calls, *([after] if form.delimiters[2] else ())])


def _answer(form: CallForm, most: int) -> list[str]:
    """Return the Lark rules of an answer that may contain calls.

    A `CallReader` limited to `CallForm.formats` finds exactly these calls in the answer.
    """
    if form.tag:  # text in which each tag begins a call
        before, after = json.dumps(form.delimiters[0].removeprefix(form.tag)), json.dumps(form.delimiters[2])
        text = f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{form.tag}(.|\\n)*/"
        return [f"start: (words {before} call {after}){{0,{most}}} TEXT?", f"words[lazy]: /(.|\\n)*{form.tag}/", text]
    return [f"start: {_calls(form, most)} | TEXT?", f"TEXT: /(.|\\n)+/ & ~/\\s*({_UNTAGGED})(.|\\n)*/"]


def _schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments.

    The schema forbids properties that the tool does not list, unless the tool has a keyword that may allow them, such
    as ``patternProperties`` or ``anyOf``.
    """
    schema = {"type": "object", **parameters}
    if not {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & parameters.keys():
        schema["additionalProperties"] = False
    return schema


def shown_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check a request's tools and return them; None if there are none. Raises BadField."""
    try:
        return plain_tools(tools or []) or None
    except UsageError as error:
        raise BadField(str(error), "tools") from None


def _answer_schema(body: ChatBody) -> Any:
    """Return the JSON schema that the answer must follow. Return None without such a schema."""
    for form in body.grammar().values():
        if "json_object" in form:
            return _ANY
        schema = form.get("json_schema")
        with suppress(ValueError, RecursionError):  # the engine process reports an invalid schema
            return json.loads(schema) if isinstance(schema, str) else schema
    return None


def earlier_call(call_id: str, name: str, arguments: Any, where: str, key: str, field: str) -> dict[str, Any]:
    """Return a tool call of an earlier answer in the format of a chat request. Raises BadField if it is not valid.

    Args:
        where: the place of the call in the request.
        key: the name of the arguments there.
        field: the field of the request that contains the call.
    """
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    try:
        return plain_calls([call])[0]
    except UsageError as error:
        text = str(error).removeprefix("tool_calls[0].function.")
        text = f"{key}{text.removeprefix('arguments')}" if text.startswith("arguments") else text
        raise BadField(f"{where}.{text}", field) from None


def choice_of(body: ChatBody) -> ToolChoice:
    """Return the tools of a request, and whether the answer must call them.

    Raises BadField if fields of the request contradict each other.
    """
    tools = tuple(shown_tools(body.tools) or ())
    wanted = body.tool_choice
    if tools and body.fork_of is not None:
        raise BadField("tools: a fork continues the answer itself; leave tools out", "tools")
    if wanted == "none" or (not tools and wanted in (None, "auto")):
        return ToolChoice()
    if not tools:
        raise BadField("tool_choice: there are no tools; give tools as well", "tool_choice")
    most = 1 if body.parallel_tool_calls is False else _MOST_CALLS
    if wanted not in (None, "auto") and body.grammar().keys() - {"response_format"}:
        raise BadField("tool_choice: a tool call has its own grammar; leave the other grammar out", "tool_choice")
    mode, chosen = _mode(wanted)
    names = {_named(each) for each in chosen}
    for name in names - {tool["function"]["name"] for tool in tools}:
        raise BadField(f"tool_choice: there is no tool {name!r}; use a name from tools", "tool_choice")
    allowed = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if mode == "required":
        return ToolChoice(tools, allowed, required=True, most=1 if chosen == [wanted] else most)
    strict = frozenset(names or filter(None, map(_strict_name, body.tools or ())))
    answer = _answer_schema(body)
    if strict and body.grammar() and answer is None:
        raise BadField("tools: a strict tool has its own grammar; leave the other grammar or strict out", "tools")
    return ToolChoice(tools, allowed, most=most, strict=strict, answer=answer)


def _mode(wanted: Any) -> tuple[str, list[Any]]:
    """Return "auto" or "required" for a ``tool_choice``, and the tools that it names. It names none to allow all."""
    match wanted:
        case None | "auto" | "required":
            return wanted or "auto", []
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as named},
        }:
            return mode, named
    return "required", [wanted]


def _strict_name(tool: dict[str, Any]) -> str:
    """Return the name of a checked tool if it is strict, else an empty text."""
    return str(tool["function"]["name"]) if tool["function"].get("strict") else ""


def _named(wanted: Any) -> str:
    function = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or set(wanted) | set(function or ()) > {"type", "function", "name"}:
        form = '{"type": "function", "function": {"name": "…"}}'
        raise BadField(f"tool_choice must be none, auto, required, {form} or allowed_tools", "tool_choice")
    return name
