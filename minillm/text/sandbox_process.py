"""The process of a `minillm.text.sandbox.Sandbox`: reads one JSON request per line, and answers each with a JSON line.

This file runs as a script with two arguments: the kind of program, and the maximum address space in bytes. It imports
nothing of minillm. It limits its own address space, and the parent kills it if it takes too long. Jinja's own sandbox
keeps a chat template from accessing files and Python internals, but limits neither time nor memory.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_MOST_TOKENS = 64  # maximum tokens per character of a text
_tokenizers: list[Any] = []  # the loaded tokenizer, if there is one


class GenerationTag(jinja2.ext.Extension):
    """The Jinja tag ``{% generation %}…{% endgeneration %}``, which marks assistant text for training.

    It only renders its body.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Refusal(Exception):
    """Raised if the template rejects the conversation, by calling ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def syntax_error(source: str) -> str | None:
    """Return the syntax error of a template, or None. The template is parsed, but does not run."""
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (RecursionError, ValueError):
        return "an expression is nested too deeply, or a number is too long"
    return None


def _environment() -> jinja2.Environment:
    """Return an environment with the tags that transformers provides."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )


@cache
def _template(source: str) -> jinja2.Template:
    """Compile the template, with the globals and filters that transformers provides."""
    sandbox = _environment()
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(source)


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Render the request's ``template`` with its ``variables``.

    Return the result under the key ``text``. If the template rejects the conversation, return the reason under the key
    ``refused``. Raises ValueError if the text is longer than the request's ``limit``.
    """
    parts, length = [], 0
    try:
        for part in _template(request["template"]).generate(**request["variables"]):
            parts.append(part)
            length += len(part)
            if length > request["limit"]:
                raise ValueError(f"it renders more than {request['limit']} characters")
    except Refusal as error:
        return {"refused": str(error)}
    return {"text": "".join(parts)}


def encode(request: dict[str, Any]) -> dict[str, Any]:
    """Load the request's ``tokenizer``, the content of a tokenizer.json.

    Without this key, encode the request's ``text``.

    The ids of a text are returned under the key ``ids``. ``special`` says whether to add special tokens.
    """
    if "tokenizer" in request:
        import tokenizers  # not at the top: templates do not need it

        _tokenizers[:] = [tokenizers.Tokenizer.from_str(request["tokenizer"])]
        return {}
    text = request["text"]
    ids = _tokenizers[0].encode(text, add_special_tokens=request["special"]).ids
    if len(ids) > _MOST_TOKENS * (len(text) + _MOST_TOKENS):
        raise ValueError(f"it makes {len(ids)} tokens of {len(text)} characters")
    return {"ids": ids}


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    answer, memory = {"chat template": render, "tokenizer": encode}[sys.argv[1]], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        request = json.loads(line)
        # If the parent is gone, this signal ends a request that takes too long.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        try:
            result = answer(request)
        except MemoryError:
            result = {"broken": "it takes too much memory"}
        except BaseException as error:  # a library's panic is not even an Exception
            result = {"broken": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
