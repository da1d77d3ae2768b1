"""Test the workloads of `minillm bench memory` against independent facts."""

from __future__ import annotations

import random

from minillm.bench import memory


def test_lengths_have_the_means_of_the_paper() -> None:
    for lengths in (memory.ALPACA, memory.SHAREGPT):
        rng = random.Random(0)
        drawn = [lengths.draw(rng) for _ in range(20_000)]
        assert all(prompt >= 1 <= output and prompt + output <= memory.LONGEST for prompt, output in drawn)
        assert abs(sum(p for p, _ in drawn) / len(drawn) / lengths.prompt_mean - 1) < 0.1
        assert abs(sum(o for _, o in drawn) / len(drawn) / lengths.output_mean - 1) < 0.1


def test_waste_is_nothing_at_one_token_a_block_and_grows_with_the_block() -> None:
    waste = [memory.paged_waste(memory.SHAREGPT, size) for size in (1, 16, 256)]
    assert waste[0] == 0
    assert waste[0] < waste[1] < 0.04 < waste[2]


def test_reserving_the_maximum_wastes_most() -> None:
    waste = [memory.contiguous_waste(memory.SHAREGPT, reserve) for reserve in memory.RESERVATIONS.values()]
    assert waste == sorted(waste, reverse=True)
    assert waste[-1] > 0.3, "even the exact length stands empty for half of its life"


def test_sharing_saves_more_the_more_share() -> None:
    samples = [memory.saved(memory.samples(memory.ALPACA, n)) for n in (1, 4, 6)]
    assert samples[0] == 0 < samples[1] < samples[2] < 5 / 6
    assert memory.saved(memory.beams(memory.ALPACA, 4)) > samples[1]
    assert 0.5 < memory.saved(memory.shared_prefix(memory.SHAREGPT, 1024, 32)) < 1
