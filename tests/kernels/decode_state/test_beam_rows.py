"""Test beam search on the device: Triton against the reference, and the reference against the search on the CPU."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

from lib.kernels import DEVICE
from minillm.beams.search import BeamSearch, Candidate
from minillm.kernels import Field, SearchField
from minillm.kernels import reference as other_ops
from minillm.kernels.decode_state import reference

pytest.importorskip("triton")
from minillm.kernels.cache import blocks
from minillm.kernels.decode_state import beams as beam_rows

VOCAB = 80
IMPLEMENTATIONS: list[Any] = [reference, beam_rows]


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class Case:
    """Searches of several widths in shuffled rows, then padding, and the likely next tokens of each beam."""

    def __init__(self, seed: int, shapes: list[tuple[int, list[int]]], count: int, block_size: int = 4) -> None:
        rng = random.Random(seed)
        self.shapes, self.count, self.block_size = shapes, count, block_size
        beams = sum(width for width, _ in shapes)
        n = beams + rng.randint(0, 3)
        rows = rng.sample(range(n + 4), beams) + [-1] * (n - beams)
        words = torch.randint(0, 1000, (n + 4, Field.TABLE + 40), dtype=torch.int32)
        searches = torch.zeros(len(shapes) + 1, SearchField.WORDS, dtype=torch.int32)  # the last one is none
        self.keeps, first = [], 0
        for number, (width, ends) in enumerate(shapes):
            keep = max(2, 1 + len(ends)) * width
            self.keeps.append(keep)
            searches[number, :3] = torch.tensor([first, width, keep])
            searches[number, SearchField.ENDS :] = torch.tensor(ends + [-1] * (8 - len(ends)))
            position = rng.randrange(1, 40 * block_size)
            for row, rank in zip(rows[first : first + width], rng.sample(range(width), width), strict=True):
                words[row, Field.RANK], words[row, Field.POSITION] = rank, position
                words[row, Field.LOGPROB] = bits(-rng.random())
            first += width
        values, ids = torch.randn(n, VOCAB).log_softmax(-1).sort(descending=True)
        self.words, self.rows = words.to(DEVICE), torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.searches, self.at = searches.to(DEVICE), rows
        self.values, self.ids = (each[:, :count].contiguous().to(DEVICE) for each in (values, ids))

    def choose(self, module: Any, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = max(width for width, _ in self.shapes)
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = module.choose_beams(
            words, self.rows, self.searches, self.values, self.ids, VOCAB, width
        )
        return result


SHAPES: list[tuple[list[tuple[int, list[int]]], int]] = [
    ([(4, [2])], 8),
    ([(1, []), (3, [5, 6]), (2, [])], 16),
    ([(8, [1, 2, 3, 4, 5, 6, 7, 8]), (4, [9])], VOCAB),
    ([(2, [])] * 5, 4),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("shapes", "count"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_that_of_the_search(
    implementation: Any, shapes: list[tuple[int, list[int]]], count: int, seed: int
) -> None:
    """The oracle is `BeamSearch`, which is compared with transformers elsewhere."""
    case = Case(seed, shapes, count)
    # Ends that are likely, and beams that all want the same: otherwise every beam has its own child.
    case.values[:, : count // 2] += 0.5 * torch.randn(1, device=DEVICE)
    words = case.words.clone()
    before = words.clone()
    parents, logprobs, choices = case.choose(implementation, words)
    floats, first = before.view(torch.float32), 0
    for number, (width, ends) in enumerate(case.shapes):
        keep, rows = case.keeps[number], case.at[first : first + width]
        ranked = sorted(range(width), key=lambda slot: int(before[rows[slot], Field.RANK]))
        found = [
            Candidate(float(case.values[first + slot, i] + floats[rows[slot], Field.LOGPROB]), beam, int(token))
            for beam, slot in enumerate(ranked)
            for i, token in enumerate(case.ids[first + slot].tolist())
        ]
        found = sorted(found, key=lambda each: -each.logprob)[:keep]
        assert logprobs[number, :keep].tolist() == [each.logprob for each in found]
        assert choices[number, 0, :keep].tolist() == [ranked[each.beam] for each in found]
        assert choices[number, 1, :keep].tolist() == [each.token_id for each in found]
        search = BeamSearch[Candidate](width, 1.0, "never", 1000)
        chosen = search.advance(found, lambda each: each.token_id in ends, lambda each: each)  # noqa: B023
        got = {int(words[row, Field.RANK]): (slot, row) for slot, row in enumerate(rows)}
        assert sorted(got) == list(range(width))
        for rank, candidate in enumerate(chosen):
            slot, row = got[rank]
            assert int(words[row, Field.TOKEN]) == candidate.token_id
            assert float(words.view(torch.float32)[row, Field.LOGPROB]) == candidate.logprob
            assert int(parents[first + slot]) == first + ranked[candidate.beam]
        firsts = {ranked[each.beam] for each in chosen}
        assert all(int(parents[first + slot]) == first + slot for slot in firsts), "a beam with children stays"
        first += width
    written = [Field.TOKEN, Field.LOGPROB, Field.RANK]
    words[:, written] = before[:, written]
    assert torch.equal(words, before), "nothing else is written"


@pytest.mark.parametrize("seed", range(6))
def test_both_choose_and_fork_alike(seed: int) -> None:
    shapes, count = SHAPES[seed % len(SHAPES)]
    case = Case(seed, shapes, count, block_size=random.Random(seed).choice((1, 4, 16)))
    results = []
    for module in IMPLEMENTATIONS:
        words = case.words.clone()
        parents, *_ = case.choose(module, words)
        copies = module.fork_rows(words, case.rows, parents, case.block_size)
        real = case.rows >= 0
        results.append((words.tolist(), parents[real].tolist(), copies.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_dead_row_takes_full_blocks_and_copies_the_last(implementation: Any) -> None:
    words = torch.zeros(4, Field.TABLE + 6, dtype=torch.int32, device=DEVICE)
    for row in range(4):
        words[row, Field.POSITION] = 10
        words[row, Field.TABLE :] = torch.arange(10 * row, 10 * row + 6)
    rows = torch.tensor([3, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    parents = torch.tensor([0, 0, 77, 3], dtype=torch.int32, device=DEVICE)
    copies = implementation.fork_rows(words, rows, parents, 4)
    assert words[1, Field.TABLE :].tolist() == [30, 31, 12, 13, 14, 15]
    assert words[0, Field.TABLE :].tolist() == [0, 1, 2, 3, 4, 5]
    assert words[3, Field.TABLE :].tolist() == [30, 31, 32, 33, 34, 35]
    assert copies.tolist() == [[-1, -1], [32, 12], [-1, -1], [-1, -1]]
    words[:, Field.POSITION] = 8
    assert implementation.fork_rows(words, rows, parents, 4).tolist() == [[-1, -1]] * 4, "no block is filled partly"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_writes_nowhere(implementation: Any) -> None:
    """Run it as during graph capture: the searches are another step's, and all rows are padding."""
    case = Case(0, [(4, [2]), (2, [])], 8)
    case.rows.fill_(-1)
    words = case.words.clone()
    parents, *_ = case.choose(implementation, words)
    copies = implementation.fork_rows(words, case.rows, parents, 4)
    assert torch.equal(words, case.words)
    assert bool((copies == -1).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sign", [0, -(1 << 31)])
def test_nan_comes_first_and_no_token_is_out_of_range(implementation: Any, sign: int) -> None:
    case = Case(1, [(4, [])], 8)
    nan = torch.tensor(0x7FC00000 + sign, dtype=torch.int32).view(torch.float32)
    case.values[2] = nan.to(DEVICE)
    case.ids[2] = torch.tensor([-(1 << 40), 1 << 30, VOCAB, -1] * 2, device=DEVICE)
    words = case.words.clone()
    _, logprobs, choices = case.choose(implementation, words)
    assert bool(logprobs[0, :8].isnan().all())
    tokens = torch.cat((choices[0, 1], words[case.rows[:4].long(), Field.TOKEN]))
    assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
    assert bool(((choices[0, 0] >= 0) & (choices[0, 0] < 4)).all())


@pytest.mark.parametrize("implementation", [other_ops, blocks])
def test_a_pair_of_minus_one_copies_nothing(implementation: Any) -> None:
    pool = torch.randn(2, 2, 5, 4, 1, 8, device=DEVICE)
    before = pool.clone()
    copies = torch.tensor([[-1, -1], [1, 3], [-1, -1]], device=DEVICE)
    implementation.block_copy(pool, copies)
    before[:, :, 3] = before[:, :, 1]
    assert torch.equal(pool, before)
