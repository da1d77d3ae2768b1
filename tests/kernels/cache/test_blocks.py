"""Whole blocks, moved within the pool and to and from a staging buffer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.kernels import DEVICE, DTYPES, drawn, randn
from minillm.kernels import reference

pytest.importorskip("triton")
from minillm.kernels.cache import blocks


@drawn
@given(
    dtype=st.sampled_from([*DTYPES, torch.int8]),
    layers=st.integers(1, 3),
    block=st.sampled_from([(1, 1, 2), (4, 2, 8), (16, 3, 64), (16, 8, 128), (256, 1, 32), (3, 16), (1, 1)]),
    seed=st.integers(0, 99),
)
def test_blocks_move_whole_and_alone(dtype: torch.dtype, layers: int, block: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    if len(block) == 2:  # scales of a pool in 8 bits
        dtype = torch.float32
    elif dtype == torch.int8 and block[0] == 1:
        block = (2, *block[1:])
    pool = (100 * randn(layers, 2, 7, *block)).to(dtype)
    ids = rng.sample(range(7), 7)
    copies = torch.tensor(
        [[ids[0], ids[1]], [ids[0], ids[2]], [ids[3], ids[4]]][: rng.randint(0, 3)], dtype=torch.int64
    )
    copies = copies.view(-1, 2).to(DEVICE)
    expected = pool.clone()
    reference.block_copy(expected, copies)
    blocks.block_copy(pool, copies)
    assert torch.equal(pool, expected)
    chosen = torch.tensor(ids[: rng.randint(0, 5)], dtype=torch.int64, device=DEVICE)
    staging, expected_staging = (torch.zeros(6, layers, 2, *block, dtype=dtype, device=DEVICE) for _ in range(2))
    reference.gather_blocks(pool, chosen, expected_staging)
    blocks.gather_blocks(pool, chosen, staging)
    assert torch.equal(staging, expected_staging)
    target, expected_target = torch.zeros_like(pool), torch.zeros_like(pool)
    reference.scatter_blocks(expected_target, chosen, staging)
    blocks.scatter_blocks(target, chosen, staging)
    assert torch.equal(target, expected_target)


@pytest.mark.gpu
def test_blocks_move_to_and_from_pinned_host_memory() -> None:
    pool = randn(4, 2, 9, 16, 2, 64, dtype=torch.bfloat16)
    ids = torch.tensor([7, 2, 5], device=DEVICE)
    staging = torch.empty(3, 4, 2, 16, 2, 64, dtype=torch.bfloat16, pin_memory=True)
    blocks.gather_blocks(pool, ids, staging)
    torch.cuda.synchronize()
    assert torch.equal(staging, pool[:, :, ids].movedim(2, 0).cpu())
    target = torch.zeros_like(pool)
    blocks.scatter_blocks(target, ids, staging)
    torch.cuda.synchronize()
    assert torch.equal(target[:, :, ids], pool[:, :, ids])
    assert not target[:, :, [0, 1, 3, 4, 6, 8]].any()


BAD: list[tuple[str, Any]] = [
    ("contiguous", lambda: blocks.block_copy(randn(2, 2, 4, 4, 2, 8).transpose(3, 4), torch.zeros(0, 2))),
    ("staging", lambda: blocks.gather_blocks(randn(2, 2, 4, 4, 2, 8), torch.zeros(3).long(), randn(2, 2, 2, 4, 2, 8))),
]


@pytest.mark.parametrize(("said", "call"), BAD)
def test_wrong_shapes_are_refused_with_a_message(said: str, call: Any) -> None:
    with pytest.raises(ValueError, match=said):
        call()
