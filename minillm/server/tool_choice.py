"""Which tools an answer may call, and the grammar of one that must."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.errors import UsageError
from minillm.grammar.notation import WHITE_SPACE
from minillm.server.bodies import BadField, ChatBody
from minillm.server.parts import PlainReader, Reader
from minillm.server.tool_calls import FORMATS, NAMED, CallReader, ForcedReader
from minillm.text.tools import knows_tools, plain_tools

_MOST_CALLS = 16  # of one answer


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls down.

    Attributes:
        around: the text before the first call, between two calls and behind the last one.
        arguments: the key of the arguments.
        has_many: it can call several tools at once.
    """

    around: tuple[str, str, str]
    arguments: str = "arguments"
    has_many: bool = True


_HERMES = CallForm(("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"))
_LLAMA = CallForm(("", "", ""), "parameters", has_many=False)
_MISTRAL = CallForm(("[", ", ", "]"))


def call_form(template: str) -> CallForm:
    """The form that a model with this chat template knows best."""
    if knows_tools(template) and "<tool_call>" not in template:
        if "[TOOL_CALLS]" in template:
            return _MISTRAL
        if _is_llamas(template):
            return _LLAMA
    return _HERMES


def _is_llamas(template: str) -> bool:
    return '"parameters": ' in template or "<|python_tag|>" in template


def call_formats(template: str) -> frozenset[str]:
    """Return the formats in which a model with this chat template may write calls, for `CallReader`.

    Where the template shows a tag, JSON without the tag is an answer.
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
class Choice:
    """The tools of a request.

    Attributes:
        tools: that the model is shown.
        required: those of them of which one must be called; empty: none need be.
        most: calls that the answer may have.
        has_schema: the answer is JSON of a schema, so it has no calls, whatever it looks like.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    required: tuple[Mapping[str, Any], ...] = ()
    most: int = _MOST_CALLS
    has_schema: bool = False

    def reader(self, formats: Collection[str]) -> Reader:
        """Return a reader of an answer, for a model that writes calls in these formats."""
        if self.required:
            return ForcedReader()
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        return CallReader(tools, self.most, formats) if tools and not self.has_schema else PlainReader()

    def grammar(self, form: CallForm) -> dict[str, Any] | None:
        """The parameter ``grammar``; None where the answer is free."""
        if not self.required:
            return None
        before, between, behind = map(json.dumps, form.around)
        lines = []
        for number, tool in enumerate(self.required):
            head = json.dumps(f'{{"name": {json.dumps(tool["function"]["name"])}, "{form.arguments}": ')
            schema = json.dumps(_schema(tool["function"]["parameters"]))
            lines += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: %json {schema}"]
        calls = "call"
        if form.has_many and self.most > 1:
            calls += f" ({between} call){{0,{self.most - 1}}}"
        one = " | ".join(f"call_{number}" for number in range(len(self.required)))
        # The notation has no empty strings.
        ends = [*([before] if form.around[0] else ()), calls, *([behind] if form.around[2] else ())]
        return {"lark": "\n".join([f"start: {' '.join(ends)}", f"call: {one}", *lines])}


def _schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object, without properties that are not listed, unless it allows them."""
    schema = {"type": "object", **parameters, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    if not {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & parameters.keys():
        schema["additionalProperties"] = False
    return schema


def shown_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A request's tools, checked; None where it has none. Raises BadField."""
    try:
        return plain_tools(tools or []) or None
    except UsageError as error:
        raise BadField(str(error), "tools") from None


def choice_of(body: ChatBody) -> Choice:
    """The tools of a request; raises BadField, which names the field."""
    tools = tuple(shown_tools(body.tools) or ())
    wanted = body.tool_choice
    if tools and body.fork_of is not None:
        raise BadField("tools: a fork goes on with the answer itself; leave tools out", "tools")
    most = 1 if body.parallel_tool_calls is False else _MOST_CALLS
    if wanted == "none" or (not tools and wanted in (None, "auto")):
        return Choice()
    if not tools:
        raise BadField("tool_choice: there are no tools; give tools as well", "tool_choice")
    if wanted in (None, "auto"):
        return Choice(tools, most=most, has_schema=body.has_schema)
    if body.grammar() is not None:
        raise BadField("tool_choice: a call has its tool's form; leave the other form out", "tool_choice")
    if wanted == "required":
        return Choice(tools, tools, most)
    name = _named(wanted)
    named = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not named:
        raise BadField(f"tool_choice: there is no tool {name!r}; its name must be one of tools", "tool_choice")
    return Choice(tools, named, 1)


def _named(wanted: Any) -> str:
    function = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or set(wanted) | set(function or ()) > {"type", "function", "name"}:
        form = '{"type": "function", "function": {"name": "…"}}'
        raise BadField(f"tool_choice must be none, auto, required or {form}", "tool_choice")
    return name
