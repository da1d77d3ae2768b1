from __future__ import annotations

from minillm.cache.runs import common_length, contiguous_runs


def test_runs_of_consecutive_ids() -> None:
    assert list(contiguous_runs([])) == []
    assert list(contiguous_runs([7])) == [(0, 7, 1)]
    assert list(contiguous_runs((4, 5, 6, 2, 9, 10))) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]


def test_the_length_of_the_common_beginning() -> None:
    assert common_length([], [1]) == 0
    assert common_length([1, 2, 3], [1, 2]) == 2
    assert common_length((1, 2, 3), [1, 2, 3]) == 3
    assert common_length([1, 2, 3], [1, 5, 3]) == 1
    assert common_length([1, 2, 3, 4], [9, 2, 3, 5], 1) == 3
