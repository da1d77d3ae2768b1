"""Lists of ids, of blocks or of tokens: the beginning that two of them share, and runs of consecutive ids."""

from collections.abc import Iterator, Sequence


def contiguous_runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """All runs of consecutive ids, in their order, each as (index of its first id, that id, how many)."""
    start, count = 0, len(ids)
    for end in range(1, count + 1):
        if end == count or ids[end] != ids[end - 1] + 1:
            yield start, ids[start], end - start
            start = end


def common_length(one: Sequence[object], other: Sequence[object], start: int = 0) -> int:
    """How many first ids both have; the first ``start`` are known to be the same."""
    length = min(len(one), len(other))
    if one[start:length] == other[start:length]:  # mostly so, and much quicker than a look at each
        return length
    return next((i for i in range(start, length) if one[i] != other[i]), length)
