"""The workloads of ``minillm bench``, their options, and tables of their results. Nothing here imports torch.

A workload is a function. It takes a dataclass of declared parameters (`minillm.checks`), after a `Subject` where they
are `ModelOptions`. It returns a result, or None where this process has none.

A result is a dataclass, or several of one class, which may come one by one, or a dictionary of such parts. Its fields
say with `shown`, and its properties with `computed`, how people see them; JSON has all fields and no properties.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from minillm.checks import check_fields, custom, number
from minillm.errors import UsageError
from minillm.forms import FORMS
from minillm.model.shapes import SHAPES

if TYPE_CHECKING:
    from minillm.llm import LLM

# By their names: the file and the function in it, and the line in --help.
WORKLOADS = {
    "latency": ("latency.measure", "how fast a few sequences decode together"),
    "speculate": ("speculate.measure", "what guesses save, by lookup and by a draft model (--speculate MODEL)"),
    "forms": ("forms.measure", "what it costs that answers follow a JSON schema"),
    "start": ("start.measure", "how long a fresh process takes to its first answer"),
    "throughput": ("workloads.measure", "256 requests of mixed lengths at once"),
    "parallel": ("workloads.measure", "8 samples of each of 32 prompts"),
    "prefix": ("workloads.measure", "128 requests that share 2,048 cached tokens"),
    "beam": ("workloads.measure", "beam search of width 4 over 8 prompts"),
    "stall": ("workloads.measure", "how long running answers wait while a prompt of 8,000 tokens arrives"),
    "serve": ("workloads.serve", "requests that arrive by chance, at a given rate"),
    "http": ("http.measure", "the same requests through the engine in this process, and through `minillm serve`"),
    "share": ("workloads.share", "the requests of throughput, shared by the replicas that torchrun has started"),
    "profile": ("profile.measure", "where a decode step's time goes on a GPU, kernel by kernel"),
    "matvec": ("kernels.tiles", "the tiles of the products of one token, or a few, measured anew on a GPU"),
    "chunk-attention": ("kernels.chunks", "decode attention over a shared prompt: the ChunkAttention paper's table"),
    "kernels": ("kernels.measure", "every kernel against the copy bandwidth and the matmul rate of this GPU"),
    "memory": ("memory.measure", "the savings of paging and sharing; swap against recompute"),
    "host": ("host.measure", "the host's share of a step"),
    "ui": ("ui.measure", "the cost of the chat app: first paint, keys, drawing, and the generation's slow-down"),
}


def workload(name: str) -> tuple[Callable[..., Any], type[NoOptions]]:
    """The function that measures a workload, and the class of its options."""
    file, function = WORKLOADS[name][0].split(".")
    measure = getattr(importlib.import_module(f"minillm.bench.{file}"), function)
    return measure, get_type_hints(measure)["options"]


@dataclass(frozen=True)
class Subject:
    """The model that is measured, its name, and the workload's."""

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
    """The parameters of `LLM` for ``--shape`` or ``--model``; without either, for the smallest shape."""
    if shape and model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    name, separator, form = (shape or "smollm2-135m").partition(":")
    return {"model": model} if model else {"model": name, "load_format": f"dummy{separator}{form}"}


def word(default: str | None, help: str, *, metavar: str = "NAME") -> Any:
    """Declare an option that is checked where it is used."""
    return custom(default, lambda name, value: value, metavar=metavar, help=help)


def shape(default: str | None, help: str) -> Any:
    """Declare an option that names a model's shape."""

    def check(option: str, value: Any) -> Any:
        known, (name, separator, form) = tuple(SHAPES), (value or "").partition(":")
        if value is not None and (name not in known or (separator and form not in FORMS)):
            forms = ", ".join(FORMS)
            raise UsageError(f"unknown shape {value!r}; known: {', '.join(known)}, each with :FORM of {forms}")
        return value

    return custom(default, check, metavar="NAME", help=help)


@dataclass(frozen=True)
class NoOptions:
    """Options of a workload; here, none."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ModelOptions(NoOptions):
    """Options of all workloads that run a model from the command line: a shape here, or else ``--model``."""

    shape: str | None = shape(
        None, f"random weights in the shape of {', '.join(SHAPES)}; with :FORM ({', '.join(FORMS)}) in few bits"
    )


@dataclass(frozen=True)
class ScaleOptions(ModelOptions):
    scale: float = number(1.0, 0, 1, above=True, help="shorten all prompts and answers")


@dataclass(frozen=True)
class Column:
    """How one figure of a result is shown."""

    title: str
    spec: str = ""  # its format; a figure without one is text, and stands flush left in a table
    scale: float | None = None  # multiplies a number first: 1e3 shows seconds as milliseconds
    width: int = 9  # characters in a table; the title may need more

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
    columns = [(each.name, each.metadata.get("column")) for each in fields(result)]
    methods = ((name, getattr(member, "fget", None)) for name, member in vars(type(result)).items())
    columns += [(name, getattr(method, "column", None)) for name, method in methods]
    for name, column in columns:
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
    """Return a result as `json.dumps` takes it."""
    if isinstance(result, Mapping):
        return {name: plain(part) for name, part in result.items()}
    return asdict(result) if is_dataclass(result) else [asdict(row) for row in result]  # type: ignore[arg-type]
