"""Results of a measurement, as tables for people or as plain data for JSON.

A result is a dataclass, or several of one class, which may come one by one, or a dictionary of such parts. ``COLUMNS``
of its class say what people see; JSON has all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """One figure of a result.

    Attributes:
        value: takes the result; None shows nothing.
        spec: how the value is formatted. Without one it is text, and stands flush left in a table.
        width: the least in a table, in characters; the title may need more.
    """

    title: str
    value: Callable[[Any], object]
    spec: str = ""
    width: int = 9

    def text(self, row: object) -> str:
        value = self.value(row)
        return "" if value is None else format(value, self.spec)

    def cell(self, text: str) -> str:
        width = max(len(self.title), self.width)
        return text.rjust(width) if self.spec else text.ljust(width)


def show(result: Any, heading: str = "") -> None:
    """Print a result: a dataclass as lines, several as the rows of a table as they come, a dictionary part by part."""
    if heading:
        print(heading, flush=True)
    if isinstance(result, Mapping):
        for name, part in result.items():
            show(part, name)
    elif columns := getattr(result, "COLUMNS", None):
        for column in columns:
            if text := column.text(result):
                print(f"  {column.title:32}{text}", flush=True)
        for each in fields(result):
            part = getattr(result, each.name)
            if isinstance(part, list) and part and is_dataclass(part[0]):
                show(part)
    else:
        _show_table(result)


def _show_table(rows: Iterable[Any]) -> None:
    for number, row in enumerate(rows):
        if number == 0:
            _show_line(column.cell(column.title) for column in row.COLUMNS)
        _show_line(column.cell(column.text(row)) for column in row.COLUMNS)


def _show_line(cells: Iterable[str]) -> None:
    print("  " + "  ".join(cells).rstrip(), flush=True)


def plain(result: Any) -> Any:
    """A result as what `json.dumps` takes."""
    if isinstance(result, Mapping):
        return {name: plain(part) for name, part in result.items()}
    return asdict(result) if is_dataclass(result) else [asdict(row) for row in result]  # type: ignore[arg-type]
