"""Test steps with one row per token, as if each were its own sequence. No other row is written."""

from __future__ import annotations

import random

import pytest
import torch

from lib.models import DEVICE
from minillm import kernels
from minillm.kernels import DecodeInputs, Field
from minillm.runner.device.rows import padded_size
from minillm.runner.device.token_rows import TokenRows
from minillm.runner.step import ChunkWork, packed

SIZE, WIDTH = 4, 12  # of a block in tokens, and of a table in blocks


@pytest.mark.parametrize("seed", range(8))
def test_each_token_is_computed_at_its_place(seed: int) -> None:
    """Run it after many other steps. Their leftovers are not read."""
    rng = random.Random(seed)
    rows = TokenRows(40, WIDTH, DEVICE, pinned=DEVICE.type == "cuda")
    inputs = DecodeInputs.allocate(40, WIDTH, DEVICE)
    for _ in range(6):
        chunks, words = [], []
        for _ in range(rng.randint(1, 4)):
            first, count = rng.randrange(30), rng.randint(1, 9)
            blocks = rng.sample(range(1, 99), -(-(first + count) // SIZE))
            chunks.append(ChunkWork([rng.randrange(500) for _ in range(count)], first, blocks, first, count))
            words.append({Field.TOP_K: rng.randrange(9), Field.SEED_LOW: rng.randrange(-9, 9)})
        numbers = packed(chunks, 0, SIZE)
        n = len(numbers.token_ids)
        size, width = padded_size(n), max(len(chunk.blocks) for chunk in chunks) + rng.randrange(2)
        rows.write(chunks, words, size, width)
        taken = inputs.first(size)._replace(block_tables=inputs.block_tables[:size, :width])
        kernels.begin_decode(rows.words(size, width), rows.rows[:size], SIZE, taken)
        owners = [number for number, chunk in enumerate(chunks) for _ in chunk.token_ids]
        assert inputs.token_ids[:size].tolist() == numbers.token_ids + [0] * (size - n)
        assert inputs.slot_mapping[:size].tolist() == [*numbers.slots, *[-1] * (size - n)], "padding writes nowhere"
        assert inputs.context_lens[:size].tolist() == [i + 1 for i in numbers.positions] + [0] * (size - n)
        assert inputs.sampling.positions[:n].tolist() == [i + 1 for i in numbers.positions], "of the tokens behind"
        assert inputs.sampling.top_k[:n].tolist() == [words[owner][Field.TOP_K] for owner in owners]
        assert inputs.sampling.seeds[:n].int().tolist() == [words[owner][Field.SEED_LOW] for owner in owners]
        for row, (owner, position) in enumerate(zip(owners, numbers.positions, strict=True)):
            used = position // SIZE + 1
            assert inputs.block_tables[row, :used].tolist() == chunks[owner].blocks[:used]
    assert torch.equal(rows.rows.cpu(), torch.tensor([*range(n), *[-1] * (40 - n)], dtype=torch.int32))
