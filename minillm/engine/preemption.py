"""Preemption: take all of a group's blocks when blocks run out, and resume the group later.

The blocks move to host memory (swap), or are freed and their tokens are computed again later (recompute).
"""

from dataclasses import dataclass, field

from minillm.cache import BlockManager, CacheEvent, SwapSpace, fork_into
from minillm.engine.idle import IdleSequences
from minillm.sequence import Schedule, Sequence, SequenceGroup, Stage


@dataclass
class Preemption:
    """Preempts groups and restores them."""

    cache: BlockManager
    swap: SwapSpace = field(default_factory=lambda: SwapSpace(0))
    count: int = 0  # groups preempted, ever

    def __post_init__(self) -> None:
        self.idle = IdleSequences(self.cache)

    def take_out(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Preempt a running group: swap its blocks out to host memory if all of them fit, else free them."""
        self.count += 1
        group.metrics.num_preemptions += 1
        schedule.preempted.append(group)
        holders = [sequence for sequence in group.unfinished if sequence.table is not None]
        for sequence in holders:
            self.cache.emit(CacheEvent("preempt", sequence.seq_id, tuple(sequence.blocks)))
        pairs = self.swap.swap_out(self.cache, [(each.own_table, each.num_computed) for each in holders])
        if pairs:
            schedule.moves.out += pairs
            group.stage = Stage.SAVED
            for sequence in holders:
                sequence.table = None
        else:
            self.start_over(group)

    def bring_back(self, group: SequenceGroup, promised: int, may_wait: bool, schedule: Schedule) -> bool:
        """Swap a group in from host memory, if the pool has enough free blocks for it and its next tokens.

        Args:
            promised: blocks that running groups still need for their prompts.
            may_wait: whether blocks will become free, because a group runs or a prompt is being read from disk.

        Returns:
            True if the group was restored. If False, the group's stage says why: it is still SAVED if the group must
            wait, and another stage if the group's tokens must be computed again.
        """
        saved = [sequence for sequence in group.unfinished if sequence.seq_id in self.swap.saved]
        unsaved = sum(sequence.num_tokens - sequence.num_computed for sequence in saved) // self.cache.block_size
        seq_ids = [sequence.seq_id for sequence in saved]
        returning = self.swap.blocks_needed(seq_ids)
        while returning + 2 * len(seq_ids) + unsaved + promised > self.cache.num_free:
            if self.idle.evict():
                continue
            if may_wait:
                return False
            if returning + len(seq_ids) <= self.cache.num_free:
                break  # no block will become free, and the group may need fewer than this upper bound
            self.start_over(group)
            return False
        tables, pairs = self.swap.swap_in(self.cache, seq_ids)
        for sequence in group.unfinished:
            sequence.table = tables.get(sequence.seq_id)
        schedule.moves.back += pairs
        group.stage = _stage_of(group)
        return True

    def fork_into(self, child: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Let ``child`` share the blocks of ``parent``'s first ``num_tokens`` tokens, in the pool or in host memory.

        The device has already forked its copies of the tables. This updates the CPU's tables; see
        `cache.rewriting.fork_into`.
        """
        if child.table is not None and parent.table is not None:
            fork_into(self.cache, child.table, parent.table, num_tokens)
        elif child.seq_id in self.swap.saved:
            self.swap.fork_into(child.seq_id, parent.seq_id, num_tokens // self.cache.block_size)

    def start_over(self, group: SequenceGroup) -> None:
        """Discard all computed K and V of a group, on the device and in host memory. They are computed again."""
        for sequence in group.unfinished:
            self.free(sequence)
            sequence.num_computed = 0
        group.stage = _stage_of(group)

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's blocks, on the device and in host memory."""
        if sequence.table is not None:
            self.cache.free(sequence.table)
            sequence.table = None
        self.swap.discard(sequence.seq_id)


def _stage_of(group: SequenceGroup) -> Stage:
    """Return PROMPT if the group's sequences share a prompt that is not computed yet, else SPLIT."""
    alone, leader = group.params.num_sequences == 1, group.unfinished[0]
    return Stage.SPLIT if alone or leader.num_computed >= group.num_prompt_tokens else Stage.PROMPT
