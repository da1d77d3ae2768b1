"""Parse the command line, with options made from declared parameters (`minillm.checks`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn, Self

from minillm.cli.help import help_text
from minillm.errors import UsageError, nearest

MODEL_NAMES = "name in `minillm models`, Hugging Face repository (org/name), model directory, or .gguf file"
option = partial(methodcaller, "add_argument")  # returns a function that adds this option to a parser
add_model_option = option("-m", "--model", metavar="NAME", help=MODEL_NAMES)
_SHORT = {"n": "-n", "temperature": "-t"}
# Suggest one of our commands if a mistyped one is at least this similar. Commands of other programs, such as create,
# stop and ps, are less similar.
_ALIKE = 0.7
_DESTRUCTIVE = {"rm"}  # never suggested for a mistyped command
_NO = "enable_"  # prefix of a parameter that is on by default: enable_x becomes the option --no-x


class Parser(argparse.ArgumentParser):
    """An argument parser of a command or a subcommand. Errors are one line.

    Attributes:
        fill: functions that add the parser's options when the options are first needed. Adding all options of all
            commands would take longer than everything else that ``--help`` does. Most options belong to `bench`.
        essential: the options that ``--help`` shows, most important first; empty: all. ``--help-all`` shows all.
    """

    fill: Sequence[Callable[[Parser], object]] = ()
    essential: Sequence[str] = ()
    _is_filled = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"add_help": False, "allow_abbrev": False, **options})

    def filled(self) -> Self:
        """Add the options of `fill` if this has not been done, and return this parser."""
        if not self._is_filled:
            self._is_filled = True
            for add_options in self.fill:
                add_options(self)
            which = "the most used options" if self.essential else "this help"
            self.add_argument("-h", "--help", action="help", help=f"show {which} and exit")
            text = "show all options and exit" if self.essential else argparse.SUPPRESS
            self.add_argument("--help-all", action=_HelpAll, help=text)
        return self

    def format_help(self) -> str:
        essential = self.filled().essential
        return help_text(self, [*essential, "--help", "--help-all"] if essential else ())

    def parse_args(self, *args: Any, **options: Any) -> Any:
        """Parse all arguments. An unknown argument is reported by the parser of the innermost subcommand."""
        found, rest = self.parse_known_args(*args, **options)
        parser: Parser = self
        while commands := next(
            (each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None
        ):
            if (name := getattr(found, commands.dest, None)) is None:
                break
            parser = commands.choices[name]
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments. An argument that takes several values also takes the values that follow an option.

        argparse itself ends such an argument at the first option: in ``generate "a" -t 0 "b"`` it rejects "b". Values
        may begin with a dash: numbers, texts with a space, and all words after ``--``.
        """
        last = next((each for each in self.filled()._actions if each.nargs == "*"), None)
        if last is None:
            return super().parse_known_args(*args, **options)
        arguments, *others = args
        end = arguments.index("--") if "--" in arguments else len(arguments)
        found, rest = super().parse_known_args(arguments[:end], *others, **options)
        unknown = [word for word in rest if self._parse_optional(word) is not None]
        values = [word for word in rest if self._parse_optional(word) is None]
        setattr(found, last.dest, [*getattr(found, last.dest), *values, *arguments[end + 1 :]])
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors: help on a full disk would succeed.
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError. The message suggests the most similar option or choice."""
        if message.startswith("unrecognized arguments: "):
            unknown = next(iter(message.removeprefix("unrecognized arguments: ").split()), "")
            if unknown.startswith("-"):
                near = _closest_option(unknown.split("=")[0], self._option_string_actions)
                message = f"unknown option {unknown!r}{near}"
            else:
                message = f"one argument too many: {unknown!r}; put quotation marks around a text of several words"
        elif "invalid choice: " in message:
            choice = message.split("invalid choice: ")[1].split(" (")[0].strip("'\"")
            choices = [str(c) for action in self._actions for c in action.choices or ()]
            near = _closest_option(choice, set(choices) - _DESTRUCTIVE, _ALIKE)
            what = message.split(":")[0].removeprefix("argument ")
            message = f"unknown {what} {choice!r}{near or '; known: ' + ', '.join(choices)}"
        raise UsageError(f"{message}; see {self.prog} --help")


class _HelpAll(argparse.Action):
    """Print the help of all options, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser._print_message(help_text(parser, ()), sys.stdout)
        parser.exit()


def _closest_option(word: str, words: Iterable[str], alike: float = 0.5) -> str:
    close = nearest(word, sorted(words), alike)
    return f", did you mean {close}?" if close else ""


def add_model_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any] = {}) -> None:
    """Add ``--model``, and an option for each field of EngineConfig. ``defaults`` are the command's own defaults."""
    from minillm.config import EngineConfig  # here and below not at the top: ``minillm --help`` takes half as long

    group = parser.add_argument_group("model and memory")
    add_model_option(group)
    add_declared(group, EngineConfig, (), defaults)


def add_sampling_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add an option for each parameter of sampling and of beam search. ``defaults`` are the command's own defaults."""
    from minillm.checks import declared
    from minillm.params import BeamSearchParams, SamplingParams

    note = "Defaults apply if neither config.toml nor the model sets a value."
    add_declared(parser.add_argument_group("sampling", note), SamplingParams, (), defaults)
    shared = {name for name, _, _ in declared(SamplingParams)}
    note = f"Any of these options turns it on, with {BeamSearchParams.beam_width} beams unless --beam-width is given."
    group = parser.add_argument_group("beam search, instead of sampling", note)
    add_declared(group, BeamSearchParams, shared, {"beam_width": "no beam search"})


def add_declared(
    group: argparse._ActionsContainer, cls: type, skip: Collection[str] = (), defaults: Mapping[str, Any] = {}
) -> None:
    """Add an option for each parameter that the dataclass ``cls`` declares (see `minillm.checks`).

    Args:
        skip: parameters that get no option.
        defaults: default values to show in the help, instead of the dataclass's defaults.
    """
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
            number = f"{default:g}" if isinstance(default, float) else str(default).lower()
            text = parameter.help + ("" if default in (None, ()) else f" (default: {defaults.get(name, number)})")
            options |= {"type": parameter.parse, "metavar": parameter.metavar, "help": text}
            if parameter.repeats:
                options["action"] = "append"
        options["help"] = options["help"].replace("%", "%%")
        action: Any = group.add_argument(*words, **options)
        action.values = parameter.choices  # for completions only: with `choices`, argparse would print its own errors


def given(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the values that the command line sets for the declared parameters of the dataclass ``cls``."""
    from minillm.checks import declared

    return {name: value for name, _, _ in declared(cls) if (value := getattr(arguments, name, None)) is not None}
