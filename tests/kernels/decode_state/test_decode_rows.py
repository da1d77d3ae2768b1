"""Test the device state of decoding sequences: Triton against the reference, and the reference against plain Python."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from lib.kernels import DEVICE, DTYPES, ON_GPU, randn, relative_error
from minillm.kernels import DecodeInputs, Field
from minillm.kernels.decode_state import reference

pytest.importorskip("triton")
from minillm.kernels.decode_state import decode as decode_rows


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def some_rows(num_rows: int, width: int, block_size: int, rng: random.Random) -> torch.Tensor:
    words = torch.randint(0, 1000, (num_rows, Field.TABLE + width), dtype=torch.int32)
    for row in range(num_rows):
        words[row, Field.FORKS] = row == 8
        words[row, Field.POSITION] = rng.randrange(width * block_size)
        for field in (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P):
            words[row, field] = bits(rng.random())
        words[row, Field.SEED_LOW] = rng.randrange(-(1 << 31), 1 << 31)
        words[row, Field.SEED_HIGH] = rng.randrange(-(1 << 31), 1 << 31)
        for field in (Field.REPETITION_PENALTY, Field.FREQUENCY_PENALTY, Field.PRESENCE_PENALTY):
            words[row, field] = bits(1.0 + rng.random())
    return words.to(DEVICE)


@pytest.mark.parametrize("implementation", [reference, decode_rows])
@pytest.mark.parametrize(("width", "block_size"), [(1, 16), (7, 4), (40, 1), (1100 if ON_GPU else 33, 16)])
def test_begin_and_end_decode(implementation: object, width: int, block_size: int) -> None:
    rng = random.Random(width)
    words = some_rows(9, width, block_size, rng)
    before = words.tolist()
    rows = [4, -1, 0, 8, -1]
    inputs = DecodeInputs.allocate(8, width, DEVICE).first(len(rows))
    at = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    implementation.begin_decode(words, at, block_size, inputs)  # type: ignore[attr-defined]
    for i, row in enumerate(rows):
        got = [getattr(inputs, name)[i].item() for name in ("token_ids", "positions", "slot_mapping", "context_lens")]
        temperature, top_k, top_p, min_p, drawn_seed, draw_position = (each[i].item() for each in inputs.sampling)
        got += [top_k, drawn_seed, draw_position]
        floats = [temperature, top_p, min_p]
        if row < 0:
            assert got == [0, 0, -1, 0, 0, 0, 0]
            assert floats == [0.0, 1.0, 0.0]
            continue
        state = before[row]
        position, table = state[Field.POSITION], state[Field.TABLE :]
        slot = table[position // block_size] * block_size + position % block_size
        seed = (state[Field.SEED_HIGH] << 32) | (state[Field.SEED_LOW] & 0xFFFFFFFF)
        assert got == [state[Field.TOKEN], position, slot, position + 1, state[Field.TOP_K], seed, position + 1]
        assert [bits(x) for x in floats] == [state[f] for f in (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P)]
        used = position // block_size + 1
        assert inputs.block_tables[i, :used].tolist() == table[:used]
        state[Field.POSITION] += 1
    assert words.tolist() == before, "nothing but the positions of these rows moves on"

    counts = torch.randint(0, 9, (9, 50), dtype=torch.int32, device=DEVICE)
    counted = counts.tolist()
    tokens = [3, 7, 49, 0, 7]
    implementation.end_decode(words, counts, at, torch.tensor(tokens, device=DEVICE))  # type: ignore[attr-defined]
    for row, token in zip(rows, tokens, strict=True):
        if row >= 0 and row != 8:  # that one forks: its token is chosen, not drawn
            before[row][Field.TOKEN] = token
            counted[row][token] += 2
    assert words.tolist() == before
    assert counts.tolist() == counted


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalize(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    words, vocab = some_rows(5, 2, 4, rng), 4100 if ON_GPU else 300
    words[3, Field.REPETITION_PENALTY : Field.PRESENCE_PENALTY + 1] = torch.tensor([bits(1.0), 0, 0])
    counts = torch.randint(0, 6, (5, vocab), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, -1, 3, 0], dtype=torch.int32, device=DEVICE)
    logits = randn(4, vocab, dtype=dtype)
    expected, out = (torch.empty(4, vocab, dtype=torch.float32, device=DEVICE) for _ in range(2))
    reference.penalize(logits, words, counts, rows, expected)
    decode_rows.penalize(logits, words, counts, rows, out)
    assert relative_error(out, expected.double()) < 1e-6
    assert torch.equal(out[1:3], logits[1:3].float()), "rows without a penalty, and padding, stay as they are"
    assert not torch.equal(out[0], logits[0].float())
