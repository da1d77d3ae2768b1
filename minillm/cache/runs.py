"""Common prefixes of two id lists, and runs of consecutive ids."""

from collections.abc import Iterator, Sequence


def contiguous_runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield every run of consecutive ids, in order, as (index of the run's first id, first id, length)."""
    start, count = 0, len(ids)
    for end in range(1, count + 1):
        if end == count or ids[end] != ids[end - 1] + 1:
            yield start, ids[start], end - start
            start = end


def common_length(one: Sequence[object], other: Sequence[object], start: int = 0) -> int:
    """Return the length of the common prefix. The caller knows that the first ``start`` ids are equal."""
    length = min(len(one), len(other))
    if one[start:length] == other[start:length]:  # the usual case, and much faster than a loop
        return length
    return next((i for i in range(start, length) if one[i] != other[i]), length)
