"""A model of the cache that is too simple to be wrong: every sequence keeps its own list of tokens.

`PoolModel` drives a `BlockManager` and plays the device: it holds one value per slot, carries out the recorded copies
when they are taken, and poisons blocks that become free. After every operation, a sequence must read its own tokens
through its block table.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from lib.cache_checks import check, check_swap
from minillm.cache import BlockManager, BlockTable, OutOfBlocks, SwapSpace, free_tail, pool_stats

POISON = -1
# Python hashes whole numbers modulo this: tokens that differ by it collide, and so do the tuples made of them.
COLLIDES = (1 << 61) - 1
ALPHABET = (3, 3 + COLLIDES, 4)


@dataclass
class PoolModel:
    num_blocks: int
    block_size: int
    prefix_caching: bool = False
    num_host_blocks: int = 0
    manager: BlockManager = field(init=False)
    swap: SwapSpace = field(init=False)
    slots: list[int] = field(init=False)
    host: list[list[int]] = field(init=False)
    away: dict[int, list[int]] = field(default_factory=dict)  # the tokens of sequences on the host
    incoming: list[tuple[int, int]] = field(default_factory=list)  # (host block, block) to load
    tokens: dict[int, list[int]] = field(default_factory=dict)  # the oracle
    tables: dict[int, BlockTable] = field(default_factory=dict)
    pending: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (seq, first position, values) to write
    _ids: itertools.count = field(default_factory=itertools.count)
    _values: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        self.swap = SwapSpace(self.num_host_blocks)
        self.host = [[POISON] * self.block_size for _ in range(self.num_host_blocks)]
        self.slots = [POISON] * (self.num_blocks * self.block_size)

    def allocate(self, prompt: list[int] | None = None) -> int:
        """Make a new sequence; it has the tokens of the prompt that the cache holds (the caller appends the rest)."""
        seq = next(self._ids)
        found = self.manager.find_cached(prompt or [])
        expected = found.num_tokens
        self.tables[seq] = self.manager.allocate(seq, prompt or [], prefix=found if seq % 2 else None)
        assert self.tables[seq].num_tokens == expected
        assert expected < max(1, len(prompt or [])), "nothing is left to compute"
        self.tokens[seq] = (prompt or [])[:expected]
        return seq

    def fork(self, parent: int, num_tokens: int | None = None) -> int:
        if any(seq == parent and (num_tokens is None or num_tokens > first) for seq, first, _ in self.pending):
            self.run_step()  # only written tokens can be shared
        seq = next(self._ids)
        self.tables[seq] = self.manager.fork(self.tables[parent], seq, num_tokens)
        self.tokens[seq] = self.tokens[parent][:num_tokens]
        return seq

    def append(self, seq: int, count: int, values: list[int] | None = None) -> bool:
        """Append ``count`` tokens, or ``values``. Without the cache all tokens differ, to tell them apart."""
        if values is not None:
            count = len(values)
        table = self.tables[seq]
        size, free = self.manager.block_size, self.manager.num_free
        needed = max(0, -(-(table.num_tokens + count) // size) - len(table.blocks))
        if count and table.num_tokens % size:
            needed += self.manager.ref_counts[table.blocks[-1]] > 1  # the copy of a shared last block
        before = (list(table.blocks), table.num_tokens, list(self.manager.ref_counts))
        try:
            self.manager.append(table, count)
        except OutOfBlocks:
            assert needed > free, "refused although there was room"
            assert before == (table.blocks, table.num_tokens, self.manager.ref_counts), "a refusal changed something"
            return False
        assert free - self.manager.num_free == needed, "append took another number of blocks than announced"
        if values is None:
            values = [next(self._values) for _ in range(count)]
        self.pending.append((seq, len(self.tokens[seq]), values))
        self.tokens[seq] += values
        return True

    def free(self, seq: int) -> None:
        self.pending = [entry for entry in self.pending if entry[0] != seq]
        self.manager.free(self.tables.pop(seq))
        del self.tokens[seq]

    def free_tail(self, seq: int, num_tokens: int) -> None:
        """Free the slots after the first ``num_tokens`` tokens."""
        self.run_step()  # what comes back has been written
        table = self.tables[seq]
        gone = table.blocks[-(-num_tokens // self.block_size) :]
        last = sum(self.manager.ref_counts[block] == 1 for block in gone)
        free = self.manager.num_free
        free_tail(self.manager, table, num_tokens)
        assert self.manager.num_free == free + last, "as many blocks are free as this one alone held"
        del self.tokens[seq][num_tokens:]

    def swap_out(self, seqs: list[int]) -> bool:
        """Send the computed tokens of sequences to the host."""
        if self.incoming:
            self.run_step()  # a step never sends anything to the host after it has fetched from there
        computed = {seq: len(self.tokens[seq]) for seq in seqs}
        for seq, first, _ in self.pending:
            if seq in computed:
                computed[seq] = min(computed[seq], first)
        pairs = self.swap.swap_out(self.manager, [(self.tables[seq], computed[seq]) for seq in seqs])
        if pairs is None:
            return False
        size = self.block_size
        for block, host in pairs:  # before anything is written
            self.host[host] = self.slots[block * size : (block + 1) * size]
        self.pending = [entry for entry in self.pending if entry[0] not in computed]
        for seq in seqs:
            del self.tables[seq]
            self.away[seq] = self.tokens.pop(seq)[: computed[seq]]
        return True

    def swap_in(self, seqs: list[int]) -> bool:
        """Bring sequences back, if there is room."""
        if self.swap.blocks_needed(seqs) > self.manager.num_free:
            return False
        tables, loads = self.swap.swap_in(self.manager, seqs)
        self.incoming += loads
        for seq in seqs:
            self.tables[seq] = tables[seq]
            self.tokens[seq] = self.away.pop(seq)
        return True

    def discard(self, seq: int) -> None:
        """End a sequence while it is on the host."""
        self.swap.discard(seq)
        del self.away[seq]

    def slots_of(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """Return the slots of tokens ``start … stop - 1``."""
        return [table.blocks[i // self.block_size] * self.block_size + i % self.block_size for i in range(start, stop)]

    def run_step(self) -> None:
        """Play the device: the blocks from the host first, then the copies, then the writes."""
        size = self.block_size
        for host, block in self.incoming:
            self.slots[block * size : (block + 1) * size] = self.host[host]
        self.incoming.clear()
        copies = self.manager.take_copies()
        destinations = [destination for _, destination in copies]
        sources = {source for source, _ in copies}
        assert len(set(destinations)) == len(destinations), "two copies to one block"
        assert not sources & set(destinations), "a block is both source and destination: one launch would race"
        for source, destination in copies:
            self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]
        for seq, first, values in self.pending:
            slots = self.slots_of(self.tables[seq], first, first + len(values))
            for other, table in self.tables.items():
                seen = set(self.slots_of(table, 0, table.num_tokens)) if other != seq else set()
                assert not seen.intersection(slots), f"sequence {seq} writes to a slot that {other} reads"
            for slot, value in zip(slots, values, strict=True):
                self.slots[slot] = value
        self.pending.clear()
        for seq, table in self.tables.items():
            self.manager.commit(table, self.tokens[seq], len(self.tokens[seq]))

    def check(self) -> None:
        """Check that every table reads back its own tokens, and that the bookkeeping is right."""
        self.run_step()
        check(self.manager)
        check_swap(self.swap)
        for seq, table in self.tables.items():
            read = [self.slots[slot] for slot in self.slots_of(table, 0, table.num_tokens)]
            assert read == self.tokens[seq], f"sequence {seq} reads {read}, its tokens are {self.tokens[seq]}"
        held = {block for table in self.tables.values() for block in table.blocks}
        assert self.manager.num_free == self.num_blocks - len(held), "blocks leaked"
        for block in range(self.num_blocks):
            if block not in held and block not in self.manager._cached:
                self.slots[block * self.block_size : (block + 1) * self.block_size] = [POISON] * self.block_size
        stats = pool_stats(self.manager)
        assert stats.free_blocks == self.num_blocks - len(held)
        assert stats.used_blocks == len(held)
        assert stats.logical_blocks == sum(len(table.blocks) for table in self.tables.values())
        counts = self.manager.ref_counts
        assert stats.shared_blocks == sum(counts[block] > 1 for block in held)

    def drain(self) -> None:
        for seq in list(self.tables):
            self.free(seq)
        for seq in list(self.away):
            self.discard(seq)
        check_swap(self.swap)
        assert self.swap.num_free == self.num_host_blocks, "host blocks leaked"
        self.manager.take_copies()
        check(self.manager)
        assert self.manager.num_free == self.num_blocks, "blocks leaked"


def random_history(model: PoolModel, rng: random.Random, length: int) -> None:
    """Do ``length`` random operations of every kind, on prompts that often begin alike; check after each."""
    size = model.block_size
    for _ in range(length):
        seqs, choice = list(model.tables), rng.random()
        if not seqs or choice < 0.25:
            prompt = [rng.choice(ALPHABET) for _ in range(rng.randint(0, 4 * size + 1))]
            seq = model.allocate(prompt)
            if not model.append(seq, 0, prompt[len(model.tokens[seq]) :]):
                model.free(seq)
        elif choice < 0.4:
            parent = rng.choice(seqs)
            cut = rng.randint(0, len(model.tokens[parent])) if rng.random() < 0.5 else None
            model.fork(parent, cut)
        elif choice < 0.65:
            count = rng.choice([1, 1, 1, 2, size, rng.randint(1, 3 * size)])
            model.append(rng.choice(seqs), 0, [rng.choice(ALPHABET) for _ in range(count)])
        elif choice < 0.72:
            seq = rng.choice(seqs)
            model.free_tail(seq, rng.randint(0, len(model.tokens[seq])))
        elif choice < 0.85:
            model.free(rng.choice(seqs))
        elif choice < 0.9:
            model.run_step()
        elif choice < 0.95:
            model.swap_out(rng.sample(seqs, rng.randint(1, min(3, len(seqs)))))
        elif model.away:
            away = rng.sample(list(model.away), rng.randint(1, min(3, len(model.away))))
            if rng.random() < 0.2:
                model.discard(away[0])
            else:
                model.swap_in(away)
        elif rng.random() < 0.1:
            model.manager.reset_prefix_cache()
        if rng.random() < 0.3:
            model.check()
    model.check()
