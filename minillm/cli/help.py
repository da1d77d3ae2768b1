"""Lay out ``--help`` and ``--help-all``.

The layout does not depend on the Python version, and the usage line is short.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

_MOST_COLUMNS = 100
_MOST_NAME = 24  # if an option with its value has more characters, its text begins on the next line

Entry = tuple[str, str]  # an option, argument or command, and its help text


def help_text(parser: argparse.ArgumentParser, essential: Sequence[str]) -> str:
    """Return the help of a command.

    Args:
        essential: the options to show, in this order, each with the first sentence of its help text. If it is empty,
            all options are shown in their groups, with their complete texts.
    """
    about = (parser.description or "").strip()
    lines = [f"usage: {parser.prog} {' '.join(_usage(parser))}", ""]
    lines += textwrap.wrap(f"{about[:1].upper()}{about[1:]}.", _columns())
    for title, note, entries in _sections(parser, essential):
        lines += ["", f"{title}:", *(textwrap.wrap(note, _columns(), initial_indent="  ", subsequent_indent="  "))]
        lines += _table(entries)
    return "\n".join(lines) + "\n"


def _columns() -> int:
    """Return the maximum number of columns of the help: the terminal's width or 80, within limits."""
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns)
    except (AttributeError, OSError, ValueError):
        columns = 80
    return min(max(columns - 2, 60), _MOST_COLUMNS)


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the words of the usage line that follow the command's name."""
    names = [str(each.metavar or each.dest.upper()) for each in _positionals(parser)]
    if any(isinstance(each, argparse._SubParsersAction) for each in _positionals(parser)):
        yield from (*names, "[OPTIONS]")
        return
    yield "[OPTIONS]"
    for name, action in zip(names, _positionals(parser), strict=True):
        several = f"{name} ..." if action.nargs in ("*", "+") else name
        yield f"[{several}]" if action.nargs in ("?", "*") else several


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [each for each in parser._actions if not each.option_strings and each.help != argparse.SUPPRESS]


def _sections(parser: argparse.ArgumentParser, essential: Sequence[str]) -> Iterator[tuple[str, str, list[Entry]]]:
    """Yield each section of the help: its title, a note below the title (may be empty), and its entries."""
    for action in _positionals(parser):
        if isinstance(action, argparse._SubParsersAction):
            yield "commands", "", [(str(each.metavar), each.help or "") for each in action._choices_actions]
    arguments = [(str(each.metavar or each.dest.upper()), each.help) for each in _positionals(parser) if each.help]
    if arguments:
        yield "arguments", "", arguments
    if essential:
        shown = _options(parser._option_string_actions[name] for name in essential)
        yield "options", "", [(name, _first_sentence(text)) for name, text in shown]
        return
    for group in parser._action_groups:
        if entries := list(_options(group._group_actions)):
            yield group.title or "options", group.description or "", entries


def _options(actions: Iterable[argparse.Action]) -> Iterator[Entry]:
    for action in actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or ())}"
            yield ", ".join(action.option_strings) + value, (action.help or "").replace("%%", "%")


def _first_sentence(text: str) -> str:
    """Return the first sentence of an option's help text, followed by the option's default."""
    default = re.search(r" \(default: [^()]*\)$", text)
    first = re.split(r"\. (?=[A-Za-z])", text.removesuffix(default[0] if default else ""))[0]
    return first + (default[0] if default else "")


def _table(entries: list[Entry]) -> Iterator[str]:
    width = max((len(name) for name, _ in entries if len(name) <= _MOST_NAME), default=0)
    for name, text in entries:
        lines = textwrap.wrap(text, _columns() - width - 4, break_on_hyphens=False) or [""]
        if len(name) > width:
            yield f"  {name}"
        else:
            yield f"  {name:{width}}  {lines.pop(0)}".rstrip()
        yield from (f"{'':{width + 4}}{line}" for line in lines)
