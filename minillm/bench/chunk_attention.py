"""``chunk-attention``: the table of the ChunkAttention paper (Ye et al. 2024, section 4.1) on our kernels.

32 sequences whose prompts are one and the same generate 512 or 2,048 tokens each. 32 heads of 128, no grouped queries,
blocks of 16, bfloat16. Only decode attention is measured, at points spread evenly over the generation; a figure is
their mean. The work list is the one that was made before the first token, as in the engine.

The paper compares with a paged kernel over tables of which each has its own copy of the prompt (its PagedAttn), and
with the same kernel over tables that share the prompt's blocks, so that the L2 helps (its PagedAttn*).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from minillm.bench.ops import shared_inputs
from minillm.bench.registry import NoOptions as Options
from minillm.bench.table import computed, shown
from minillm.bench.timing import graph_microseconds
from minillm.errors import MinillmError
from minillm.kernels import Pages, paged_attention, prefix_attention

_SEQS, _HEADS, _DIM = 32, 32, 128
_POINTS = 4  # of a generation


@dataclass(frozen=True)
class ChunkAttentionResult:
    """Mean microseconds of decode attention over a generation."""

    prompt: int = shown("prompt", "d")  # tokens, the same for all sequences
    completion: int = shown("completion", "d")  # tokens that each generates
    copied: float = shown("copied us", ".1f")  # the paged kernel, each sequence with a copy of the prompt
    shared: float = shown("shared us", ".1f")  # the paged kernel, one prompt
    ours: float = shown("prefix us", ".1f")  # the prefix kernel

    @computed("speed-up", ".1f")
    def speedup(self) -> float:
        """Over the paged kernel with copies, as in the paper's headline."""
        return self.copied / self.ours

    @computed("over shared", ".1f")
    def speedup_over_shared(self) -> float:
        return self.shared / self.ours


def measure(options: Options) -> Iterator[ChunkAttentionResult]:
    """Measure all rows of the table.

    Raises:
        MinillmError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise MinillmError("bench chunk-attention needs a CUDA GPU, and torch finds none here")
    for prompt, completion in product((1024, 2048, 4096), (512, 2048)):
        points = [_measure(prompt, completion * (2 * i + 1) // (2 * _POINTS)) for i in range(_POINTS)]
        yield ChunkAttentionResult(prompt, completion, *map(statistics.mean, zip(*points, strict=True)))


def _measure(prompt: int, generated: int) -> tuple[float, float, float]:
    scale = _DIM**-0.5
    inputs = shared_inputs((_HEADS, _HEADS, _DIM), _SEQS, prompt, generated, planned_tail=1)
    q, pages, count = inputs.q, inputs.pages, len(inputs.pages)
    ours = graph_microseconds(lambda i: prefix_attention(q, pages[i % count], scale, inputs.work), 8)
    shared = graph_microseconds(lambda i: paged_attention(q, pages[i % count], scale), 8)
    pool, _, tables, lens = pages[0]
    k, v = (pool.new_empty(tables.numel(), *pool.shape[1:]).normal_() for _ in range(2))
    apart = Pages(k, v, torch.randperm(tables.numel(), device=pool.device).int().view_as(tables), lens)
    copied = graph_microseconds(lambda i: paged_attention(q, apart, scale), 8)
    return copied, shared, ours
