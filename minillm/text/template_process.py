"""Renders chat templates, which are programs of strangers, in a process that can be killed.

Run as a script, it takes one JSON object a line (template, variables, limits) and answers with one; it imports nothing
of minillm. Jinja's sandbox keeps a template from reaching anything outside; it bounds neither time nor memory, so the
address space is limited here and the parent kills what takes too long. The globals and filters are those that
transformers gives to templates.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MEMORY_BYTES = 512 << 20


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


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sandbox = environment()
    compiled: dict[str, jinja2.Template] = {}
    for line in sys.stdin:
        request = json.loads(line)
        # The parent kills a render that takes too long; where the parent is gone, this signal does.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        try:
            source = request["template"]
            if source not in compiled:
                compiled[source] = sandbox.from_string(source)
            answer = {"text": render(compiled[source], request["variables"], request["limit"])}
        except MemoryError:
            answer = {"broken": "it takes too much memory"}
        except Refusal as error:
            answer = {"refused": str(error)}
        except Exception as error:
            answer = {"broken": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
