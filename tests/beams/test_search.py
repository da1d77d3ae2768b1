"""The rules by which a search ends and keeps its finished beams, on numbers alone."""

from __future__ import annotations

import math

import pytest

from minillm.beams.search import BeamSearch, Candidate, Finished
from minillm.params import MAX_TOKENS, BeamSearchParams

END = 0


def search(penalty: float, early: bool | str, finished: list[float] | None = None) -> BeamSearch[int]:
    """A search of width 2 that may take 10 tokens; with ``finished`` scores, one that has taken one token."""
    beams = [Finished(score, score, 0) for score in finished or []]
    return BeamSearch(2, penalty, early, 10, num_tokens=1 if finished else 0, finished=beams)


def advance(searching: BeamSearch[int], *candidates: tuple[float, int]) -> list[float]:
    """Take a step with (log-probability, token) pairs; returns the log-probabilities that go on."""
    found = [Candidate(logprob, 0, token) for logprob, token in candidates]
    survivors = searching.advance(found, lambda each: each.token_id == END, lambda each: each.token_id)
    return [each.logprob for each in survivors]


def test_as_many_finished_beams_as_the_width_are_kept_the_best_first() -> None:
    searching = search(1.0, False)
    assert advance(searching, (-0.2, 1), (-1.0, END), (-1.1, 2)) == [-0.2, -1.1]
    assert advance(searching, (-0.3, 1), (-1.2, END), (-1.3, 2)) == [-0.3, -1.3]
    assert advance(searching, (-0.4, 1), (-0.9, END), (-1.5, 2)) == [-0.4, -1.5]
    assert [beam.score for beam in searching.finished] == pytest.approx([-0.3, -0.6])


def test_what_ends_below_the_width_is_not_finished() -> None:
    searching = search(1.0, False)
    assert advance(searching, (-0.2, 1), (-0.3, 2), (-0.4, END), (-0.5, 3)) == [-0.2, -0.3]
    assert searching.finished == []


@pytest.mark.parametrize(
    ("penalty", "early", "running", "done"),
    [
        (1.0, True, -0.1, True),  # as many have ended as there are beams
        (1.0, False, -0.1, False),
        (1.0, "never", -0.1, False),
        (1.0, False, -1.0, False),  # -0.5 at 2 tokens: better than the worst that has ended
        (1.0, False, -1.9, True),
        (1.0, "never", -1.9, False),  # -0.19 at 10
        (1.0, "never", -9.1, True),
        (-1.0, False, -0.4, False),  # -0.8 at 2
        (-1.0, "never", -0.4, False),  # longer only gets worse
        (-1.0, "never", -0.5, True),
    ],
)
def test_a_search_is_over_when_no_beam_can_do_better(
    penalty: float, early: bool | str, running: float, done: bool
) -> None:
    searching = search(penalty, early, finished=[-0.3, -0.9])
    advance(searching, (running, 1), (running - 0.1, 2))
    assert searching.done == done


def test_so_many_candidates_that_enough_of_them_do_not_end() -> None:
    assert [search(1.0, False).num_candidates(ends) for ends in (0, 1, 2, 3)] == [4, 4, 6, 8]


@pytest.mark.parametrize("penalty", [40.0, -40.0])
@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS - 1])
def test_scores_are_numbers_for_any_penalty_and_length(penalty: float, num_tokens: int) -> None:
    params = BeamSearchParams(length_penalty=penalty, early_stopping="never")
    searching: BeamSearch[int] = BeamSearch(1, params.length_penalty, "never", MAX_TOKENS, num_tokens=num_tokens)
    advance(searching, (-1e6, END), (-2e6, 1))
    assert math.isfinite(searching.finished[0].score)
