"""The workloads of ``minillm bench``, and what they have in common. Nothing here imports torch.

The file of a workload has a dataclass ``Options`` of declared parameters (`minillm.checks`), and a function ``measure``
that takes them: after a `Subject`, where they are `ModelOptions`. It returns a result that `minillm.bench.table` shows,
or None where this process has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.checks import check_fields, custom, number
from minillm.errors import UsageError
from minillm.model.shapes import SHAPES

if TYPE_CHECKING:
    from minillm.llm import LLM

# By their names: the file, and the line in --help.
WORKLOADS = {
    "latency": ("latency", "how fast a few sequences decode together"),
    "start": ("start", "how long a fresh process takes to its first answer"),
    "throughput": ("workloads", "256 requests of mixed lengths at once"),
    "parallel": ("workloads", "8 samples of each of 32 prompts"),
    "prefix": ("workloads", "128 requests that share 2,048 cached tokens"),
    "beam": ("workloads", "beam search of width 4 over 8 prompts"),
    "stall": ("workloads", "how long running answers wait while a prompt of 8,000 tokens arrives"),
    "serve": ("serve", "requests that arrive by chance, at a given rate"),
    "share": ("share", "the requests of throughput, shared by the replicas that torchrun has started"),
    "profile": ("profile", "where a decode step's time goes on a GPU, kernel by kernel"),
    "matvec": ("matvec", "the tiles of the products of one token, or a few, measured anew on a GPU"),
    "chunk-attention": ("chunk_attention", "decode attention over a shared prompt: the ChunkAttention paper's table"),
    "kernels": ("kernels", "every kernel against the copy bandwidth and the matmul rate of this GPU"),
    "memory": ("memory", "what paging and sharing save, and swap against recompute"),
    "host": ("host", "what a step costs beside the device's work"),
    "ui": ("ui", "what the chat app costs: first paint, keys, drawing, and the generation's slow-down"),
}


@dataclass(frozen=True)
class Subject:
    """The model that is measured, its name, and the workload's."""

    llm: LLM
    name: str
    workload: str

    def __str__(self) -> str:
        from minillm.model.llama import ranks_of

        model = self.llm.engine.runner.model
        shared = ranks_of(model)
        ranks = "" if shared is None else f", {shared.size} ranks"
        return f"{self.workload}: {self.name}, {model.device}{ranks}, {str(model.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class NoOptions:
    """Options of a workload; here, none."""

    def __post_init__(self) -> None:
        check_fields(self)


def shape(default: str | None, help: str) -> Any:
    """Declare an option that names a model's shape."""
    return custom(default, _check_shape, metavar="NAME", help=help)


def word(default: str | None, help: str, *, metavar: str = "NAME") -> Any:
    """Declare an option that is checked where it is used."""
    return custom(default, lambda name, value: value, metavar=metavar, help=help)


def _check_shape(name: str, value: Any) -> Any:
    if value is not None and value not in SHAPES:
        raise UsageError(f"unknown shape {value!r}; known: {', '.join(SHAPES)}")
    return value


@dataclass(frozen=True)
class ModelOptions(NoOptions):
    """Options of all workloads that run a model from the command line: a shape here, or else ``--model``."""

    shape: str | None = shape(None, f"random weights in the shape of {', '.join(SHAPES)}")


@dataclass(frozen=True)
class ScaleOptions(ModelOptions):
    """Options of a workload whose lengths are given."""

    scale: float = number(1.0, 0, 1, above=True, help="shorten all prompts and answers")
