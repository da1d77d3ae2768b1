"""Read blocks of waiting prompts from disk before the prompts are admitted."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from minillm.blockstore.keys import BlockKey
from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager, CacheEvent, free_tail
from minillm.cache.prefix_cache import CachedPrefix
from minillm.cache.runs import common_length
from minillm.engine.idle import IdleSequences
from minillm.runner.block_reads import BlockRead
from minillm.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class PromptRead:
    """The read for one group. ``sequence`` holds the prompt's first blocks: those in memory, then those from disk."""

    sequence: Sequence
    read: BlockRead[BlockKey]
    num_known: int  # tokens that were in memory


@dataclass
class DiskReads:
    """The reads of one engine. While a group's prompt is being read, the group waits, and later groups may overtake it.

    A read's blocks become an idle sequence, from which the group's first sequence is forked at admission. If running
    groups need blocks before that, this idle sequence may be evicted like any other.
    """

    tier: DiskTier
    cache: BlockManager
    idle: IdleSequences
    new_seq_id: Callable[[], int]
    active: dict[SequenceGroup, PromptRead] = field(default_factory=dict)
    _asked: set[SequenceGroup] = field(default_factory=set)  # groups that `begin` need not examine again
    _loaded: dict[SequenceGroup, Sequence] = field(default_factory=dict)  # idle sequences from completed reads

    def begin(self, group: SequenceGroup, prompt: list[int], num_shared: int, cached: CachedPrefix) -> bool:
        """Begin to read the blocks that continue a prompt, if there are any. Return whether the group must wait.

        The caller ensures that the pool has enough free blocks for the whole prompt.

        Args:
            num_shared: tokens that the group can share with its parent.
            cached: the prompt's blocks in the prefix cache.
        """
        if group in self._asked or group.owner == "":
            return False
        known, size = max(num_shared, cached.num_tokens), self.cache.block_size
        if any(self._reads_more(each, group, prompt, known) for each in self.active):
            return True
        self._asked.add(group)
        found = self.tier.find(prompt, group.salt, known)
        if found is None:
            return False
        keys, end = found
        sequence = Sequence(self.new_seq_id(), prompt[:end], end)
        first = keys[0].index
        if num_shared >= cached.num_tokens and num_shared and group.parent is not None:
            sequence.table = self.cache.fork(group.parent.own_table, sequence.seq_id, first * size)
        else:
            sequence.table = self.cache.allocate(sequence.seq_id, prompt, group.salt, cached)
            self.cache.count_hit(-cached.num_tokens, -len(prompt))  # counted when the group is admitted
        self.cache.append(sequence.table, end - first * size)
        read = self.tier.prepare_read(keys, sequence.blocks[first:])
        self.active[group] = PromptRead(sequence, read, known)
        return True

    def _reads_more(self, other: SequenceGroup, group: SequenceGroup, prompt: list[int], known: int) -> bool:
        """Return whether the read for ``other`` includes the block of ``prompt`` that starts at token ``known``."""
        ids = self.active[other].sequence.token_ids
        end = known + self.cache.block_size
        return other.salt == group.salt and ids[known:end] == prompt[known:end] and common_length(ids, prompt) >= end

    def collect(self) -> None:
        """Make the blocks of completed reads available.

        An idle sequence with these blocks becomes the group's parent.
        """
        for group, each in list(self.active.items()):
            if self.tier.reader.is_done(each.read):
                del self.active[group]
                self._finish(group, each)

    def _finish(self, group: SequenceGroup, each: PromptRead) -> None:
        sequence, count = each.sequence, self.tier.finish_read(each.read)
        table, whole = sequence.own_table, (each.read.keys[0].index + count) * self.cache.block_size
        end = min(whole, len(sequence.token_ids))  # the last block may be partly filled
        free_tail(self.cache, table, end)
        del sequence.token_ids[end:]
        sequence.num_prompt_tokens = sequence.num_computed = end
        self.cache.commit(table, sequence.token_ids, end)
        self.cache.emit(CacheEvent("load", sequence.seq_id, tuple(each.read.blocks[:count])))
        self.idle.keep(sequence)
        if count:
            group.parent = self._loaded[group] = sequence
            group.metrics.num_disk_tokens += end - each.num_known
            group.metrics.disk_seconds += each.read.seconds
        else:
            self.idle.release(sequence)

    def release(self, groups: Collection[SequenceGroup]) -> None:
        """Free the blocks that were read for ``groups``. Call this once the groups are admitted or have ended."""
        for group in groups:
            self._asked.discard(group)
            if (each := self.active.pop(group, None)) is not None:
                self.tier.reader.cancel(each.read)
                self.idle.release(each.sequence)
            if (sequence := self._loaded.pop(group, None)) is not None:
                self.idle.release(sequence)

    def wait(self, seconds: float) -> bool:
        """Wait until a read makes progress. Return False if there is no read."""
        if not self.active:
            return False
        self.tier.reader.wait([each.read for each in self.active.values()], seconds)
        return True
