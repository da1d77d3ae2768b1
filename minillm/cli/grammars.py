"""Options of ``minillm generate`` for structured output."""

from __future__ import annotations

import argparse
from typing import Any

from minillm.errors import UsageError
from minillm.system import expanded
from minillm.text.reading import read_bytes

_MAX_BYTES = 1 << 24  # size limit for a file with a grammar; `Grammar` checks further limits


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for structured output. At most one of them can be given."""
    section = parser.add_argument_group("structured output, for sampling and beam search")
    group = section.add_mutually_exclusive_group()
    group.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    group.add_argument("--json-schema", metavar="FILE", help="answer with JSON that matches the schema in FILE")
    group.add_argument("--regex", metavar="PATTERN", help="answer with text that matches PATTERN as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeatable")
    group.add_argument("--lark", metavar="FILE", help="answer with text that matches the Lark grammar in FILE")


def given_grammar(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameter for the given option as ``{"grammar": …}``, or an empty dictionary without one.

    Raises UsageError if the option's file cannot be read or the grammar is invalid.
    """
    from minillm.grammar.grammar import Grammar

    if arguments.json_object:
        return {"grammar": Grammar.json()}
    if arguments.json_schema is not None:
        return {"grammar": Grammar.json(_text("--json-schema", arguments.json_schema))}
    if arguments.regex is not None:
        return {"grammar": Grammar.regex(arguments.regex)}
    if arguments.choice is not None:
        return {"grammar": Grammar.choice(arguments.choice)}
    if arguments.lark is not None:
        return {"grammar": Grammar.lark(_text("--lark", arguments.lark))}
    return {}


def _text(name: str, file: str) -> str:
    path = expanded(file, name)
    try:
        return read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name}: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name}: {file} is not UTF-8 text") from None
