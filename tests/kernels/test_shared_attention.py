"""Attention that reads shared blocks once: the same numbers as the reference, whatever is shared."""

from __future__ import annotations

import random

import pytest
import torch
from shapes import DEVICE, DTYPES, ON_GPU, TOLERANCE, randn, relative_error

from kernels import reference

pytest.importorskip("triton")
from kernels.shared_decode_attention import shared_attention


def tree_of_tables(
    num_seqs: int, block_size: int, longest: int, rng: random.Random
) -> tuple[list[list[int]], list[int]]:
    """Block tables as forks make them: each goes with its neighbour for a while; some rows are padding."""
    tables: list[list[int]] = []
    lens: list[int] = []
    fresh = iter(rng.sample(range(num_seqs * (longest // block_size + 2)), num_seqs * (longest // block_size + 2)))
    for number in range(num_seqs):
        length = 0 if rng.random() < 0.1 else rng.randint(1, longest)
        blocks = -(-length // block_size)
        share = rng.choice((0, blocks, rng.randint(0, blocks))) if number else 0
        table = (tables[-1][:share] if number else [])[:blocks]
        table += [next(fresh) for _ in range(blocks - len(table))]
        tables.append(table)
        lens.append(length)
    return tables, lens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (1, 4, 2, 16, 4),
        (9, 8, 2, 32, 4),
        (7, 3, 3, 24, 1),
        (5, 6, 1, 16, 16),
        *([(70, 32, 8, 128, 16)] if ON_GPU else []),
    ],
)
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_shared_attention(
    dtype: torch.dtype, num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, rows: int,
    num_splits: int,
) -> None:  # fmt: skip
    rng = random.Random(num_seqs)
    tables, lens = tree_of_tables(num_seqs, block_size, 900 if ON_GPU else 60, rng)
    num_blocks = max((block for table in tables for block in table), default=0) + 1
    pool = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    for table, length in zip(tables, lens, strict=True):
        for index, block in enumerate(table):
            held = min(block_size, length - index * block_size)
            pool[:, block, :held] = randn(2, held, num_kv_heads, head_dim, dtype=dtype)
    width = max(map(len, tables)) + 1
    padded = torch.tensor([t + [10**6] * (width - len(t)) for t in tables], dtype=torch.int32, device=DEVICE)
    context = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = randn(num_seqs, num_heads, head_dim, dtype=dtype)
    wide = pool.double()
    exact, _ = reference.paged_attention(q.double(), wide[0], wide[1], padded, context, head_dim**-0.5)
    got = shared_attention(q, pool[0], pool[1], padded, context, head_dim**-0.5, rows=rows, num_splits=num_splits)
    assert relative_error(got, exact) < TOLERANCE[dtype]
    assert torch.equal(got[context == 0], torch.zeros_like(got[context == 0]))


def test_a_shared_block_is_read_for_all() -> None:
    """The second sequence's own copy of the first blocks is not looked at: its table names the first one's."""
    q = randn(2, 2, 16, dtype=torch.float32)
    pool = randn(2, 4, 4, 2, 16, dtype=torch.float32)
    tables = torch.tensor([[1, 2, 3], [1, 2, 0]], dtype=torch.int32, device=DEVICE)
    context = torch.tensor([10, 11], dtype=torch.int32, device=DEVICE)
    exact, _ = reference.paged_attention(q.double(), pool[0].double(), pool[1].double(), tables, context, 0.25)
    assert relative_error(shared_attention(q, pool[0], pool[1], tables, context, 0.25), exact) < 1e-5
