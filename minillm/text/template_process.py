"""Renders chat templates, which are programs of strangers, in a `minillm.text.sandbox`.

Jinja's own sandbox keeps a template from reaching anything outside; it bounds neither time nor memory. The globals and
filters are those that transformers gives to templates.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words in training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Refusal(Exception):
    """The template does not take this conversation: it called ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox in which templates run."""
    result = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise_exception
    result.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return result


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    """The rendered text; ValueError where it grows beyond ``limit`` characters."""
    parts, length = [], 0
    for part in template.generate(**variables):
        parts.append(part)
        length += len(part)
        if length > limit:
            raise ValueError(f"it renders more than {limit} characters")
    return "".join(parts)


_sandbox = environment()
_compiled: dict[str, jinja2.Template] = {}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The ``text`` that ``template`` makes of ``variables``, or why it has ``refused`` them."""
    source = request["template"]
    if source not in _compiled:
        _compiled[source] = _sandbox.from_string(source)
    try:
        return {"text": render(_compiled[source], request["variables"], request["limit"])}
    except Refusal as error:
        return {"refused": str(error)}
