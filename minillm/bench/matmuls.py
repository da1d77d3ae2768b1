"""``matmuls``: list which kernel computes each of a model's matmuls. The choice depends on the number of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from torch import Tensor

from minillm.bench.table import ModelOptions, Subject, shown
from minillm.kernels import LinearWeight

_MOST_TOKENS = 1024  # from here on, every weight keeps its last kernel


@dataclass(frozen=True)
class MatmulsResult:
    """The kernels that compute the matmul of one weight.

    Steps with different numbers of tokens use different kernels.
    """

    op: str = shown("op")
    features: int = shown("features", "d")
    columns: int = shown("columns", "d")
    kernels: str = shown("tokens and kernel")


def measure(subject: Subject, options: ModelOptions) -> Iterator[MatmulsResult]:
    """List the kernels of the first layer's weights and of the output head."""
    model = subject.llm.engine.runner.model
    names = "qkv", "o", "gate_up", "down", "head"
    for name, weight in zip(names, (*model.layers[0].linears, model.head), strict=True):
        x = model.norm.new_empty(_MOST_TOKENS, weight.in_features)
        tokens = range(1, _MOST_TOKENS + 1)
        ranges = [(kernel, list(same)) for kernel, same in groupby(tokens, partial(_kernel, weight, x))]
        yield MatmulsResult(name, weight.out_features, weight.in_features, _listed(ranges))


def _kernel(weight: LinearWeight, x: Tensor, tokens: int) -> str:
    return weight.kernel_name(x[:tokens])


def _listed(ranges: list[tuple[str, list[int]]]) -> str:
    """Return the kernel for each range of token counts, as in ``1-2 matvec, 3-16 tensor cores, 17- cuBLAS``."""
    return ", ".join(
        f"{tokens[0]}-{'' if tokens[-1] == _MOST_TOKENS else tokens[-1]} {kernel}" for kernel, tokens in ranges
    )
