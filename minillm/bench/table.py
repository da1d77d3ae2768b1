"""Results of a measurement, as tables for people or as plain data for JSON.

A result is a dataclass, or several of one class, which may come one by one, or a dictionary of such parts. Its fields
say with `shown`, and its properties with `computed`, what people see of them; JSON has all fields and no properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """How one figure of a result is shown.

    Attributes:
        spec: its format. A figure without one is text, and stands flush left in a table.
        scale: what a number is multiplied by first: 1e3 shows seconds as milliseconds.
        width: the least in a table, in characters; the title may need more.
    """

    title: str
    spec: str = ""
    scale: float | None = None
    width: int = 9

    def text(self, value: Any) -> str:
        """``value`` formatted; the parts of a tuple or list one by one; nothing for None."""
        if isinstance(value, tuple | list):
            return " / ".join(map(self.text, value))
        scaled = value if self.scale is None or value is None else value * self.scale
        return "" if scaled is None else format(scaled, self.spec)

    def cell(self, text: str) -> str:
        """``text`` as wide as the column."""
        width = max(len(self.title), self.width)
        return text.rjust(width) if self.spec else text.ljust(width)


def shown(title: str, spec: str = "", scale: float | None = None, *, width: int = 9, default: Any = MISSING) -> Any:
    """Declare a field that people see, as a `Column`."""
    return field(default=default, metadata={"column": Column(title, spec, scale, width)})


def computed(title: str, spec: str) -> Callable[[Callable[[Any], Any]], property]:
    """Make a method a property that people see, as a `Column`."""

    def decorate(method: Callable[[Any], Any]) -> property:
        method.column = Column(title, spec)  # type: ignore[attr-defined]
        return property(method)

    return decorate


def figures(result: Any) -> Iterator[tuple[Column, str]]:
    """Every column of a result, with its text."""
    for each in fields(result):
        if "column" in each.metadata:
            column = each.metadata["column"]
            yield column, column.text(getattr(result, each.name))
    for name, member in vars(type(result)).items():
        column = getattr(getattr(member, "fget", None), "column", None)
        if column is not None:
            yield column, column.text(getattr(result, name))


def show(result: Any, heading: str = "") -> None:
    """Print a result: a dataclass as lines, several as the rows of a table as they come, a dictionary part by part."""
    if heading:
        print(heading, flush=True)
    if isinstance(result, Mapping):
        for name, part in result.items():
            show(part, name)
    elif is_dataclass(result):
        for column, text in figures(result):
            if text:
                print(f"  {column.title:32}{text}", flush=True)
        for value in vars(result).values():
            if isinstance(value, list) and value and is_dataclass(value[0]):
                show(value)
    else:
        for number, row in enumerate(result):
            if number == 0:
                _show_line(column.cell(column.title) for column, _ in figures(row))
            _show_line(column.cell(text) for column, text in figures(row))


def _show_line(cells: Iterable[str]) -> None:
    print("  " + "  ".join(cells).rstrip(), flush=True)


def plain(result: Any) -> Any:
    """A result as what `json.dumps` takes."""
    if isinstance(result, Mapping):
        return {name: plain(part) for name, part in result.items()}
    return asdict(result) if is_dataclass(result) else [asdict(row) for row in result]  # type: ignore[arg-type]
