"""Parse tool calls in complete pieces of text: JSON, Python and XML. `tool_calls.py` finds the pieces.

``tools`` maps the name of each tool that may be called to the schema of its parameters. A call is a pair: the tool's
name, and its arguments as the JSON text of an object. A piece of text yields calls only if all calls in it are valid
calls of known tools.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.text.safe import parse_strict_json

Tools = Mapping[str, Mapping[str, Any]]
Calls = list[tuple[str, str]]
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_NAMES = {"true": True, "false": False, "null": None}  # constants of JSON that a model writes in Python syntax
_WORDS = {"True": True, "False": False, "None": None}  # constants of Python that a model writes in XML


@dataclass
class Scanner:
    """Finds the bracket that closes a piece of JSON or Python, in text that arrives in pieces.

    ``quotes`` are the characters that begin a string.
    """

    quotes: str = '"'
    _depth: int = 0
    _quote: str = ""  # the quotation mark that began the current string; empty outside strings
    _escaped: bool = False

    def feed(self, text: str) -> int | None:
        """Scan the next piece of text.

        Return the number of characters of this piece up to and including the closing bracket. Return None if the
        closing bracket is not in this piece.
        """
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character in self.quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


def json_calls(text: str, tools: Tools, *, bare: bool = False) -> Calls:
    """Return the calls in JSON text, which is an object or a list of objects.

    Return an empty list if any object is not a valid call.

    Args:
        bare: no tag marks the text as a call, so it may also be an ordinary answer in JSON. To be a call, an object
            must then have arguments and no unknown keys.
    """
    try:
        value = parse_strict_json(text)
    except ValueError:
        return []
    return _all([_json_call(each, tools, bare) for each in (value if isinstance(value, list) else [value])])


def _all(calls: list[tuple[str, str] | None]) -> Calls:
    found = [each for each in calls if each is not None]
    return found if len(found) == len(calls) else []


def _json_call(value: Any, tools: Tools, bare: bool) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    if bare and (not value.keys() & {"arguments", "parameters"} or not value.keys() <= _CALL_KEYS):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return named_call(value.get("name"), arguments, tools)
    return _valid_call(value.get("name"), {} if arguments is None else arguments, tools)


def named_call(name: Any, arguments: str, tools: Tools) -> tuple[str, str] | None:
    """Return the call of tool ``name`` as (name, arguments), with the arguments as JSON text.

    Return None if the call is not valid. The parameter ``arguments`` is JSON text. Empty text means no arguments.
    """
    try:
        return _valid_call(name, parse_strict_json(arguments) if arguments.strip() else {}, tools)
    except ValueError:
        return None


def _valid_call(name: Any, arguments: Any, tools: Tools) -> tuple[str, str] | None:
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False)
    except RecursionError:  # nested nearly as deep as the parser allows
        return None


def python_calls(text: str, tools: Tools) -> Calls:
    """Return the calls in a list in the format of Llama 3.2 and 4: ``[get_weather(town="Bern", days=2)]``.

    Return an empty list if any element is not a valid call.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes
            tree = ast.parse(text.strip(), mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else []
        return _all([_python_call(each, tools) for each in elements])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr, tools: Tools) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {each.arg: _literal(each.value) for each in node.keywords}
    if None in arguments or len(arguments) < len(node.keywords):
        return None
    return named_call(ast.unparse(node.func), json.dumps(arguments), tools)


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal that JSON can express. Raises ValueError for anything else."""
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(elements) | ast.Tuple(elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys, values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError(f"not a literal: {type(node).__name__}")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")


def xml_call(name: str, body: str, tools: Tools) -> tuple[str, str] | None:
    """Return a call that is written in Qwen3-Coder's format, as (name, arguments), with the arguments as JSON text.

    Return None if the call is not valid. ``body`` has an element such as ``<parameter=town>Bern</parameter>`` for each
    argument. An argument is text if the tool's schema says so or does not describe the parameter. Any other argument is
    parsed as JSON if possible.
    """
    if _PARAMETER.sub("", body).strip():
        return None
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    arguments = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(body)}
    return _valid_call(name, arguments, tools)


def _value(text: str, schema: Any) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    schema = schema if isinstance(schema, Mapping) else {"type": "string"}
    types = _types(schema)
    if types == ["string"] or text in _list(schema.get("enum")):
        return text
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else parse_strict_json(word)
    except ValueError:
        return text
    kind = {dict: "object", list: "array", type(None): "null"}.get(type(value))
    return text if "string" in types and kind not in types else value


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """Return the JSON types that a schema names, also in ``anyOf`` and ``oneOf``; empty if it names none."""
    own = schema.get("type")
    found = [own] if isinstance(own, str) else _list(own)
    branches = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return [*found, *(each for branch in branches if isinstance(branch, Mapping) for each in _types(branch))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
