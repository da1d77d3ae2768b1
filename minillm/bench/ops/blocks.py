"""`minillm.kernels.blocks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from minillm.bench.ops import DEVICE, Case, random, relative_error
from minillm.kernels import reference

_LAYERS, _COUNT, _BLOCK = 32, 256, (16, 8, 128)


def block_copy() -> Iterator[Case]:
    yield _case("block_copy")


def gather_blocks() -> Iterator[Case]:
    yield _case("gather_blocks")


def scatter_blocks() -> Iterator[Case]:
    yield _case("scatter_blocks")


def _case(op: str) -> Case:
    from minillm.kernels import blocks

    pool = random(_LAYERS, 2, 1024, *_BLOCK)
    staging = random(_COUNT, _LAYERS, 2, *_BLOCK)
    lists = [torch.randperm(1024, device=DEVICE).view(2, -1)[:, :_COUNT].T.contiguous() for _ in range(4)]

    def arguments(pairs: torch.Tensor, staging: torch.Tensor) -> tuple[Any, ...]:
        return (pairs,) if op == "block_copy" else (pairs[:, 0].contiguous(), staging)

    def launch(i: int) -> None:
        getattr(blocks, op)(pool, *arguments(lists[i % 4], staging))

    def check() -> float:
        exact, exact_staging = pool.clone(), staging.clone()
        launch(0)
        getattr(reference, op)(exact, *arguments(lists[0], exact_staging))
        return relative_error(pool, exact) + relative_error(staging, exact_staging)

    size, kv_heads, dim = _BLOCK
    moved = 2 * _COUNT * _LAYERS * 2 * size * kv_heads * dim * 2
    return Case(op, f"{_COUNT} blocks of {size} x {kv_heads} x {dim}, {_LAYERS} layers", moved, 0, launch, check)
