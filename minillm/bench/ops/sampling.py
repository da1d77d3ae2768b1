"""`minillm.kernels.sampling`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minillm.bench.ops import DEVICE, Case, relative_error
from minillm.bench.timing import copies_for_cold_l2
from minillm.kernels import SamplingInputs, reference

_SETTINGS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "temperature + top-k": (0.8, 50, 1.0, 0.0),
    "temperature + top-k + top-p": (0.8, 50, 0.95, 0.0),
    "temperature + top-p": (0.8, 0, 0.95, 0.0),
    "temperature + min-p": (0.8, 0, 1.0, 0.05),
}


def sample() -> Iterator[Case]:
    for rows, vocab in ((1, 128256), (64, 128256), (64, 49152)):
        logits = [
            torch.randn(rows, vocab, device=DEVICE) * 3 for _ in range(min(8, copies_for_cold_l2(rows * vocab * 4)))
        ]
        for label in _SETTINGS:
            yield _case(logits, label)


def _case(logits: list[torch.Tensor], label: str) -> Case:
    from minillm.kernels.sampling import sample_with_logprobs

    rows, vocab = logits[0].shape
    temperature, top_k, top_p, min_p = _SETTINGS[label]
    inputs = SamplingInputs(
        torch.full((rows,), temperature, device=DEVICE),
        torch.full((rows,), top_k, device=DEVICE),
        torch.full((rows,), top_p, device=DEVICE),
        torch.full((rows,), min_p, device=DEVICE),
        torch.arange(rows, device=DEVICE),
        torch.arange(rows, device=DEVICE),
    )

    def check() -> float:
        tokens, logprobs = sample_with_logprobs(logits[0], inputs)
        agree = (tokens == reference.sample(logits[0], inputs)).float().mean()
        exact = reference.log_probabilities(logits[0].double(), tokens)
        return relative_error(logprobs, exact) + float(1 - agree)

    return Case(
        "sample",
        f"{rows} x {vocab}, {label}",
        rows * vocab * 4,
        0,
        lambda i: sample_with_logprobs(logits[i % len(logits)], inputs),
        check,
    )
