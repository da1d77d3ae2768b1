"""A model of the cache that is too simple to be wrong: every sequence keeps its own list of tokens.

`PoolModel` drives a `BlockManager` and plays the device: it holds one value per slot, carries out the recorded copies
when they are taken, and poisons blocks that become free. After every operation, what a sequence reads through its block
table must be its own tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from minillm.cache import BlockManager, BlockTable, OutOfBlocks

POISON = -1


@dataclass
class PoolModel:
    num_blocks: int
    block_size: int
    manager: BlockManager = field(init=False)
    slots: list[int] = field(init=False)
    tokens: dict[int, list[int]] = field(default_factory=dict)  # the oracle
    tables: dict[int, BlockTable] = field(default_factory=dict)
    pending: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (seq, first position, values) to write
    _ids: itertools.count = field(default_factory=itertools.count)
    _values: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.num_blocks, self.block_size)
        self.slots = [POISON] * (self.num_blocks * self.block_size)

    def allocate(self) -> int:
        seq = next(self._ids)
        self.tables[seq] = self.manager.allocate(seq)
        self.tokens[seq] = []
        return seq

    def fork(self, parent: int, num_tokens: int | None = None) -> int:
        if any(seq == parent and (num_tokens is None or num_tokens > first) for seq, first, _ in self.pending):
            self.run_step()  # only what is written can be shared
        seq = next(self._ids)
        self.tables[seq] = self.manager.fork(self.tables[parent], seq, num_tokens)
        self.tokens[seq] = self.tokens[parent][:num_tokens]
        return seq

    def append(self, seq: int, count: int) -> bool:
        table = self.tables[seq]
        needed, free = self.manager.blocks_needed(table, count), self.manager.num_free
        before = (list(table.blocks), table.num_tokens, list(self.manager.ref_counts))
        try:
            self.manager.append(table, count)
        except OutOfBlocks:
            assert needed > free, "refused although there was room"
            assert before == (table.blocks, table.num_tokens, self.manager.ref_counts), "a refusal changed something"
            return False
        assert free - self.manager.num_free == needed, "append took another number of blocks than announced"
        values = [next(self._values) for _ in range(count)]
        self.pending.append((seq, len(self.tokens[seq]), values))
        self.tokens[seq] += values
        return True

    def free(self, seq: int) -> None:
        self.pending = [entry for entry in self.pending if entry[0] != seq]
        self.manager.free(self.tables.pop(seq))
        del self.tokens[seq]

    def run_step(self) -> None:
        """The device: copies first, then the writes."""
        copies = self.manager.take_copies()
        destinations = [destination for _, destination in copies]
        sources = {source for source, _ in copies}
        assert len(set(destinations)) == len(destinations), "two copies to one block"
        assert not sources & set(destinations), "a block is both source and destination: one launch would race"
        size = self.block_size
        for source, destination in copies:
            self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]
        for seq, first, values in self.pending:
            slots = self.manager.slots(self.tables[seq], first, first + len(values))
            for other, table in self.tables.items():
                seen = set(self.manager.slots(table, 0, table.num_tokens)) if other != seq else set()
                assert not seen.intersection(slots), f"sequence {seq} writes to a slot that {other} reads"
            for slot, value in zip(slots, values, strict=True):
                self.slots[slot] = value
        self.pending.clear()

    def check(self) -> None:
        """Every table reads back its own tokens, and the books balance."""
        self.run_step()
        self.manager.check()
        for seq, table in self.tables.items():
            read = [self.slots[slot] for slot in self.manager.slots(table, 0, table.num_tokens)]
            assert read == self.tokens[seq], f"sequence {seq} reads {read}, its tokens are {self.tokens[seq]}"
        held = {block for table in self.tables.values() for block in table.blocks}
        assert self.manager.num_free == self.num_blocks - len(held), "blocks leaked"
        for block in range(self.num_blocks):
            if block not in held:
                self.slots[block * self.block_size : (block + 1) * self.block_size] = [POISON] * self.block_size
        stats = self.manager.stats()
        assert stats.free_blocks == self.num_blocks - len(held)
        assert stats.used_blocks == len(held)
        assert stats.logical_blocks == sum(len(table.blocks) for table in self.tables.values())
        counts = self.manager.ref_counts
        assert stats.shared_blocks == sum(counts[block] > 1 for block in held)

    def drain(self) -> None:
        for seq in list(self.tables):
            self.free(seq)
        self.manager.take_copies()
        self.manager.check()
        assert self.manager.num_free == self.num_blocks, "blocks leaked"
