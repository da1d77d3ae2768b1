"""Declare parameters once, as fields of a dataclass, with default, range and help:

    temperature: float = number(1.0, 0, 1e6, help="0 is greedy")

All of these use the declaration: the check (`check_fields`), the docstring and the error for unknown keywords
(`documented`), the command-line option (`minillm.cli.options`), the key in config.toml and the line in the chat's
dialog.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from minillm.errors import UsageError, nearest

T = TypeVar("T")
_KEY = "parameter"
_BEYOND_REASON = 1 << 40  # error messages do not name upper bounds of this size or more
_LONGEST_SHOWN = 60  # characters of a wrong value that an error repeats
_UNITS = {"": 1, **{f"{unit}{kind}": base ** (power + 1) for power, unit in enumerate("KMGT")
                    for kind, base in (("iB", 1024), ("B", 1000), ("", 1024))}}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """The declaration of one parameter."""

    check: Callable[[str, Any], Any]  # (name, value) -> the normalized value; raises UsageError for a wrong value
    parse: Callable[[str], Any]  # converts text from the command line or a dialog to a value
    help: str  # without the default
    metavar: str
    choices: tuple[str, ...] = ()  # all valid values, if they can be listed
    repeats: bool = False  # the command-line option may be given several times, which gives a list
    on_command_line: bool = True  # False for parameters that only callers from Python set


def declared(cls: type) -> Iterator[tuple[str, Any, Parameter]]:
    """Yield (name, default, declaration) of every declared parameter of a dataclass, in order."""
    for each in fields(cls):
        if _KEY in each.metadata:
            yield each.name, each.default, each.metadata[_KEY]


def check_fields(params: object) -> None:
    """Validate and normalize every declared field. Call it in ``__post_init__`` of a frozen dataclass.

    Raises:
        UsageError: a value is wrong.
    """
    for name, default, check in _checks(type(params)):  # type: ignore[arg-type]
        value = getattr(params, name)
        if value is not default:  # the default is already normalized
            object.__setattr__(params, name, check(name, value))


@cache
def _checks(cls: type) -> tuple[tuple[str, Any, Callable[[str, Any], Any]], ...]:
    return tuple((name, default, parameter.check) for name, default, parameter in declared(cls))


def check_names(values: Collection[str], known: Collection[str], what: str) -> None:
    """Raise UsageError if one of ``values`` is not in ``known``. The message suggests the most similar known name.

    ``what``: what the values are, for the message.
    """
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        close = nearest(str(unknown), known)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(sorted(known))}"
        raise UsageError(f"unknown {what} {shown(unknown)}; {hint}")


def documented(cls: type[T]) -> type[T]:
    """Add the parameters to the docstring of ``cls``, and let its constructor raise UsageError for unknown keywords."""
    lines = [f"    {name} ({shown(default)}): {parameter.help}." for name, default, parameter in declared(cls)]
    title = "    Parameters, with their defaults:\n\n"
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", title + "\n".join(lines), ""])
    construct: Any = cls.__init__

    @wraps(construct)
    def checked_init(self: T, /, *values: Any, **named: Any) -> None:
        try:
            construct(self, *values, **named)
        except TypeError:
            check_names(named, [each.name for each in fields(cls) if each.init], "parameter")  # type: ignore[arg-type]
            raise

    cls.__init__ = checked_init  # type: ignore[assignment, method-assign]
    return cls


def integer(default: int | None, low: int, high: int, *, help: str, metavar: str = "N", cli: bool = True) -> Any:
    """Declare an integer from ``low`` to ``high``. A default of None makes None valid."""

    def check(name: str, value: Any) -> int | None:
        return None if value is None and default is None else check_integer(name, value, low, high)

    return custom(default, check, help=help, metavar=metavar, parse=int, cli=cli)


def number(default: float, low: float, high: float, *, help: str, above: bool = False) -> Any:
    """Declare a number from ``low`` to ``high``. With ``above``, ``low`` itself is not valid."""

    def check(name: str, value: Any) -> float:
        return check_number(name, value, low, high, above=above)

    return custom(default, check, help=help, metavar="X", parse=float)


def flag(default: bool, *, help: str) -> Any:
    """Declare a parameter that is true or false."""

    def check(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, not {shown(value)}")
        return value

    return custom(default, check, help=help, metavar="", parse=bool)


def choice(
    default: str | None, choices: tuple[str, ...], *, help: str, metavar: str = "", aliases: Mapping[str, str] = {}
) -> Any:
    """Declare a parameter that is one of ``choices``. A default of None makes None valid.

    ``aliases`` maps other spellings to choices.
    """

    def check(name: str, value: Any) -> str | None:
        if value is None and default is None:
            return None
        value = aliases.get(value, value) if isinstance(value, str) else value
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
        return str(value)

    return custom(default, check, help=help, metavar=metavar or "|".join(choices), choices=choices)


def custom(
    default: Any,
    check: Callable[[str, Any], Any],
    *,
    help: str,
    metavar: str = "TEXT",
    parse: Callable[[str], Any] = str,
    choices: tuple[str, ...] = (),
    repeats: bool = False,
    cli: bool = True,
) -> Any:
    """Declare a parameter with its own ``check``; the arguments are those of `Parameter`."""
    return field(default=default, metadata={_KEY: Parameter(check, parse, help, metavar, choices, repeats, cli)})


def parse_bytes(option: str, text: str | None, ending: str = "") -> int | None:
    """Convert ``12GiB``, ``24GB`` or ``500 MB/s`` to a number of bytes.

    ``ending`` is an optional ending such as ``/s``.

    Raises UsageError if ``text`` is not a size above 0.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?i?B?)", text.strip().removesuffix(ending), re.IGNORECASE)
    unit = next((value for name, value in _UNITS.items() if found and name.lower() == found[2].lower()), None)
    number = 0 if found is None or unit is None or not found[2] else int(float(found[1]) * unit)
    if not 0 < number < 1 << 60:
        raise UsageError(f"{option} must be a size like 12GiB{ending}, not {shown(text)}")
    return number


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` as an int. Raises UsageError unless it is an integer (also numpy's) from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} must be a whole number, not {shown(value)}")
    if not low <= int(value) <= high:
        allowed = f"at least {low}" if high >= _BEYOND_REASON and int(value) < low else f"from {low} to {high}"
        raise UsageError(f"{name} must be {allowed}, not {shown(value)}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """Return ``value`` as an int or float. Raises UsageError unless it is a number from ``low`` to ``high``.

    With ``above``, ``low`` itself is wrong.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, not {shown(value)}")
    plain = value if isinstance(value, int | float) else float(value)
    if not low <= plain <= high or (above and plain == low):  # NaN fails every comparison
        least = f"above {low:g}" if above else f"at least {low:g}"
        raise UsageError(f"{name} must be {least} and at most {high:,.12g}, not {shown(value)}")
    return plain


def shown(value: Any) -> str:
    """Return ``value`` for an error message: its repr, shortened if it is long."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or a class with a broken repr
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
