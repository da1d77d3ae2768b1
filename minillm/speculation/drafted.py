"""Record for each block how many of its tokens the draft model has computed.

The draft model keeps its K and V under the same block ids in a pool of its own. It computes a token later than the
target model, or never. So its K and V may be missing in a block that was copied, moved to host memory or found in the
prefix cache.
"""

from collections.abc import Sequence

from minillm.cache import HostMoves


class Drafted:
    """Records how much of each block the draft model has computed, for the blocks on the device and in host memory.

    It keeps one count per block: the number of slots, from the block's first slot on, that have the draft model's K and
    V.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._counts, self._host_counts = [0] * num_blocks, [0] * num_host_blocks

    def forget(self) -> None:
        """Assume that the draft model has computed nothing."""
        self._counts = [0] * len(self._counts)
        self._host_counts = [0] * len(self._host_counts)

    def move(self, moves: HostMoves, copies: Sequence[tuple[int, int]]) -> None:
        """Move the counts with a step's blocks: out to host memory, back, and to copies, in this order."""
        counts, host_counts = self._counts, self._host_counts
        for block, host in moves.out:
            host_counts[host] = counts[block]
        for host, block in moves.back:
            counts[block] = host_counts[host]
        for source, destination in copies:
            counts[destination] = counts[source]

    def overwrite(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Record that positions ``first`` to ``end`` (exclusive) of a sequence get new tokens.

        The draft model's K and V from ``first`` on are then invalid. ``blocks`` is the sequence's block table.
        """
        size, counts = self._block_size, self._counts
        at = first // size
        counts[blocks[at]] = min(counts[blocks[at]], first % size)
        for block in blocks[at + 1 : -(-end // size)]:
            counts[block] = 0

    def note(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Record that the draft model has computed positions ``first`` to ``end`` (exclusive) of a table."""
        size, counts = self._block_size, self._counts
        for block in blocks[first // size : end // size]:
            counts[block] = size
        if end % size:
            counts[blocks[end // size]] = end % size

    def length(self, blocks: Sequence[int]) -> int:
        """Return how many tokens of a sequence, from its first token on, the draft model has computed without a gap.

        ``blocks`` is the sequence's block table.
        """
        size, counts = self._block_size, self._counts
        for number, block in enumerate(blocks):
            if counts[block] < size:
                return number * size + counts[block]
        return len(blocks) * size
