"""One file for each kernel, under its own name: how to run and check it, and what it must read, write and compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HEAD_SHAPES = ((32, 8, 128), (32, 8, 64), (32, 32, 128))  # query heads, kv heads, head dimension


@dataclass(frozen=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    bytes: int
    flops: int
    launch: Callable[[int], Any]  # on copy i of the inputs
    check: Callable[[], float | None]  # the relative error against float64; None where there is no number to compare
    launches: int = 24


def random(*shape: int) -> Tensor:
    """Normal numbers on the GPU."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``|got - expected| / |expected|`` in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
