"""The parser, and options that are made from the declarations of parameters (`minillm.checks`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn, Self

from minillm.errors import UsageError, nearest

MODEL_NAMES = "name from `minillm models`, repository of the hub (org/name), model directory, or .gguf file"
option = partial(methodcaller, "add_argument")  # makes a function that adds this option to a parser
add_model_option = option("-m", "--model", metavar="NAME", help=MODEL_NAMES)
_SHORT = {"n": "-n", "temperature": "-t"}
_ALIKE = 0.7  # of a command and a mistyped one: commands of other programs (list, run, create, stop) are less like ours
_NO = "enable_"  # a switch that is on by default, enable_x, becomes --no-x


class Parser(argparse.ArgumentParser):
    """A parser of a command or of its subcommand, whose errors are one line.

    The functions in ``fill`` add its options the first time that it parses: `bench` alone has more than all others
    together, and adding them takes longer than all other work of ``--help``.
    """

    fill: Sequence[Callable[[Parser], object]] = ()

    def filled(self) -> Self:
        """This parser, with its options."""
        functions, self.fill = self.fill, ()
        for add_options in functions:
            add_options(self)
        return self

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        return super(Parser, self.filled()).parse_known_args(*args, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse drops errors: help on a full disk would end well.
        (file or sys.stderr).write(message)

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
                _meant(choice, choices, _ALIKE) or f"; known: {', '.join(choices)}"
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


def _meant(word: str, words: Iterable[str], alike: float = 0.5) -> str:
    close = nearest(word, sorted(words), alike)
    return f", did you mean {close}?" if close else ""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, and an option for each of EngineConfig's."""
    from minillm.config import EngineConfig  # here and below not at the top: ``minillm --help`` takes half as long

    group = parser.add_argument_group("model and memory")
    add_model_option(group)
    add_declared(group, EngineConfig)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each parameter of sampling and of beam search."""
    from minillm.checks import declared
    from minillm.params import BeamSearchParams, SamplingParams

    says = "in brackets: the value where neither config.toml nor the model gives one; temperature is 0.7 and top_p 0.95"
    says += " in `generate` and the chat where the model says nothing about sampling"
    add_declared(parser.add_argument_group("sampling", says), SamplingParams)
    shared = {name for name, _, _ in declared(SamplingParams)}
    add_declared(parser.add_argument_group("beam search, instead of sampling"), BeamSearchParams, shared)


def add_declared(group: argparse._ActionsContainer, cls: type, skip: Collection[str] = ()) -> None:
    """Add an option for each declared parameter of a dataclass."""
    from minillm.checks import declared

    for name, default, parameter in declared(cls):
        if name in skip or not parameter.on_command_line:
            continue
        words = [_SHORT[name]] if name in _SHORT else []
        options: dict[str, Any] = {"dest": name, "default": None}
        if isinstance(default, bool) and parameter.parse is bool:
            options["action"] = "store_false" if default else "store_true"
            words.append(f"--{('no-' + name.removeprefix(_NO) if default else name).replace('_', '-')}")
            options["help"] = f"do not {parameter.help}" if default else parameter.help
        else:
            words.append(f"--{name.replace('_', '-')}")
            number = f"{default:g}" if isinstance(default, float) else default
            text = parameter.help + ("" if default in (None, ()) else f" ({number})")
            options |= {"type": parameter.parse, "metavar": parameter.metavar, "help": text}
            if parameter.repeats:
                options["action"] = "append"
        options["help"] = options["help"].replace("%", "%%")
        group.add_argument(*words, **options)


def given(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The declared parameters of a dataclass that were given on the command line."""
    from minillm.checks import declared

    return {name: value for name, _, _ in declared(cls) if (value := getattr(arguments, name, None)) is not None}
