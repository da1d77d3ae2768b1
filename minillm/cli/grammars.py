"""Options of ``minillm generate`` that say what an answer must look like."""

from __future__ import annotations

import argparse
from typing import Any

from minillm.errors import UsageError
from minillm.system import expanded
from minillm.text.reading import read_bytes

_MAX_BYTES = 1 << 24  # of a file; what a grammar may have is said by the grammar


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--json-object``, ``--json-schema``, ``--regex``, ``--choice`` and ``--lark``, of which one may be given."""
    section = parser.add_argument_group("what an answer must look like, in sampling and in beam search")
    group = section.add_mutually_exclusive_group()
    group.add_argument("--json-object", action="store_true", help="an object in JSON")
    group.add_argument("--json-schema", metavar="FILE", help="JSON that the schema in FILE describes")
    group.add_argument("--regex", metavar="PATTERN", help="a text that PATTERN matches from end to end")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of several texts: say it for each")
    group.add_argument("--lark", metavar="FILE", help="a text that the Lark grammar in FILE describes")


def given_grammar(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameter ``grammar`` if one of the options was given.

    Raises UsageError where the file cannot be read or the grammar is wrong.
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
        raise UsageError(f"{name}: {file} is no text in UTF-8") from None
