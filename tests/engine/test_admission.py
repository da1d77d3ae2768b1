"""Test the arithmetic of admission, on groups without an engine."""

from __future__ import annotations

import pytest

from minillm.cache import BlockManager
from minillm.engine.admission import blocks_at_most, blocks_promised, blocks_to_finish_prompt, peak_fits
from minillm.outputs import RequestMetrics
from minillm.params import SamplingParams
from minillm.sequence import Sequence, SequenceGroup, Stage


def group(prompt: int, max_tokens: int, output: int = 0, n: int = 1) -> SequenceGroup:
    """A group of one sequence so far, ``output`` tokens past its prompt."""
    return SequenceGroup(
        request_id="",
        params=SamplingParams(n=n, max_tokens=max_tokens),
        method=None,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        sequences=[Sequence(0, [5] * (prompt + output), prompt)],
        metrics=RequestMetrics(arrival_time=0.0),
        stage=Stage.SPLIT if n == 1 else Stage.PROMPT,
    )


@pytest.mark.parametrize(("prompt", "n", "blocks"), [(7, 1, 2), (8, 1, 3), (9, 1, 3), (7, 3, 4), (8, 3, 5), (9, 3, 5)])
def test_a_prompt_needs_room_for_the_token_behind_it(prompt: int, n: int, blocks: int) -> None:
    """Each sequence needs its own copy of a partly filled block; a full one is shared."""
    assert blocks_to_finish_prompt(group(prompt, 9, n=n), 4) == blocks


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "blocks"), [(8, 8, 1, 4), (8, 9, 1, 5), (8, 8, 3, 8), (9, 7, 3, 8)]
)
def test_the_most_that_a_group_can_hold(prompt: int, max_tokens: int, n: int, blocks: int) -> None:
    assert blocks_at_most(group(prompt, max_tokens, n=n), 4) == blocks


def test_what_a_prompt_holds_is_promised_no_more() -> None:
    cache, running = BlockManager(16, 4), group(40, 9)
    [sequence] = running.sequences
    sequence.table = cache.allocate(0)
    assert blocks_promised(running, 4) == 11
    cache.append(sequence.table, 24)
    sequence.num_computed = 24
    assert blocks_promised(running, 4) == 5
    cache.append(sequence.table, 15)
    sequence.num_computed = 39
    assert blocks_promised(running, 4) == 0, "only the last token is missing"


def test_the_peak_is_reached_when_the_shortest_ends() -> None:
    """Two sequences of 8 prompt tokens: 20 and 12 tokens to come. At token 12 both are there: 16 + 24 tokens."""
    cache = BlockManager(20, 4)
    cache.append(cache.allocate(0), 48)  # most of the pool is taken, or anything would be admitted
    running, candidate = [group(8, 20)], group(8, 12)
    for num_pinned, fits in ((0, True), (10, True), (11, False)):
        assert peak_fits(candidate, running, cache, num_pinned) == fits
    half = [group(8, 20, output=10)]  # it ends first, at token 10, when it has 20, and the other one 10: 16 + 30
    for num_pinned, fits in ((8, True), (9, False)):
        assert peak_fits(candidate, half, cache, num_pinned) == fits
    assert peak_fits(candidate, [], cache, 20), "alone it always fits"
    assert peak_fits(candidate, running, BlockManager(20, 4), 20), "so it does in a pool that is mostly free"
