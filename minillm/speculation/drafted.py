"""The part of each block of a pool that a draft model has also computed.

The draft model's K and V have the same block ids in a second pool. They are computed later, or never, so a block that
is copied, moved to the host or found by its tokens may lack them. Known is the number of first slots that hold the
draft model's K and V of the same tokens.
"""

from collections.abc import Sequence

from minillm.cache import HostMoves


class Drafted:
    """The counts of ``num_blocks`` blocks and of ``num_host_blocks`` on the host."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._counts, self._host_counts = [0] * num_blocks, [0] * num_host_blocks

    def forget(self) -> None:
        """Assume that nothing is computed."""
        self._counts = [0] * len(self._counts)
        self._host_counts = [0] * len(self._host_counts)

    def move(self, moves: HostMoves, copies: Sequence[tuple[int, int]]) -> None:
        """Follow a step's blocks to the host, back, and to their copies, in this order."""
        counts, host_counts = self._counts, self._host_counts
        for block, host in moves.out:
            host_counts[host] = counts[block]
        for host, block in moves.back:
            counts[block] = host_counts[host]
        for source, destination in copies:
            counts[destination] = counts[source]

    def overwrite(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Reset the slots from ``first`` to ``end`` (exclusive) of a table: they get other tokens."""
        size, counts = self._block_size, self._counts
        at = first // size
        counts[blocks[at]] = min(counts[blocks[at]], first % size)
        for block in blocks[at + 1 : -(-end // size)]:
            counts[block] = 0

    def note(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Note that the draft model has computed the tokens from ``first`` to ``end`` (exclusive) of a table."""
        size, counts = self._block_size, self._counts
        for block in blocks[first // size : end // size]:
            counts[block] = size
        if end % size:
            counts[blocks[end // size]] = end % size

    def length(self, blocks: Sequence[int]) -> int:
        """Return how many first tokens of a table the draft model has computed."""
        size, counts = self._block_size, self._counts
        for number, block in enumerate(blocks):
            if counts[block] < size:
                return number * size + counts[block]
        return len(blocks) * size
