"""Admission: give waiting groups their blocks, when the pool has enough of them.

A group (the sequences of one request) is admitted if the pool has blocks for its prompt, and for the predicted peak of
all running groups, as in LightLLM's router. The peak is at a moment when some sequence reaches its maximum length. If
this sequence has n tokens left now, every sequence that still runs at that moment has grown by n tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager
from minillm.engine.disk_reads import DiskReads
from minillm.engine.idle import shared_length
from minillm.engine.preemption import Preemption
from minillm.errors import CapacityError
from minillm.sequence import Schedule, SequenceGroup, Stage


@dataclass
class Admission:
    """Decides when a waiting group gets its blocks, and which of them it shares."""

    preemption: Preemption
    policy: str = "predicted"  # or "optimistic"
    disk_reads: DiskReads | None = None  # None: there is no disk tier

    def __post_init__(self) -> None:
        self.cache, self.idle = self.preemption.cache, self.preemption.idle

    def admit(self, group: SequenceGroup, running: Sequence[SequenceGroup], promised: int, schedule: Schedule) -> bool:
        """Give a waiting group its blocks, if its prompt fits into the pool. Return whether the group was admitted.

        ``promised``: free blocks that running groups still need.
        """
        if group.stage is Stage.SAVED:
            is_reading = self.disk_reads is not None and bool(self.disk_reads.active)
            if self.preemption.bring_back(group, promised, bool(running) or is_reading, schedule):
                return True
            if group.stage is Stage.SAVED:
                return False
        sequence, parent, size = group.computing[0], group.parent, self.cache.block_size
        prompt = sequence.token_ids if group.stage is Stage.SPLIT else sequence.token_ids[: group.num_prompt_tokens]
        shareable = prompt if group.scores is None else group.scores.shareable(prompt)
        while True:
            shared = shared_length(parent, shareable, group.salt)
            cached = self.cache.find_cached(shareable, group.salt)
            known = max(shared, cached.num_tokens)
            if self.cache.prefix_caching and is_being_computed(group, shareable, known, running, size):
                return False
            saved = shared // size if shared >= cached.num_tokens else cached.num_held
            needed = blocks_to_finish_prompt(group, size) - saved
            if needed + promised <= self.cache.num_free and (
                self.policy == "optimistic" or peak_fits(group, running, self.cache, self.idle.num_pinned_blocks)
            ):
                if self.disk_reads is not None and self.disk_reads.begin(group, shareable, shared, cached):
                    return False
                break
            if not self.idle.evict(spare=parent):
                return False
        if shared and shared >= cached.num_tokens and parent is not None and parent.table is not None:
            sequence.table = self.cache.fork(parent.table, sequence.seq_id, shared)
            self.cache.count_hit(shared, len(prompt))
        else:
            sequence.table = self.cache.allocate(sequence.seq_id, prompt, group.salt, cached)
        sequence.num_computed = sequence.table.num_tokens
        self.forget([group])
        if not group.metrics.num_preemptions:
            group.num_cached_tokens = sequence.num_computed
        return True

    @property
    def tier(self) -> DiskTier | None:
        """The disk tier of the prefix cache, if there is one."""
        return None if self.disk_reads is None else self.disk_reads.tier

    def is_reading(self, group: SequenceGroup) -> bool:
        """Return whether blocks of the group's prompt are being read from disk. Other groups may pass it."""
        return self.disk_reads is not None and group in self.disk_reads.active

    def collect_reads(self) -> None:
        """Make blocks available that have been read from disk since the last call."""
        if self.disk_reads is not None:
            self.disk_reads.collect()

    def wait_for_reads(self, seconds: float) -> bool:
        """Wait until a read from disk makes progress. Return False if there is no read."""
        return self.disk_reads is not None and self.disk_reads.wait(seconds)

    def forget(self, groups: Collection[SequenceGroup]) -> None:
        """End the reads for groups that are admitted or have ended, and free the blocks that nobody took."""
        if self.disk_reads is not None:
            self.disk_reads.release(groups)


def blocks_at_most(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks that a group holds if all its sequences reach their maximum length."""
    shared = group.num_prompt_tokens // block_size
    longest = group.num_prompt_tokens + group.max_tokens
    return shared + group.params.num_sequences * (-(-longest // block_size) - shared)


def check_capacity(group: SequenceGroup, max_num_seqs: int, cache: BlockManager, num_pinned: int) -> None:
    """Raise CapacityError for a group that could never run, even alone."""
    n, size = group.params.num_sequences, cache.block_size
    if n > max_num_seqs:
        raise CapacityError(
            f"the request needs {n} sequences at a time (n, beam_width or depths), and max_num_seqs is {max_num_seqs}: "
            "ask for fewer, or raise max_num_seqs"
        )
    needed = blocks_at_most(group, size)
    if needed > cache.num_blocks - num_pinned:
        kept = f", {num_pinned} of them pinned" if num_pinned else ""
        raise CapacityError(
            f"the request can grow to {needed} blocks of {size} tokens ({group.num_prompt_tokens} prompt tokens, "
            f"{n} x {group.max_tokens} new ones) and the cache has {cache.num_blocks}{kept}; "
            "lower max_tokens, ask for fewer sequences, or start with more blocks"
        )


def blocks_to_finish_prompt(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks for a group's tokens so far and one new token for each of its sequences."""
    shared = group.num_prompt_tokens // block_size
    lengths = [len(sequence.token_ids) for sequence in group.unfinished]
    lengths += [group.num_prompt_tokens] * (group.num_seqs - len(lengths))
    new = min(1, group.max_tokens)
    return shared + sum(-(-(length + new) // block_size) - shared for length in lengths)


def blocks_promised(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks that a running group still needs to finish its prompt."""
    prompt = group.num_prompt_tokens if group.stage is Stage.PROMPT else 0
    if all((prompt or sequence.num_tokens) - sequence.num_computed <= 1 for sequence in group.computing):
        return 0
    tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
    held = len(tables[0].blocks) if len(tables) == 1 else len({b for table in tables for b in table.blocks})
    return max(0, blocks_to_finish_prompt(group, block_size) - held)


def peak_fits(group: SequenceGroup, running: Sequence[SequenceGroup], cache: BlockManager, num_pinned: int) -> bool:
    """Return whether the pool can hold the predicted peak of the running groups together with ``group``.

    The prediction assumes that all sequences reach their maximum lengths, which is rare. So while more than half of the
    pool is free, the prediction is skipped and the result is True.
    """
    if not running or 2 * cache.num_free > cache.num_blocks:
        return True
    ahead = []  # (tokens still to generate, tokens generated) of every sequence
    shared = 0
    for each in (*running, group):
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
    return -(-(shared + peak) // cache.block_size) <= cache.num_blocks - num_pinned


def is_being_computed(
    group: SequenceGroup, prompt: list[int], known: int, running: Sequence[SequenceGroup], block_size: int
) -> bool:
    """Return whether a running group with an equal prefix is computing the next block that ``prompt`` needs.

    If so, admission waits until the prefix cache has the block. ``known``: prompt tokens that already have K and V.
    """
    end = known + block_size
    if end >= len(prompt):
        return False
    for other in running:
        sequence = other.sequences[0]
        theirs = sequence.token_ids
        # Most prompts differ in the first token of that block, so it is compared first.
        if len(theirs) < end or theirs[known] != prompt[known] or other.salt != group.salt:
            continue
        computing = sequence.num_computed < min(sequence.num_prompt_tokens, len(theirs) - 1)
        if computing and theirs[known:end] == prompt[known:end] and theirs[:known] == prompt[:known]:
            return True
    return False
