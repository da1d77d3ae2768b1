"""Grammars for structured output, validated when they are created."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.checks import shown
from minillm.errors import UsageError
from minillm.grammar.trial import check_compiles
from minillm.text.safe import clean_line, parse_json

# Limits that keep an untrusted grammar from exhausting the machine, far above any practical grammar.
MAX_BYTES = 1 << 18  # maximum size of a schema, of a Lark grammar, or of all choices together
MAX_REGEX_BYTES = 1 << 14
MAX_DEPTH = 100  # maximum levels of nested objects and arrays in a schema
MAX_CHOICES = 4096

# The kinds, with their names in messages.
_KINDS = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "list of choices",
    "lark": "Lark grammar",
}


@dataclass(frozen=True)
class Grammar:
    """A constraint on the text of an answer, for the parameter ``grammar``. Create it with one of the class methods.

    The whole text of the answer matches the grammar, unless the answer was cut off by ``max_tokens``, by a stop string,
    or by an abort.

    Attributes:
        kind: "json_object", "json_schema", "regex", "choice" or "lark".
        source: the schema or the list of choices as JSON, the regular expression, or the Lark grammar. Empty for
            "json_object".

    Raises:
        UsageError: the grammar is too large, is nested too deeply, allows no text, takes too long to compile, or is
            invalid or not supported.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            raise UsageError(f"grammar must be one of {', '.join(_KINDS)}, not {shown(self.kind)}")
        if not isinstance(self.source, str):
            raise UsageError(f"grammar: a {_KINDS[self.kind]} is a text, not {shown(self.source)}")
        _check_size(self.kind, self.source)
        if self.kind == "json_schema":
            _check_schema(_value_of(self.kind, self.source))
        elif self.kind == "choice":
            _check_choices(_value_of(self.kind, self.source))
        fault = check_compiles(self.kind, self.source)
        if fault is not None:
            raise UsageError(f"grammar: the {_KINDS[self.kind]} {fault}")

    @classmethod
    def json(cls, schema: Any = None) -> Grammar:
        """Return a grammar of the JSON texts that ``schema`` accepts. Without a schema, it accepts any JSON object.

        Properties are generated in the schema's order. A schema allows properties that it does not mention, unless it
        sets ``"additionalProperties": False``. The formats of the JSON Schema standard are enforced. Other formats, and
        the keyword ``x-guidance``, are ignored. Unsupported keywords (such as ``maxContains``, or ``uniqueItems`` for
        items that are not an enum) are rejected.

        Args:
            schema: a JSON schema, as a mapping, as JSON text, or as a pydantic class.
        """
        if schema is None:
            return cls("json_object")
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return cls("json_schema", _json_text("json_schema", schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return a grammar of the texts that a regular expression matches from end to end.

        The syntax is that of Rust's crate ``regex``. It is like Python's syntax without look-around and backreferences.
        ``\\d`` and ``\\w`` match digits and letters of all scripts; ``[0-9]`` matches only ASCII digits.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Grammar:
        """Return a grammar that makes the answer exactly one of the texts ``choices``."""
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            raise UsageError(f"grammar: choices must be a list of texts, not {shown(choices)}")
        return cls("choice", _json_text("choice", list(choices)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar, given its text in the variant of Lark's syntax that the library llguidance accepts."""
        return cls("lark", text)


def grammar_of(name: str, value: Any) -> Grammar | None:
    """Return the grammar that a parameter's ``value`` stands for. Return None for None.

    Args:
        name: the parameter's name, for error messages.
        value: a `Grammar`, a mapping such as ``{"regex": "…"}``, or None.

    Raises UsageError if ``value`` is anything else, or if the grammar is invalid.
    """
    if value is None or isinstance(value, Grammar):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise UsageError(f'{name} must be a Grammar, or one of its kinds such as {{"regex": "…"}}, not {shown(value)}')
    [(kind, source)] = value.items()
    if kind == "json_object":
        if source is not True:
            raise UsageError(f"{name}: json_object must be true, not {shown(source)}")
        return Grammar.json()
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json_schema": Grammar.json,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "lark": Grammar.lark,
    }
    if kind not in makers:
        raise UsageError(f"{name} must be one of {', '.join(_KINDS)}, not {shown(kind)}")
    if source is None:
        raise UsageError(f"{name}: {kind} must not be null")
    return makers[kind](source)


def _check_size(kind: str, source: str) -> None:
    most = MAX_REGEX_BYTES if kind == "regex" else MAX_BYTES
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise UsageError(f"grammar: the {_KINDS[kind]} holds a lone surrogate, which is not text") from None
    if size > most:
        raise UsageError(
            f"grammar: the {_KINDS[kind]} has {size:,} bytes, but at most {most:,} are allowed; make it smaller"
        )
    if kind != "json_object" and not source.strip():
        raise UsageError(f"grammar: the {_KINDS[kind]} is empty")


def _value_of(kind: str, source: str) -> Any:
    try:
        return parse_json(source)
    except ValueError as error:
        raise UsageError(f"grammar: the {_KINDS[kind]} is not JSON: {clean_line(str(error))}") from None


def _json_text(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"grammar: the {_KINDS[kind]} cannot be written as JSON: {clean_line(str(error))}") from None


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"grammar: a JSON schema is an object, not {shown(schema)}")
    level, depth = [schema], 0
    while level:
        depth += 1
        inner = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [value for values in inner if isinstance(values, list) for value in values]
        level = [value for value in level if isinstance(value, dict | list)]
        if depth > MAX_DEPTH:
            raise UsageError(f"grammar: the JSON schema is nested deeper than {MAX_DEPTH} levels; make it flatter")


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise UsageError(f"grammar: choices must be a list of texts, not {shown(choices)}")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise UsageError(f"grammar: there must be from 1 to {MAX_CHOICES} choices, not {len(choices):,}")
    if not all(choices):
        raise UsageError("grammar: a choice must not be empty")
