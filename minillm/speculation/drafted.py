"""Of each block of a pool, how much of it a second model has computed, too.

The second model's K and V lie under the same block ids in a pool of its own. They are computed later, or never, so a
block that is copied, moved to the host or found by its tokens may hold them or not. What is known is the number of a
block's first slots that hold the second model's K and V of the very tokens that the first model's are of.
"""

from collections.abc import Sequence

from minillm.cache import HostMoves


class Drafted:
    """The books of ``num_blocks`` blocks and ``num_host_blocks`` on the host."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._counts, self._host_counts = [0] * num_blocks, [0] * num_host_blocks

    def forget(self) -> None:
        """Trust nothing that was computed."""
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
        """Other tokens come to the slots from ``first`` to ``end`` (exclusive) of a table."""
        size, counts = self._block_size, self._counts
        at = first // size
        counts[blocks[at]] = min(counts[blocks[at]], first % size)
        for block in blocks[at + 1 : -(-end // size)]:
            counts[block] = 0

    def note(self, blocks: Sequence[int], first: int, end: int) -> None:
        """The second model has computed the tokens from ``first`` to ``end`` (exclusive) of a table."""
        size, counts = self._block_size, self._counts
        for block in blocks[first // size : end // size]:
            counts[block] = size
        if end % size:
            counts[blocks[end // size]] = end % size

    def length(self, blocks: Sequence[int]) -> int:
        """The first tokens of a table that the second model has computed."""
        size, counts = self._block_size, self._counts
        for number, block in enumerate(blocks):
            if counts[block] < size:
                return number * size + counts[block]
        return len(blocks) * size
