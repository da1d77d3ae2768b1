"""argparse as this command needs it: errors in one line, and options that are added when they are needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

from minillm.errors import UsageError, nearest


class Parser(argparse.ArgumentParser):
    """A parser of a command or of its subcommand.

    ``fill`` adds its options the first time that it parses: `bench` alone has more than all others together, and adding
    them takes longer than everything else that ``--help`` does.
    """

    fill: Callable[[Parser], None] | None = None

    def filled(self) -> Self:
        """This parser, with its options."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        return super(Parser, self.filled()).parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; the message names the nearest option or choice."""
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0]
            if unknown.startswith("-"):
                message = f"unknown option {unknown!r}" + _meant(unknown.split("=")[0], _option_strings(self))
            else:
                message = f"one argument too many: {unknown!r}; put quotation marks around a text of several words"
        elif "invalid choice: " in message:
            choice = message.split("invalid choice: ")[1].split(" (")[0].strip("'\"")
            choices = [str(c) for action in self._actions for c in action.choices or ()]
            message = f"unknown {message.split(':')[0].removeprefix('argument ')} {choice!r}" + (
                _meant(choice, choices) or f"; known: {', '.join(choices)}"
            )
        raise UsageError(f"{message}; see {self.prog} --help")


def _option_strings(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of the subcommands that were given."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*map(_option_strings, action.choices.values()))
    return found


def _meant(word: str, words: Iterable[str]) -> str:
    close = nearest(word, sorted(words))
    return f", did you mean {close}?" if close else ""
