"""`minillm.kernels.top_k`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minillm.bench.ops import DEVICE, Case, relative_error
from minillm.kernels import reference


def top_log_probabilities() -> Iterator[Case]:
    for rows, vocab, count in ((64, 128256, 8), (64, 128256, 64)):
        yield _case(rows, vocab, count)


def _case(rows: int, vocab: int, count: int) -> Case:
    from minillm.kernels.top_k import top_log_probabilities

    logits = [torch.randn(rows, vocab, device=DEVICE) * 3 for _ in range(8)]

    def check() -> float:
        got, ids = top_log_probabilities(logits[0], count)
        exact, exact_ids = reference.top_log_probabilities(logits[0].double(), count)
        return relative_error(got, exact) + float((ids != exact_ids).float().mean())

    return Case(
        "top_log_probabilities",
        f"{rows} x {vocab}, best {count}",
        rows * vocab * 4,
        0,
        lambda i: top_log_probabilities(logits[i % 8], count),
        check,
    )
