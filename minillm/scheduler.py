"""Which sequences run in the next step.

Continuous batching (Orca, Yu et al. 2022) under one budget of tokens per step: every running sequence that only lacks
its last token decodes, and what is left of the budget goes to chunks of prompts, first come, first served (chunked
prefill, Agrawal et al. 2023). When blocks run out, the latest group is preempted as a whole: its blocks are freed and
its tokens computed again later. The oldest group is never preempted, so every request finishes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minillm.cache import BlockManager, BlockTable, OutOfBlocks
from minillm.errors import CapacityError
from minillm.sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class ScheduledChunk:
    """``count`` tokens of one sequence to compute in this step, from ``sequence.num_computed`` on."""

    group: SequenceGroup
    sequence: Sequence
    count: int


@dataclass(frozen=True)
class Schedule:
    """One step: the decoding sequences first (one token each), then the chunks of prompts."""

    decodes: list[ScheduledChunk]
    prefills: list[ScheduledChunk]
    preempted: list[SequenceGroup]

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class Scheduler:
    """Queues and the rules for moving between them.

    ``idle`` holds sequences that nobody computes, kept because their blocks may be forked from again: their blocks are
    given up first, the longest unused one before the others.
    """

    cache: BlockManager
    max_num_seqs: int
    max_num_batched_tokens: int
    waiting: deque[SequenceGroup] = field(default_factory=deque)
    running: list[SequenceGroup] = field(default_factory=list)
    idle: dict[int, Sequence] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group.

        Raises:
            CapacityError: it could never run, even alone.
        """
        n, size = group.params.n, self.cache.block_size
        if n > self.max_num_seqs:
            raise CapacityError(f"n={n} needs {n} sequences at a time, and max_num_seqs is {self.max_num_seqs}")
        longest = group.num_prompt_tokens + group.max_tokens
        shared = group.num_prompt_tokens // size
        needed = shared + n * (-(-longest // size) - shared)
        if needed > self.cache.num_blocks:
            raise CapacityError(
                f"the request can grow to {needed} blocks of {size} tokens ({group.num_prompt_tokens} prompt tokens, "
                f"{n} x {group.max_tokens} new ones) and the cache has {self.cache.num_blocks}; "
                "lower max_tokens or n, or start with more blocks"
            )
        self.waiting.append(group)

    def schedule(self) -> Schedule:
        """Choose the step's work and take the blocks that it writes to."""
        budget = self.max_num_batched_tokens
        decodes: list[ScheduledChunk] = []
        prefills: list[ScheduledChunk] = []
        preempted: list[SequenceGroup] = []

        pending = []
        for group in list(self.running):
            for sequence in group.computing:
                missing = group.num_tokens_to_compute(sequence)
                if missing > 1:
                    pending.append((group, sequence, missing))
                elif group not in preempted and self._make_room(group, sequence, 1, preempted):
                    decodes.append(ScheduledChunk(group, sequence, 1))
                    budget -= 1
        for group, sequence, missing in pending:
            count = min(missing, budget)
            if count > 0 and group not in preempted and self._make_room(group, sequence, count, preempted):
                prefills.append(ScheduledChunk(group, sequence, count))
                budget -= count
        while self.waiting and budget > 0 and not preempted and self._admit(self.waiting[0]):
            group = self.waiting.popleft()
            self.running.append(group)
            sequence = group.computing[0]
            missing = group.num_tokens_to_compute(sequence)
            count = min(missing, budget)
            self.cache.append(_table(sequence), count)
            (decodes if missing == 1 else prefills).append(ScheduledChunk(group, sequence, count))
            budget -= count
        if preempted:
            decodes = [chunk for chunk in decodes if chunk.group not in preempted]
            prefills = [chunk for chunk in prefills if chunk.group not in preempted]
        return Schedule(decodes, prefills, preempted)

    def finish(self, sequence: Sequence) -> None:
        """Free a finished sequence's blocks."""
        if sequence.table is not None:
            self.cache.free(sequence.table)
            sequence.table = None

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of its queue and free its blocks, but those of sequences that were kept idle."""
        for sequence in group.sequences:
            if sequence.seq_id not in self.idle:
                self.finish(sequence)
        if group in self.running:
            self.running.remove(group)
        elif group in self.waiting:
            self.waiting.remove(group)

    # --- idle sequences -----------------------------------------------------------------------------------------------

    def keep_idle(self, sequence: Sequence) -> None:
        self.idle[sequence.seq_id] = sequence

    def release_idle(self, sequence: Sequence) -> None:
        """Free an idle sequence's blocks; nothing happens where pressure has taken them already."""
        self.idle.pop(sequence.seq_id, None)
        self.finish(sequence)
        sequence.num_computed = 0

    def _evict_idle(self, spare: Sequence | None = None) -> bool:
        """Give up the longest unused idle sequence, ``spare`` last. False where there is none."""
        victim = next((s for s in self.idle.values() if s is not spare), spare)
        if victim is None or victim.seq_id not in self.idle:
            return False
        self.release_idle(victim)
        return True

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, group: SequenceGroup, sequence: Sequence, count: int, preempted: list[SequenceGroup]) -> bool:
        """Append room for ``count`` tokens, preempting later groups for it. False where ``group`` itself had to go."""
        while True:
            try:
                self.cache.append(_table(sequence), count)
                return True
            except OutOfBlocks:
                if self._evict_idle():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is group:
                    return False

    def _preempt(self, group: SequenceGroup) -> None:
        """Free a group's blocks and put it at the head of the queue: its tokens will be computed again."""
        self.running.remove(group)
        for sequence in group.sequences:
            self.finish(sequence)
            sequence.num_computed = 0
        group.forked = group.params.n == 1
        group.metrics.num_preemptions += 1
        self.waiting.appendleft(group)

    def _admit(self, group: SequenceGroup) -> bool:
        """Give the group's first sequence a table, if its prompt fits beside what the running groups still need."""
        if sum(running.num_seqs for running in self.running) + group.num_seqs > self.max_num_seqs:
            return False
        sequence, parent = group.computing[0], group.parent
        while True:
            shared = 0 if parent is None or parent.table is None else _shared_length(parent, sequence)
            needed = self._blocks_to_finish_prompt(group) - shared // self.cache.block_size
            if needed + self._blocks_promised() <= self.cache.num_free:
                break
            if not self._evict_idle(spare=parent):
                return False
        if parent is not None and parent.table is not None:
            sequence.table = self.cache.fork(parent.table, sequence.seq_id, shared)
            sequence.num_computed = shared
            group.num_cached_tokens = max(group.num_cached_tokens, shared)
        else:
            sequence.table = self.cache.allocate(sequence.seq_id)
        return True

    def _blocks_to_finish_prompt(self, group: SequenceGroup) -> int:
        """Blocks for all tokens that the group has so far, and one more token for each of its sequences."""
        size = self.cache.block_size
        shared = group.num_prompt_tokens // size
        lengths = [len(sequence.token_ids) for sequence in group.unfinished]
        lengths += [group.num_prompt_tokens] * (group.num_seqs - len(lengths))
        return shared + sum(-(-(length + 1) // size) - shared for length in lengths)

    def _blocks_promised(self) -> int:
        """Blocks that running groups still need to finish their prompts."""
        promised = 0
        for group in self.running:
            if any(group.num_tokens_to_compute(sequence) > 1 for sequence in group.computing):
                held = {block for s in group.sequences if s.table is not None for block in s.table.blocks}
                promised += max(0, self._blocks_to_finish_prompt(group) - len(held))
        return promised


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, f"sequence {sequence.seq_id} runs without a block table"
    return sequence.table


def _shared_length(parent: Sequence, sequence: Sequence) -> int:
    """How many of ``sequence``'s tokens ``parent`` has computed, the last one excepted: its logits are needed."""
    limit = min(parent.num_computed, len(sequence.token_ids) - 1)
    ours, theirs = sequence.token_ids, parent.token_ids
    if ours[:limit] == theirs[:limit]:
        return limit
    return next(i for i in range(limit) if ours[i] != theirs[i])
