"""The scheduler chooses the sequences of the next step.

Continuous batching (Orca, Yu et al. 2022) with one token budget per step. Every running sequence decodes if all its
tokens but the last have K and V. The rest of the budget goes to chunks of prompts, first come, first served (chunked
prefill, Agrawal et al. 2023). If blocks run out, the newest group is preempted, never the oldest, so every request
finishes.
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from minillm.cache import OutOfBlocks
from minillm.engine.admission import Admission, blocks_at_most, blocks_promised, check_capacity
from minillm.engine.optional_tokens import extend
from minillm.errors import RequestError, as_known
from minillm.sequence import Chunk, Schedule, Sequence, SequenceGroup, Stage


@dataclass
class Scheduler:
    """The waiting and running groups, and the rules for moving between them."""

    admission: Admission
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int | None = None  # maximum tokens of a step with both decodes and prompts; None: no such limit
    offline_chunk: int | None = None  # the limit instead of ``prefill_chunk`` if all decoding requests are offline
    waiting: deque[SequenceGroup] = field(default_factory=deque)
    running: list[SequenceGroup] = field(default_factory=list)
    failed: list[SequenceGroup] = field(default_factory=list)  # with an error, still to be ended

    def __post_init__(self) -> None:
        self.preemption, self.cache = self.admission.preemption, self.admission.cache
        self.idle = self.admission.idle

    @property
    def num_free_seqs(self) -> int:
        """Return how many more sequences may start now: ``max_num_seqs`` less the sequences that run."""
        return self.max_num_seqs - sum(group.num_seqs for group in self.running)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group; raise CapacityError if it could never run, even alone."""
        check_capacity(group, self.max_num_seqs, self.cache, self.idle.num_pinned_blocks)
        self.waiting.append(group)

    def schedule(self) -> Schedule:
        """Choose the next step's work, and allocate the blocks that it writes to."""
        schedule = Schedule()
        self.admission.collect_reads()
        behind = self._decode(schedule)
        budget = self._prefill(behind, self._budget(schedule), schedule)
        budget = self._admit_waiting(budget, schedule)
        if gone := set(schedule.preempted):
            schedule.decodes = [chunk for chunk in schedule.decodes if chunk.group not in gone]
            schedule.prefills = [chunk for chunk in schedule.prefills if chunk.group not in gone]
        extend(schedule, budget, self.cache)
        return schedule

    def _decode(self, schedule: Schedule) -> list[Chunk]:
        """Schedule a decode for each running sequence in which only the last token lacks K and V.

        Return the chunks of all other running sequences, which have more tokens to compute.
        """
        decodes, preempted, behind = schedule.decodes, schedule.preempted, []
        for group in list(self.running):
            try:
                due = group.method.due(group)
            except Exception as error:
                self.fail(group, error)
                continue
            for chunk in due:
                if not chunk.decodes:
                    behind.append(chunk)
                elif not (preempted and group in preempted):
                    table = chunk.sequence.table
                    if (table is not None and table.append_in_place()) or self._allocate_slots(chunk, schedule):
                        decodes.append(chunk)
        return behind

    def _budget(self, schedule: Schedule) -> int:
        """Return how many prompt tokens the step may compute in addition to its decodes."""
        budget, decoding = self.max_num_batched_tokens - len(schedule.decodes), len(schedule.decodes)
        is_offline = all(chunk.group.offline for chunk in schedule.decodes)
        most = self.offline_chunk if is_offline else self.prefill_chunk
        if decoding and most is not None:
            # Decoding sequences should not wait long for their next token. The limit includes their own tokens, since
            # matmuls are fastest with a multiple of 256 rows.
            budget = min(budget, max(most - decoding, most // 2))
        return budget

    def _prefill(self, chunks: list[Chunk], budget: int, schedule: Schedule) -> int:
        """Schedule as many tokens of ``chunks`` as the budget allows. Return the budget that is left."""
        for chunk in chunks:
            chunk.count = min(chunk.count, budget)
            if chunk.count > 0 and chunk.group not in schedule.preempted and self._allocate_slots(chunk, schedule):
                schedule.prefills.append(chunk)
                budget -= chunk.count
        return budget

    def _admit_waiting(self, budget: int, schedule: Schedule) -> int:
        """Admit waiting groups in order, until sequences, budget or blocks run out. Return the budget that is left."""
        num_free = self.num_free_seqs if self.waiting else 0
        promised: int | None = None  # blocks that running groups still need; summed once, if a group may start
        size = self.cache.block_size
        reading: list[SequenceGroup] = []  # groups with prompts that are being read from disk; other groups pass them
        while self.waiting and not schedule.preempted and self.waiting[0].num_seqs <= num_free:
            group = self.waiting[0]
            if self.admission.is_reading(group):
                reading.append(self.waiting.popleft())
                continue
            # All sequences of a resumed group must fit into the step.
            if budget < (group.num_seqs if group.stage is Stage.SAVED else 1):
                break
            if promised is None:
                promised = sum(blocks_promised(each, size) for each in self.running)
            if not self.admission.admit(group, self.running, promised, schedule):
                if self.admission.is_reading(group):
                    continue
                break
            self.running.append(self.waiting.popleft())
            if group.metrics.first_scheduled_time is None:
                group.metrics.first_scheduled_time = time.monotonic()
            try:
                due = group.method.due(group)
            except Exception as error:
                self.fail(group, error)
                due = []
            for chunk in due:
                chunk.count = min(chunk.count, budget)
                if chunk.count > 0:
                    self.cache.append(chunk.sequence.own_table, chunk.count)
                    (schedule.decodes if chunk.decodes else schedule.prefills).append(chunk)
                    budget -= chunk.count
            num_free -= group.num_seqs
            promised += blocks_promised(group, size)
        self.waiting.extendleft(reversed(reading))
        return budget

    def fail(self, group: SequenceGroup, error: Exception) -> None:
        """Record an exception that ends this group but no other. `Requests.end_failed` ends the group."""
        group.error = group.error or RequestError(str(as_known(error)))
        self.failed.append(group)

    def pin(self, sequence: Sequence) -> None:
        """Pin an idle sequence, such as a system prompt; see `IdleSequences.pin`."""
        groups, size = (*self.running, *self.waiting), self.cache.block_size
        self.idle.pin(sequence, (blocks_at_most(group, size) for group in groups))

    def remove(self, groups: Collection[SequenceGroup]) -> None:
        """Remove groups from the queues and free their blocks, except the blocks of idle sequences."""
        for group in groups:
            for sequence in group.sequences:
                if sequence.seq_id not in self.idle.idle:
                    self.preemption.free(sequence)
        self.admission.forget(groups)
        gone, num_running = set(groups), len(self.running)
        self.running = [group for group in self.running if group not in gone]
        if num_running - len(self.running) < len(gone):  # the others wait
            self.waiting = deque(group for group in self.waiting if group not in gone)

    def _allocate_slots(self, chunk: Chunk, schedule: Schedule) -> bool:
        """Allocate slots for a chunk, evicting idle sequences and preempting the newest groups if necessary.

        Return False if the chunk's own group was preempted.
        """
        while True:
            try:
                self.cache.append(chunk.sequence.own_table, chunk.count)
                return True
            except OutOfBlocks:
                if self.idle.evict():
                    continue
                victim = self.running.pop()
                self.waiting.appendleft(victim)
                self.preemption.take_out(victim, schedule)
                if victim is chunk.group:
                    return False
