"""Preemption: take a whole group out of the pool, and bring it back later.

Its blocks move to host memory (swap), or are freed and its tokens computed again (recompute).
"""

from dataclasses import dataclass, field

from minillm.cache import BlockManager, CacheEvent, SwapSpace, fork_into
from minillm.engine.idle import IdleSequences
from minillm.sequence import Schedule, Sequence, SequenceGroup, Stage


@dataclass
class Preemption:
    """Takes groups out of the pool and brings them back."""

    cache: BlockManager
    swap: SwapSpace = field(default_factory=lambda: SwapSpace(0))
    count: int = 0  # groups preempted, ever

    def __post_init__(self) -> None:
        self.idle = IdleSequences(self.cache)

    def take_out(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Free a running group's blocks; first copy them to host memory, if all of them fit."""
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

    def bring_back(self, group: SequenceGroup, promised: int, running: bool, schedule: Schedule) -> bool:
        """Restore a saved group's tables, if all of it and its next tokens fit.

        Args:
            promised: blocks that running groups will need.
            running: whether any group runs, so that blocks will become free.

        Returns:
            False if it has to wait or to start over, as its stage then says.
        """
        saved = [sequence for sequence in group.unfinished if sequence.seq_id in self.swap.saved]
        unsaved = sum(sequence.num_tokens - sequence.num_computed for sequence in saved) // self.cache.block_size
        seq_ids = [sequence.seq_id for sequence in saved]
        returning = self.swap.blocks_needed(seq_ids)
        while returning + 2 * len(seq_ids) + unsaved + promised > self.cache.num_free:
            if self.idle.evict():
                continue
            if running:
                return False
            if returning + len(seq_ids) <= self.cache.num_free:
                break  # nothing will ever become free: the largest need is not the real one
            self.start_over(group)
            return False
        tables, pairs = self.swap.swap_in(self.cache, seq_ids)
        for sequence in group.unfinished:
            sequence.table = tables.get(sequence.seq_id)
        schedule.moves.back += pairs
        group.stage = _stage_of(group)
        return True

    def fork_into(self, child: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Let ``child`` share the blocks of ``parent``'s first ``num_tokens`` tokens, on the device or the host.

        The device has already forked the rows: see `cache.rewriting.fork_into`.
        """
        if child.table is not None and parent.table is not None:
            fork_into(self.cache, child.table, parent.table, num_tokens)
        elif child.seq_id in self.swap.saved:
            self.swap.fork_into(child.seq_id, parent.seq_id, num_tokens // self.cache.block_size)

    def start_over(self, group: SequenceGroup) -> None:
        """Discard everything computed of a group, on the device and the host; its tokens are computed again."""
        for sequence in group.unfinished:
            self.free(sequence)
            sequence.num_computed = 0
        group.stage = _stage_of(group)

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's blocks, on the device and the host."""
        if sequence.table is not None:
            self.cache.free(sequence.table)
            sequence.table = None
        self.swap.discard(sequence.seq_id)


def _stage_of(group: SequenceGroup) -> Stage:
    """Return SPLIT if each unfinished sequence can continue alone: a prompt that several share is computed."""
    alone, leader = group.params.num_sequences == 1, group.unfinished[0]
    return Stage.SPLIT if alone or leader.num_computed >= group.num_prompt_tokens else Stage.PROMPT
