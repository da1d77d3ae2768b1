"""Idle sequences: ended sequences that keep their blocks, because later requests may fork from them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minillm.cache import BlockManager
from minillm.cache.runs import common_length
from minillm.errors import CapacityError
from minillm.sequence import Sequence


@dataclass
class IdleSequences:
    """Idle sequences, which are evicted when blocks run out, and pinned sequences, which are never evicted."""

    cache: BlockManager
    idle: dict[int, Sequence] = field(default_factory=dict)  # by seq_id, the longest unused first
    pinned: dict[int, Sequence] = field(default_factory=dict)

    def keep(self, sequence: Sequence) -> None:
        """Keep a sequence's blocks until the sequence is released, or evicted because other sequences need blocks."""
        self.idle[sequence.seq_id] = sequence

    def keep_ended(self, sequence: Sequence, new_seq_id: Callable[[], int]) -> None:
        """Keep the blocks of a sequence that has just ended. Exclude its last token, even if this token has K and V.

        The token has K and V if the next step was launched before the CPU knew that the sequence had ended. Then the
        sequence is replaced by a fork without the last token, which needs a new sequence id.
        """
        table, last = sequence.own_table, len(sequence.token_ids) - 1
        if table.num_tokens > last and sequence.num_output_tokens:
            sequence.seq_id, sequence.num_computed = new_seq_id(), last
            sequence.table = self.cache.fork(table, sequence.seq_id, last)
            self.cache.free(table)
        self.keep(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free an idle or pinned sequence's blocks, if they have not been evicted."""
        self.idle.pop(sequence.seq_id, None)
        self.pinned.pop(sequence.seq_id, None)
        if sequence.table is not None:
            self.cache.free(sequence.table)
        sequence.table, sequence.num_computed = None, 0

    def evict(self, spare: Sequence | None = None) -> bool:
        """Evict the least recently used idle sequence. Evict ``spare`` only if no other sequence is idle.

        Return whether a sequence was evicted.
        """
        victim = next((s for s in self.idle.values() if s is not spare), spare)
        if victim is None or victim.seq_id not in self.idle:
            return False
        self.release(victim)
        return True

    def pin(self, sequence: Sequence, groups_at_most: Iterable[int]) -> None:
        """Pin an idle sequence, so that its blocks are never evicted. Pinning it again does nothing.

        Args:
            groups_at_most: for each running or waiting request, the maximum number of blocks that it may need.

        Raises:
            CapacityError: the sequence was evicted, more than half of the pool would be pinned, or a running or waiting
                request could not run any more.
        """
        if sequence.seq_id in self.pinned:
            return
        if sequence.table is None:
            raise CapacityError("other requests took the prefix's blocks; pin it again, or start with more blocks")
        total, num_blocks = self.num_pinned_blocks + len(sequence.blocks), self.cache.num_blocks
        largest, more = max(groups_at_most, default=0), "or start with more blocks"
        if 2 * total > num_blocks:
            reason = f"{total} of {num_blocks} blocks would be pinned, and half of them may be"
            raise CapacityError(f"{reason}; unpin another prefix, {more}")
        if largest > num_blocks - total:
            reason = (
                f"{total} blocks would be pinned, and a request that is under way may need {largest} of {num_blocks}"
            )
            raise CapacityError(f"{reason}; wait until it has finished, {more}")
        self.pinned[sequence.seq_id] = self.idle.pop(sequence.seq_id)

    def unpin(self, sequence: Sequence) -> None:
        """Free a pinned sequence's blocks. Full blocks stay in the prefix cache until their memory is needed."""
        if sequence.seq_id in self.pinned:
            self.release(sequence)

    @property
    def num_pinned_blocks(self) -> int:
        return len({block for sequence in self.pinned.values() for block in sequence.blocks})

    def tokens_that_fit(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return how many tokens each of a prompt's ``num_sequences`` completions can have if no other request runs."""
        full, rest = divmod(num_prompt_tokens, self.cache.block_size)
        blocks = (self.cache.num_blocks - self.num_pinned_blocks - full) // num_sequences
        return blocks * self.cache.block_size - rest


def shared_length(parent: Sequence | None, ours: list[int], salt: str | None = None) -> int:
    """Return how many of the first tokens of ``ours`` have K and V in the blocks of ``parent``.

    The last token of ``ours`` never counts: it must be computed, because its logits are needed. Return 0 if ``parent``
    has no blocks or another salt.
    """
    if parent is None or parent.table is None or parent.table.salt != salt:
        return 0
    limit = min(parent.num_computed, len(ours) - 1)
    return common_length(ours[:limit], parent.token_ids[:limit])
