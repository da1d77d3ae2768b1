"""Guesses that the device makes and judges: Triton against the reference, and the reference against plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from shapes import DEVICE

from minillm.kernels import DecodeInputs, Field, reference

pytest.importorskip("triton")
from minillm.kernels.decode_state import guesses as guess_rows

WIDTH, SIZE = 700, 4


def wanted_guesses(text: list[int], count: int) -> list[int]:
    """Those that are found by looking at each place."""
    best: tuple[int, int] | None = None
    for place in range(max(1, len(text) - 1 - reference.MOST_SEARCHED), len(text) - 1):
        length = 0
        while length < 16 and length <= place and text[place - length] == text[-1 - length]:
            length += 1
        if length:
            best = max(best or (0, 0), (length, place))
    if best is None:
        return [-1] * count
    period = len(text) - 1 - best[1]
    longer = list(text)
    while len(longer) < len(text) + count:
        longer.append(longer[-period])
    return longer[best[1] + 1 : best[1] + 1 + count]


def texts(rng: random.Random) -> list[list[int]]:
    """Short and long ones, with few and many different tokens; one that repeats itself, and one that cannot."""
    found = [[rng.randrange(letters) for _ in range(n)] for letters, n in ((2, 9), (3, 40), (9, 300), (60, 2500))]
    return [*found, [5], [5, 5], [5, 6], [7] * 30, [1, 2, 3] * 9, list(range(50)), [9, 9, *range(50), 9, 9]]


@pytest.mark.parametrize("implementation", [reference, guess_rows])
@pytest.mark.parametrize("n", [4, 16])
def test_guesses(implementation: object, n: int) -> None:
    rng = random.Random(n)
    for text in texts(rng):
        words = torch.randint(0, 1000, (3, Field.TABLE + WIDTH), dtype=torch.int32, device=DEVICE)
        words[1, Field.TOKEN], words[1, Field.POSITION] = text[-1], len(text) - 1
        history = torch.full((WIDTH * SIZE + 32,), 3, dtype=torch.int32, device=DEVICE)  # of another text, behind it
        history[: len(text) - 1] = torch.tensor(text[:-1], dtype=torch.int32)
        inputs = DecodeInputs.allocate(n, WIDTH, DEVICE)
        guesses = torch.zeros(n - 1, dtype=torch.int64, device=DEVICE)
        row, before = torch.tensor([1], dtype=torch.int32, device=DEVICE), words.clone()
        implementation.begin_guesses(words, row, history, SIZE, inputs, guesses)  # type: ignore[attr-defined]
        assert guesses.tolist() == wanted_guesses(text, n - 1)
        assert torch.equal(words, before)
        rows = 1 if guesses[0] < 0 else n
        assert inputs.token_ids.tolist() == [text[-1], *(guesses.tolist() if rows > 1 else [0] * (n - 1))]
        table = words[1, Field.TABLE :].tolist()
        for i in range(n):
            position = len(text) - 1 + i
            lens, slot = inputs.context_lens[i].item(), inputs.slot_mapping[i].item()
            if i >= rows:
                assert (lens, slot, inputs.sampling.temperature[i].item()) == (0, -1, 0.0), "padding"
                continue
            assert inputs.positions[i] == position
            assert (lens, slot) == (position + 1, table[position // SIZE] * SIZE + position % SIZE)
            assert inputs.sampling.positions[i] == position + 1
            assert inputs.sampling.top_k[i] == words[1, Field.TOP_K]
            assert inputs.block_tables[i, : position // SIZE + 1].tolist() == table[: position // SIZE + 1]
        for right in {0, 1, n - 1} if rows > 1 else {0}:
            drawn = [*guesses[:right].tolist(), 999_999, *[rng.randrange(9) for _ in range(n - 1 - right)]]
            after, longer = words.clone(), history.clone()
            args = after, row, longer, torch.tensor(drawn, device=DEVICE), guesses
            implementation.end_guesses(*args)  # type: ignore[attr-defined]
            changed = words.clone()
            changed[1, Field.TOKEN], changed[1, Field.POSITION] = 999_999, len(text) + right
            assert torch.equal(after, changed)
            assert longer[: len(text) + right].tolist() == [*text, *drawn[:right]]
            assert torch.equal(longer[len(text) + right :], history[len(text) + right :])


@pytest.mark.parametrize("implementation", [reference, guess_rows])
def test_padding_has_no_guesses(implementation: object) -> None:
    """While a graph is recorded, nothing is written."""
    words = torch.full((2, Field.TABLE + 4), 7, dtype=torch.int32, device=DEVICE)
    history, guesses = torch.full((9,), 7, dtype=torch.int32, device=DEVICE), torch.zeros(3, dtype=torch.int64)
    row, inputs, guesses = torch.tensor([-1], dtype=torch.int32, device=DEVICE), None, guesses.to(DEVICE)
    inputs = DecodeInputs.allocate(4, 4, DEVICE)
    implementation.begin_guesses(words, row, history, SIZE, inputs, guesses)  # type: ignore[attr-defined]
    assert inputs.slot_mapping.tolist() == [-1] * 4
    assert inputs.context_lens.tolist() == [0] * 4
    tokens = torch.tensor([1, 2, 3, 4], device=DEVICE)
    implementation.end_guesses(words, row, history, tokens, guesses)  # type: ignore[attr-defined]
    assert words.unique().tolist() == history.unique().tolist() == [7]
