"""List the workloads of ``minillm bench``, declare their options, and print their results. Imports no torch.

A workload is a function of its options: a dataclass of declared parameters (`minillm.checks`). If the options' class is
derived from `ModelOptions`, the function's first argument is a `Subject`. The function returns a result, or None if
nothing is to be printed.

A result is a dataclass, an iterable of dataclasses of one class, or a dictionary of these. `shown` declares how a field
is printed, `computed` how a property is printed. JSON output has all fields and no properties.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from minillm.checks import check_fields, custom, number
from minillm.errors import UsageError
from minillm.model.shapes import SHAPES
from minillm.storage import QUANTIZATIONS

if TYPE_CHECKING:
    from minillm.llm import LLM

# The name of a workload -> "file:function", and the workload's line in --help.
WORKLOADS = {
    "latency": ("latency.measure", "measure how fast a few sequences decode together"),
    "speculate": (
        "speculate.measure",
        "measure speculation by n-gram lookup, and with a draft model (--speculate MODEL)",
    ),
    "start": ("start.measure", "measure the time from a fresh process to its first answer"),
    "throughput": ("workloads.measure", "run 256 requests of mixed lengths at once"),
    "io": ("io.measure", "measure offline throughput and the first token, by lengths of prompts and answers"),
    "parallel": ("workloads.measure", "draw 8 samples of each of 32 prompts"),
    "prefix": ("workloads.measure", "run 128 requests that share 2,048 cached tokens"),
    "beam": ("workloads.measure", "run beam search of width 4 over 8 prompts"),
    "stall": ("workloads.measure", "measure how long a new prompt of 8,000 tokens delays running answers"),
    "serve": ("serve.measure", "measure an OpenAI server: requests at a given rate, or growing conversations"),
    "http": ("http.measure", "compare the engine in this process with `minillm serve`"),
    "profile": ("profile.measure", "profile a decode step on a GPU, kernel by kernel"),
    "matmuls": ("matmuls.measure", "list the kernel of each of the model's matmuls, by number of tokens"),
    "kernels": ("kernels.measure", "compare every kernel with the copy bandwidth and the matmul rate of this GPU"),
    "memory": ("memory.measure", "measure the savings of paging and sharing, and swapping against recomputing"),
    "host": ("host.measure", "measure the CPU work of a step"),
    "ui": ("ui.measure", "measure the chat app: first paint, keys, drawing, and how much it slows generation"),
}


def workload(name: str) -> tuple[Callable[..., Any], type[NoOptions]]:
    """Return the function that measures the workload ``name``, and the class of its options."""
    file, function = WORKLOADS[name][0].split(".")
    measure = getattr(importlib.import_module(f"minillm.bench.{file}"), function)
    return measure, get_type_hints(measure)["options"]


@dataclass(frozen=True)
class Subject:
    """The model to measure, with its name and the name of the workload."""

    llm: LLM
    name: str
    workload: str

    def __str__(self) -> str:
        from minillm.model.shard import ranks_of

        model = self.llm.engine.runner.model
        shared = ranks_of(model)
        ranks = f", {shared.size} ranks" if shared else ""
        return f"{self.workload}: {self.name}, {model.device}{ranks}, {str(model.dtype).removeprefix('torch.')}"


def weights(shape: str | None, model: str | None) -> dict[str, str]:
    """Convert the options ``--shape`` and ``--model`` to keyword arguments of `LLM`.

    Without either option, the arguments are for random weights of the smallest shape. Raises UsageError if both options
    are given.
    """
    if shape and model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    name, separator, form = (shape or "smollm2-135m").partition(":")
    return {"model": model} if model else {"model": name, "load_format": f"dummy{separator}{form}"}


def word(default: str | None, help: str, *, metavar: str = "NAME") -> Any:
    """Declare an option that accepts any text. The workload checks the text later."""
    return custom(default, lambda name, value: value, metavar=metavar, help=help)


def shape(default: str | None, help: str) -> Any:
    """Declare an option that names a model's dimensions: a name in `SHAPES`, such as ``llama-8b`` or ``llama-8b:q4_0``.

    The part after the colon is a quantization.
    """

    def check(option: str, value: Any) -> Any:
        known, (name, separator, form) = tuple(SHAPES), (value or "").partition(":")
        if value is not None and (name not in known or (separator and form not in QUANTIZATIONS)):
            forms = ", ".join(QUANTIZATIONS)
            raise UsageError(f"unknown shape {value!r}; known: {', '.join(known)}, each with :FORM of {forms}")
        return value

    return custom(default, check, metavar="NAME", help=help)


@dataclass(frozen=True)
class NoOptions:
    """The base class of all workloads' options. A workload without options of its own uses this class."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ModelOptions(NoOptions):
    """The options that all workloads with a model share. With ``--shape``, random weights replace a ``--model``."""

    shape: str | None = shape(
        None,
        f"random weights with the dimensions of {', '.join(SHAPES)}. Append :q4_0 or another quantization "
        f"({', '.join(QUANTIZATIONS)}) for quantized weights",
    )


@dataclass(frozen=True)
class ScaleOptions(ModelOptions):
    scale: float = number(1.0, 0, 1, above=True, help="multiply the lengths of all prompts and answers by this")


@dataclass(frozen=True)
class ServerOptions(ScaleOptions):
    """The options of workloads that measure a server, and therefore load no model in this process."""


@dataclass(frozen=True)
class Column:
    """The title and the number format with which one field or property of a result is printed."""

    title: str
    spec: str = ""  # format of the number; if empty, the figure is text, aligned to the left in a table
    scale: float | None = None  # factor of the number: 1e3 prints seconds as milliseconds
    width: int = 9  # minimum characters in a table

    def text(self, value: Any) -> str:
        """Return the formatted value.

        Elements of a tuple or list are formatted one by one; None gives an empty text.
        """
        if isinstance(value, tuple | list):
            return " / ".join(map(self.text, value))
        scaled = value if self.scale is None or value is None else value * self.scale
        return "" if scaled is None else format(scaled, self.spec)

    def cell(self, text: str) -> str:
        """Return ``text`` padded to the width of the column."""
        width = max(len(self.title), self.width)
        return text.rjust(width) if self.spec else text.ljust(width)


def shown(title: str, spec: str = "", scale: float | None = None, *, width: int = 9, default: Any = MISSING) -> Any:
    """Declare a field of a result that is printed as a `Column` with these settings."""
    return field(default=default, metadata={"column": Column(title, spec, scale, width)})


def computed(title: str, spec: str) -> Callable[[Callable[[Any], Any]], property]:
    """Return a decorator that turns a method of a result into a property, printed as a `Column` with these settings."""

    def decorate(method: Callable[[Any], Any]) -> property:
        method.column = Column(title, spec)  # type: ignore[attr-defined]
        return property(method)

    return decorate


def figures(result: Any) -> Iterator[tuple[Column, str]]:
    """Yield the columns of a result, each with its formatted value."""
    columns = [(each.name, each.metadata.get("column")) for each in fields(result)]
    methods = ((name, getattr(member, "fget", None)) for name, member in vars(type(result)).items())
    columns += [(name, getattr(method, "column", None)) for name, method in methods]
    for name, column in columns:
        if column is not None:
            yield column, column.text(getattr(result, name))


def show(result: Any, heading: str = "") -> None:
    """Print a result under ``heading``.

    One dataclass is printed as a line per field. Several dataclasses are printed as a table, row by row as they arrive.
    A dictionary is printed entry by entry.
    """
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
    """Convert a result to plain data for `json.dumps`."""
    if isinstance(result, Mapping):
        return {name: plain(part) for name, part in result.items()}
    return asdict(result) if is_dataclass(result) else [asdict(row) for row in result]  # type: ignore[arg-type]
