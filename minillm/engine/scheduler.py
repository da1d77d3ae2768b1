"""Which sequences run in the next step.

Continuous batching (Orca, Yu et al. 2022) under one budget of tokens per step: every running sequence that only lacks
its last token decodes, and what is left of the budget goes to chunks of prompts, first come, first served (chunked
prefill, Agrawal et al. 2023). When blocks run out, the latest group is preempted as a whole: its blocks move to the
host (swap), or are freed and its tokens computed again later (recompute). The oldest group is never preempted, so every
request finishes.

A group is admitted when its prompt fits, and when the peak that it and the running ones are heading for does, too, as
in LightLLM's router: after the i-th of the running sequences to finish, those that are left hold what they hold now and
i times as many tokens more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minillm.cache import BlockManager, BlockTable, CacheEvent, OutOfBlocks, SwapSpace
from minillm.errors import CapacityError
from minillm.runs import common_length
from minillm.sequence import Sequence, SequenceGroup


@dataclass(slots=True)  # not frozen: made for every sequence at every step, and freezing triples its cost
class ScheduledChunk:
    """``count`` tokens of one sequence to compute in this step, from ``sequence.num_computed`` on."""

    group: SequenceGroup
    sequence: Sequence
    count: int


@dataclass(slots=True)
class Schedule:
    """One step: the decoding sequences first (one token each, their last), then the chunks of prompts."""

    decodes: list[ScheduledChunk]
    prefills: list[ScheduledChunk]
    preempted: list[SequenceGroup]
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block), before anything is written
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block), before the copies on write

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
    swap: SwapSpace = field(default_factory=lambda: SwapSpace(0))
    admission: str = "predicted"  # or "optimistic"
    prefill_chunk: int | None = None  # tokens of a step in which some decode and others have prompts; None: the budget
    waiting: deque[SequenceGroup] = field(default_factory=deque)
    running: list[SequenceGroup] = field(default_factory=list)
    idle: dict[int, Sequence] = field(default_factory=dict)
    pinned: dict[int, Sequence] = field(default_factory=dict)
    num_preemptions: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group.

        Raises:
            CapacityError: it could never run, even alone.
        """
        n, size = group.params.num_sequences, self.cache.block_size
        if n > self.max_num_seqs:
            raise CapacityError(
                f"the request needs {n} sequences at a time (n or beam_width), and max_num_seqs is {self.max_num_seqs}"
            )
        needed, pinned = self._blocks_at_most(group), self.num_pinned_blocks
        if needed > self.cache.num_blocks - pinned:
            raise CapacityError(
                f"the request can grow to {needed} blocks of {size} tokens ({group.num_prompt_tokens} prompt tokens, "
                f"{n} x {group.max_tokens} new ones) and the cache has {self.cache.num_blocks}"
                + (f", {pinned} of them pinned" if pinned else "")
                + "; lower max_tokens or n, or start with more blocks"
            )
        self.waiting.append(group)

    def _blocks_at_most(self, group: SequenceGroup) -> int:
        """What a group holds if none of its sequences ends before it has to."""
        size = self.cache.block_size
        shared = group.num_prompt_tokens // size
        longest = group.num_prompt_tokens + group.max_tokens
        return shared + group.params.num_sequences * (-(-longest // size) - shared)

    def schedule(self) -> Schedule:
        """Choose the step's work and take the blocks that it writes to."""
        decodes: list[ScheduledChunk] = []
        prefills: list[ScheduledChunk] = []
        preempted: list[SequenceGroup] = []
        swap_out: list[tuple[int, int]] = []
        swap_in: list[tuple[int, int]] = []
        pending = []
        for group in list(self.running):
            if len(group.sequences) == 1 and group.forked:  # most groups: nothing below but quicker
                sequence = group.sequences[0]
                missing = len(sequence.token_ids) + sequence.num_pending - sequence.num_computed
                if sequence.num_pending and group.is_complete(sequence):
                    continue
                if missing > 1:
                    pending.append((group, sequence, missing))
                elif (not preempted or group not in preempted) and (
                    _table(sequence).append_in_place() or self._make_room(group, sequence, 1, preempted, swap_out)
                ):
                    decodes.append(ScheduledChunk(group, sequence, 1))
                continue
            in_step = bool(group.searches) and any(group.num_tokens_to_compute(s) > 1 for s in group.computing)
            for sequence in group.computing:
                if sequence.num_pending and group.is_complete(sequence):
                    continue
                missing = group.num_tokens_to_compute(sequence)
                if in_step and group.forked:
                    missing -= 1  # the last token waits until every beam has come as far
                    if missing:
                        pending.append((group, sequence, missing))
                elif missing > 1 or not group.forked:
                    pending.append((group, sequence, missing))
                elif group not in preempted and self._make_room(group, sequence, 1, preempted, swap_out):
                    decodes.append(ScheduledChunk(group, sequence, 1))
        budget = self.max_num_batched_tokens - len(decodes)
        if decodes and self.prefill_chunk is not None:
            # Those that decode should not wait long for their next token. All tokens of the step count: a multiple of
            # 256 rows is what the matrix unit computes best.
            budget = min(budget, max(self.prefill_chunk - len(decodes), self.prefill_chunk // 2))
        for group, sequence, missing in pending:
            count = min(missing, budget)
            if count > 0 and group not in preempted and self._make_room(group, sequence, count, preempted, swap_out):
                prefills.append(ScheduledChunk(group, sequence, count))
                budget -= count
        seats = self.max_num_seqs - sum(group.num_seqs for group in self.running) if self.waiting else 0
        promised: int | None = None  # blocks, to the running groups: summed up once, and only if there is a seat
        while self.waiting and not preempted and budget >= _tokens_at_once(self.waiting[0]):
            if self.waiting[0].num_seqs > seats:
                break
            if promised is None:
                promised = sum(map(self._blocks_promised, self.running))
            if not self._admit(self.waiting[0], promised, swap_in):
                break
            group = self.waiting.popleft()
            self.running.append(group)
            behind = bool(group.searches) and any(group.num_tokens_to_compute(s) > 1 for s in group.computing)
            for sequence in group.computing:
                missing = group.num_tokens_to_compute(sequence) - (behind and group.forked)
                count = min(missing, budget)
                if count > 0:
                    self.cache.append(_table(sequence), count)
                    decodes_now = missing == 1 and group.forked and not behind
                    (decodes if decodes_now else prefills).append(ScheduledChunk(group, sequence, count))
                    budget -= count
            seats -= group.num_seqs
            promised += self._blocks_promised(group)
        if preempted:
            decodes = [chunk for chunk in decodes if chunk.group not in preempted]
            prefills = [chunk for chunk in prefills if chunk.group not in preempted]
        return Schedule(decodes, prefills, preempted, swap_out, swap_in)

    def finish(self, sequence: Sequence) -> None:
        """Free a finished sequence's blocks, wherever they are."""
        if sequence.table is not None:
            self.cache.free(sequence.table)
            sequence.table = None
        self.swap.discard(sequence.seq_id)

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

    def pin(self, sequence: Sequence) -> None:
        """Keep an idle sequence's blocks under any load.

        Raises:
            CapacityError: more than half of the pool would be pinned, or a request that waits could not run any more.
        """
        table = _table(sequence)
        total = self.num_pinned_blocks + len(table.blocks)
        if 2 * total > self.cache.num_blocks:
            raise CapacityError(
                f"{total} of {self.cache.num_blocks} blocks would be pinned, and half of them may be; "
                "unpin another prefix, or start with more blocks"
            )
        largest = max((self._blocks_at_most(group) for group in (*self.running, *self.waiting)), default=0)
        if largest > self.cache.num_blocks - total:
            raise CapacityError(
                f"{total} blocks would be pinned, and a request that is under way may need {largest} of "
                f"{self.cache.num_blocks}; wait until it has finished, or start with more blocks"
            )
        self.pinned[sequence.seq_id] = self.idle.pop(sequence.seq_id)

    def unpin(self, sequence: Sequence) -> None:
        """Free a pinned sequence; its full blocks stay findable in the prefix cache until they are needed."""
        del self.pinned[sequence.seq_id]
        self.finish(sequence)

    @property
    def num_pinned_blocks(self) -> int:
        return len({block for sequence in self.pinned.values() for block in _table(sequence).blocks})

    def _evict_idle(self, spare: Sequence | None = None) -> bool:
        """Give up the longest unused idle sequence, ``spare`` last. False where there is none."""
        victim = next((s for s in self.idle.values() if s is not spare), spare)
        if victim is None or victim.seq_id not in self.idle:
            return False
        self.release_idle(victim)
        return True

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(
        self,
        group: SequenceGroup,
        sequence: Sequence,
        count: int,
        preempted: list[SequenceGroup],
        swap_out: list[tuple[int, int]],
    ) -> bool:
        """Append room for ``count`` tokens, preempting later groups for it. False where ``group`` itself had to go."""
        table = sequence.table
        assert table is not None
        while True:
            try:
                self.cache.append(table, count)
                return True
            except OutOfBlocks:
                if self._evict_idle():
                    continue
                victim = self.running[-1]
                swap_out += self._preempt(victim)
                preempted.append(victim)
                if victim is group:
                    return False

    def _preempt(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Take a group's blocks and put it at the head of the queue. Returns the blocks to copy to the host.

        Where the host has no room for all of them, its tokens will be computed again.
        """
        self.running.remove(group)
        self.num_preemptions += 1
        group.metrics.num_preemptions += 1
        self.waiting.appendleft(group)
        holders = [sequence for sequence in group.unfinished if sequence.table is not None]
        for subscriber in self.cache.subscribers:
            for sequence in holders:
                subscriber(CacheEvent("preempt", sequence.seq_id, tuple(_table(sequence).blocks)))
        pairs = self.swap.swap_out(self.cache, [(_table(s), s.num_computed) for s in holders])
        if pairs:
            group.swapped = True
            for sequence in holders:
                sequence.table = None
            return pairs
        self.start_over(group)
        return []

    def _admit(self, group: SequenceGroup, promised: int, swap_in: list[tuple[int, int]]) -> bool:
        """Give the group's sequences their tables, if its prompt fits beside the blocks promised to running groups."""
        if group.swapped:
            return self._swap_in(group, promised, swap_in)
        sequence, parent = group.computing[0], group.parent
        prompt = sequence.token_ids if group.forked else sequence.token_ids[: group.num_prompt_tokens]
        while True:
            shared = 0 if parent is None or parent.table is None else shared_length(parent, prompt)
            cached = self.cache.find_cached(prompt, group.salt)
            if self._is_being_computed(group, prompt, max(shared, cached.num_tokens)):
                return False
            saved = shared // self.cache.block_size if shared >= cached.num_tokens else cached.num_held
            needed = self._blocks_to_finish_prompt(group) - saved
            if needed + promised <= self.cache.num_free and self._peak_fits(group):
                break
            if not self._evict_idle(spare=parent):
                return False
        if shared >= cached.num_tokens and parent is not None and parent.table is not None:
            sequence.table = self.cache.fork(parent.table, sequence.seq_id, shared)
        else:
            sequence.table = self.cache.allocate(sequence.seq_id, prompt, group.salt, cached)
        sequence.num_computed = sequence.table.num_tokens
        if not group.metrics.num_preemptions:
            group.num_cached_tokens = sequence.num_computed
        return True

    def _swap_in(self, group: SequenceGroup, promised: int, swap_in: list[tuple[int, int]]) -> bool:
        """Bring a group back from the host, if all of it and its next tokens fit."""
        seq_ids = [sequence.seq_id for sequence in group.unfinished if sequence.seq_id in self.swap.saved]
        unsaved = sum(group.num_tokens_to_compute(s) for s in group.computing) // self.cache.block_size
        needed = self.swap.blocks_needed(seq_ids) + 2 * len(seq_ids) + unsaved
        while needed + promised > self.cache.num_free:
            if not self._evict_idle():
                if not self.running and self.swap.blocks_needed(seq_ids) + len(seq_ids) <= self.cache.num_free:
                    break  # nothing will ever become free: what is needed at most is not what is needed
                if not self.running:
                    self.start_over(group)
                    return self._admit(group, promised, swap_in)
                return False
        tables, pairs = self.swap.swap_in(self.cache, seq_ids)
        for sequence in group.unfinished:
            sequence.table = tables.get(sequence.seq_id)
        group.swapped = False
        swap_in += pairs
        return True

    def start_over(self, group: SequenceGroup) -> None:
        """Give up what is computed of a group, on the device and on the host: its tokens will be computed again."""
        for sequence in group.unfinished:
            self.finish(sequence)
            sequence.num_computed = 0
        group.swapped, group.forked = False, group.params.num_sequences == 1

    def _is_being_computed(self, group: SequenceGroup, prompt: list[int], known: int) -> bool:
        """Whether a running group computes a block right now that ``group`` would have to compute again."""
        end = known + self.cache.block_size
        if not self.cache.prefix_caching or end >= len(prompt):
            return False
        first, block = prompt[known], prompt[known:end]
        for other in self.running:
            sequence = other.sequences[0]
            theirs = sequence.token_ids
            # Most differ in the first token of the block in question, so that is looked at first.
            if len(theirs) < end or theirs[known] != first or other.salt != group.salt:
                continue
            computing = sequence.num_computed < min(sequence.num_prompt_tokens, len(theirs) - 1)
            if computing and theirs[known:end] == block and theirs[:known] == prompt[:known]:
                return True
        return False

    def _peak_fits(self, group: SequenceGroup) -> bool:
        """Whether the blocks that all sequences are heading for, this group's included, fit at their peak.

        Worst cases rarely come true, so where half of the pool is free the group is admitted in any case.
        """
        if self.admission == "optimistic" or not self.running or 2 * self.cache.num_free > self.cache.num_blocks:
            return True
        size = self.cache.block_size
        ahead = []  # (tokens still to come, tokens held by this sequence alone) of every sequence
        shared = 0
        for each in (*self.running, group):
            shared += each.num_prompt_tokens
            sequences = each.unfinished
            for i in range(each.num_seqs):
                output = sequences[i].num_output_tokens if i < len(sequences) else 0
                ahead.append((each.max_tokens - output, output))
        ahead.sort(reverse=True)
        peak = held = 0
        for number, (left, own) in enumerate(ahead, 1):
            held += own
            peak = max(peak, held + number * left)
        return -(-(shared + peak) // size) <= self.cache.num_blocks - self.num_pinned_blocks

    def _blocks_to_finish_prompt(self, group: SequenceGroup) -> int:
        """Blocks for all tokens that the group has so far, and one more token for each of its sequences."""
        size = self.cache.block_size
        shared = group.num_prompt_tokens // size
        lengths = [len(sequence.token_ids) for sequence in group.unfinished]
        lengths += [group.num_prompt_tokens] * (group.num_seqs - len(lengths))
        return shared + sum(-(-(length + 1) // size) - shared for length in lengths)

    def _blocks_promised(self, group: SequenceGroup) -> int:
        """Blocks that a running group still needs to finish its prompt."""
        if not any(group.num_tokens_to_compute(sequence) > 1 for sequence in group.computing):
            return 0
        tables = [s.table for s in group.sequences if s.table is not None]
        held = len(tables[0].blocks) if len(tables) == 1 else len({b for t in tables for b in t.blocks})
        return max(0, self._blocks_to_finish_prompt(group) - held)


def _tokens_at_once(group: SequenceGroup) -> int:
    """The least that must fit into a step for the group to begin: of one that comes back, all sequences together."""
    return group.num_seqs if group.swapped else 1


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, f"sequence {sequence.seq_id} runs without a block table"
    return sequence.table


def shared_length(parent: Sequence, ours: list[int]) -> int:
    """How many of these tokens ``parent`` has computed, the last one excepted: its logits are needed."""
    limit = min(parent.num_computed, len(ours) - 1)
    return common_length(ours[:limit], parent.token_ids[:limit])
