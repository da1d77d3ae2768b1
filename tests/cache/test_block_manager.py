from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lib.cache_checks import check, check_swap
from lib.examples import examples
from lib.pool_model import ALPHABET, COLLIDES, PoolModel, random_history
from minillm.cache import (
    BlockManager,
    BlockTable,
    CacheEvent,
    OutOfBlocks,
    SwapSpace,
    fork_into,
    free_tail,
    pool_stats,
)
from minillm.cache.free_blocks import FreeBlocks


def grown(manager: BlockManager, seq_id: int, count: int) -> BlockTable:
    table = manager.allocate(seq_id)
    manager.append(table, count)
    return table


def test_fork_shares_every_block() -> None:
    manager = BlockManager(8, 4)
    parent = grown(manager, 0, 10)
    child = manager.fork(parent, 1)
    assert child.blocks == parent.blocks
    assert [manager.ref_counts[block] for block in parent.blocks] == [2, 2, 2]
    assert manager.num_free == 5
    assert manager.take_copies() == []


@pytest.mark.parametrize("fill", range(1, 17))
def test_every_fill_level_copies_only_the_partly_filled_block(fill: int) -> None:
    manager = BlockManager(16, 16)
    parent = grown(manager, 0, 32 + fill)
    children = [manager.fork(parent, i) for i in (1, 2, 3)]
    for child in children:
        manager.append(child, 1)
    manager.append(parent, 1)
    copies = manager.take_copies()
    partly_filled = fill < 16
    assert len(copies) == (3 if partly_filled else 0), "three of four owners copy, the last one writes in place"
    tails = {table.blocks[2 if partly_filled else 3] for table in [parent, *children]}
    assert len(tails) == 4
    assert all(table.blocks[:2] == parent.blocks[:2] for table in children)
    check(manager)


def test_last_owner_writes_in_place() -> None:
    manager = BlockManager(4, 4)
    parent = grown(manager, 0, 3)
    child = manager.fork(parent, 1)
    manager.free(parent)
    block = child.blocks[0]
    manager.append(child, 1)
    assert child.blocks == [block]
    assert manager.take_copies() == []


def test_rollback_is_a_fork_at_an_earlier_token() -> None:
    manager = BlockManager(8, 4)
    table = grown(manager, 0, 14)
    shorter = manager.fork(table, 1, 6)
    assert shorter.blocks == table.blocks[:2]
    manager.free(table)
    assert manager.num_free == 6
    manager.append(shorter, 1)
    assert manager.take_copies() == [], "nobody shares the block any more"


def test_a_tail_that_is_freed_is_shared_no_more_and_the_rest_still_is() -> None:
    manager = BlockManager(8, 4)
    parent = grown(manager, 0, 11)
    child = manager.fork(parent, 1)
    free_tail(manager, child, 5)
    assert child.blocks == parent.blocks[:2]
    assert [manager.ref_counts[block] for block in parent.blocks] == [2, 2, 1]
    manager.append(child, 1)  # the last block is the parent's, too
    assert manager.take_copies() == [(parent.blocks[1], child.blocks[1])]
    with pytest.raises(ValueError, match="token 7 of a sequence of 6"):
        free_tail(manager, child, 7)


def test_a_fork_into_a_table_keeps_its_own_last_block() -> None:
    """As on a device with a row per sequence: it copies the last block, and the other blocks are shared."""
    manager = BlockManager(9, 4)
    root = grown(manager, 0, 4)
    parent, child = manager.fork(root, 1), manager.fork(root, 2)
    manager.free(root)
    for table in (parent, child):
        manager.append(table, 6)
    shared, own = parent.blocks[1], child.blocks[2]
    assert manager.num_free == 4
    fork_into(manager, child, parent, 10)
    assert child.blocks == [parent.blocks[0], shared, own]
    assert [manager.ref_counts[block] for block in child.blocks] == [2, 2, 1]
    assert manager.num_free == 5
    assert manager.take_copies() == []
    check(manager)
    manager.append(child, 2)
    manager.append(parent, 3)
    fork_into(manager, child, parent, 12)  # the device has not been given a block for the next token
    assert child.blocks == parent.blocks[:3]
    check(manager)
    with pytest.raises(ValueError, match="13 tokens, of 13, into 12"):
        fork_into(manager, child, parent, 13)
    for table in (child, parent):
        manager.free(table)
    assert manager.num_free == 9


def test_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    first = grown(manager, 0, 6)
    second = manager.fork(first, 1)
    third = grown(manager, 2, 1)
    with pytest.raises(OutOfBlocks):
        manager.append(second, 1)
    assert second.blocks == first.blocks
    assert second.num_tokens == 6
    assert manager.take_copies() == []
    manager.free(third)
    manager.append(second, 1)
    check(manager)


def test_a_copys_source_is_not_handed_out_before_the_copy_is_taken() -> None:
    manager = BlockManager(3, 4)
    parent = grown(manager, 0, 2)
    child = manager.fork(parent, 1)
    manager.append(child, 1)
    source = parent.blocks[0]
    manager.free(parent)
    other = grown(manager, 2, 1)
    assert other.blocks != [source]
    assert manager.take_copies() == [(source, child.blocks[0])]
    assert manager.num_free == 1


def test_a_freed_destination_forgets_its_copy() -> None:
    manager = BlockManager(3, 4)
    parent = grown(manager, 0, 2)
    child = manager.fork(parent, 1)
    manager.append(child, 1)
    manager.free(child)
    assert manager.take_copies() == []
    assert manager.num_free == 2


def test_a_chain_of_forks_copies_from_the_first_source() -> None:
    manager = BlockManager(4, 4)
    first = grown(manager, 0, 2)
    second = manager.fork(first, 1)
    manager.append(second, 1)
    third = manager.fork(second, 2)
    manager.append(third, 1)
    source = first.blocks[0]
    assert set(manager.take_copies()) == {(source, second.blocks[0]), (source, third.blocks[0])}


def test_freeing_twice_is_caught() -> None:
    manager = BlockManager(2, 4)
    table = grown(manager, 0, 1)
    manager.free(table)
    with pytest.raises(AssertionError, match="twice"):
        manager.free(table)
    grown(manager, 1, 1)
    with pytest.raises(ValueError, match="already"):
        manager.allocate(1)


def test_events_tell_the_whole_story() -> None:
    manager = BlockManager(8, 4)
    events: list[CacheEvent] = []
    manager.subscribers.append(events.append)
    parent = grown(manager, 0, 6)
    child = manager.fork(parent, 1)
    manager.append(child, 1)
    manager.free(parent)
    kinds = [(event.kind, event.seq_id) for event in events]
    assert kinds == [("allocate", 0), ("fork", 1), ("copy", 1), ("free", 0)]
    assert events[1].parent_id == 0
    assert events[2].blocks == (events[0].blocks[1], child.blocks[1])


def test_statistics_count_tokens() -> None:
    manager = BlockManager(10, 4)
    parent = grown(manager, 0, 6)
    manager.fork(parent, 1)
    stats = pool_stats(manager)
    assert (stats.used_blocks, stats.shared_blocks, stats.logical_blocks) == (2, 2, 4)
    assert stats.used_slots == 6
    assert stats.sharing_ratio == 2.0
    assert stats.usage == 0.2


def test_growing_sequences_stay_in_one_run_while_the_pool_is_wide() -> None:
    manager = BlockManager(256, 1)
    tables = [grown(manager, i, 4) for i in range(4)]
    for _ in range(20):
        for table in tables:
            manager.append(table, 1)
    assert pool_stats(manager).num_runs == 4


def test_runs_are_counted_over_all_tables() -> None:
    manager, rng = BlockManager(32, 1), random.Random(5)
    tables = [grown(manager, number, rng.randint(1, 6)) for number in range(6)]
    seen = set()
    for _ in range(40):
        table = rng.choice(tables)
        if rng.random() < 0.4:
            manager.free(table)
            tables[tables.index(table)] = grown(manager, table.seq_id, 1)
        elif manager.num_free >= 2:
            manager.append(table, 2)
        joints = [(one, other) for each in tables for one, other in itertools.pairwise(each.blocks)]
        expected = len(tables) + sum(one + 1 != other for one, other in joints)
        assert pool_stats(manager).num_runs == expected
        seen.add(expected)
    assert len(seen) > 3


def test_a_full_pool_is_one_run_again_after_everything_is_freed() -> None:
    rng = random.Random(3)
    manager = BlockManager(64, 2)
    tables = [grown(manager, i, rng.randint(1, 9)) for i in range(12)]
    rng.shuffle(tables)
    for table in tables:
        manager.free(table)
    assert manager._free.runs() == [(0, 64)]


def test_runs_join_in_whatever_order_blocks_come_back() -> None:
    for order in itertools.permutations(range(5)):
        free = FreeBlocks(5)
        free.take(5)
        for block in order:
            free.put(block)
        assert free.runs() == [(0, 5)], order


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_ten_thousand_random_histories_balance(block_size: int) -> None:
    """Run 2,500 histories per block size. Check tables' tokens in between, and the bookkeeping after each history."""
    for seed in range(2500):
        rng = random.Random(seed * 31 + block_size)
        model = PoolModel(num_blocks=rng.choice([1, 2, 3, 8, 24]), block_size=block_size)
        for _ in range(rng.randint(1, 24)):
            seqs = list(model.tables)
            choice = rng.random()
            if not seqs or choice < 0.2:
                model.allocate()
            elif choice < 0.4:
                parent = rng.choice(seqs)
                cut = rng.randint(0, len(model.tokens[parent])) if rng.random() < 0.4 else None
                model.fork(parent, cut)
            elif choice < 0.8:
                model.append(rng.choice(seqs), rng.choice([0, 1, 1, 1, 2, block_size, rng.randint(1, 40)]))
            else:
                model.free(rng.choice(seqs))
            if rng.random() < 0.3:
                model.check()
        model.check()
        model.drain()


def test_the_alphabet_of_the_histories_collides() -> None:
    assert hash(ALPHABET[0]) == hash(ALPHABET[1])
    assert hash((ALPHABET[0],) * 4) == hash((ALPHABET[1],) * 4)
    assert hash(COLLIDES) == 0


def histories(operations: int, first_seed: int = 0) -> None:
    """Run random histories with every verb, prefix hits and swapping, until this many operations are done."""
    seed, done = first_seed, 0
    hits = evictions = copies = swaps = 0
    while done < operations:
        rng = random.Random(seed)
        model = PoolModel(
            num_blocks=rng.choice([1, 2, 3, 8, 24]),
            block_size=rng.choice([1, 2, 4, 16]),
            prefix_caching=rng.random() < 0.8,
            num_host_blocks=rng.choice([0, 2, 20]),
        )
        length = rng.randint(1, 60)
        random_history(model, rng, length)
        hits += model.manager.num_hit_tokens
        evictions += model.manager.num_evictions
        copies += model.manager.num_copies
        swaps += model.swap.num_swapped_in
        model.drain()
        seed, done = seed + 1, done + length
    assert min(hits, evictions, copies, swaps) > operations // 1000, "the histories do not reach everything"


def test_twenty_thousand_operations_with_prefix_hits_collisions_and_swapping() -> None:
    histories(20_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_operations() -> None:
    histories(1_000_000, first_seed=1_000_000)


def test_a_block_that_its_last_owner_writes_to_is_found_no_more() -> None:
    manager = BlockManager(8, 4, prefix_caching=True)
    tokens = list(range(9))
    parent = grown(manager, 0, 8)
    manager.commit(parent, tokens, 8)
    child = manager.fork(parent, 1, 6)
    manager.free(parent)
    found = manager.find_cached(tokens)
    assert (found.num_tokens, found.num_held) == (8, 2)
    manager.append(child, 1)
    assert manager.take_copies() == [], "nobody else holds it: no copy"
    found = manager.find_cached(tokens)
    assert (found.num_tokens, found.num_held) == (4, 1)
    check(manager)


def committed(manager: BlockManager, seq_id: int, tokens: list[int], salt: str | None = None) -> BlockTable:
    """Return a table with every full block in the prefix cache."""
    table = manager.allocate(seq_id, tokens, salt)
    manager.append(table, len(tokens) - table.num_tokens)
    manager.commit(table, tokens, len(tokens))
    return table


def test_a_fork_keeps_the_salt() -> None:
    """Blocks that a fork computes are found by requests with its parent's salt, and by no other."""
    manager = BlockManager(8, 4, prefix_caching=True)
    tokens = list(range(9))
    parent = manager.allocate(0, tokens, "one")
    manager.append(parent, 2)
    child = manager.fork(parent, 1)
    manager.append(child, 7)
    manager.commit(child, tokens, 9)
    assert manager.find_cached(tokens, "one").num_tokens == 8
    assert manager.find_cached(tokens).num_tokens == 0


def test_a_fork_keeps_the_nodes_of_its_full_blocks() -> None:
    """A fork within a block then goes another way: its second block is its own, and its own tokens find it."""
    manager = BlockManager(8, 4, prefix_caching=True)
    first, second = list(range(9)), [*range(6), 60, 70, 80]
    parent = committed(manager, 0, first)
    child = manager.fork(parent, 1, 6)
    manager.append(child, 3)
    manager.commit(child, second, 9)
    assert manager.find_cached(second).blocks == child.blocks[:2]
    assert manager.find_cached(first).blocks == parent.blocks[:2]


def test_a_block_is_found_behind_its_own_beginning_only() -> None:
    """The same tokens after other ones have another K and V."""
    manager = BlockManager(8, 4, prefix_caching=True)
    committed(manager, 0, list(range(9)))
    assert manager.find_cached([4, 5, 6, 7, 8]).num_tokens == 0
    assert manager.find_cached([9, 9, 9, 9, 4, 5, 6, 7, 8]).num_tokens == 0
    assert manager.find_cached([0, 1, 2, 3, 4, 5, 6, 7, 9]).num_tokens == 8


def test_of_a_table_the_tail_is_evicted_first() -> None:
    """No prompt can match a block after an evicted one, so it would only take memory."""
    manager = BlockManager(5, 4, prefix_caching=True)
    tokens = list(range(17))
    manager.free(committed(manager, 0, tokens))
    for seq_id, left in ((1, 12), (2, 8), (3, 4), (4, 0)):
        grown(manager, seq_id, 4 if seq_id > 1 else 8)  # one block is free; then each takes a cached one
        assert manager.find_cached(tokens).num_tokens == left


def test_what_a_freed_tail_held_is_not_found_and_what_takes_its_place_is() -> None:
    """The tail ends within a block, which is written again: that block is another one then."""
    manager = BlockManager(8, 4, prefix_caching=True)
    old, new = list(range(12)), [*range(5), *range(20, 28)]
    table = committed(manager, 0, old)
    free_tail(manager, table, 5)
    manager.append(table, 8)
    manager.commit(table, new, 13)
    assert manager.find_cached([*new, 99]).blocks == table.blocks[:3]
    assert manager.find_cached([*old, 99]).blocks == table.blocks[:1]
    check(manager)


def test_a_reset_forgets_blocks_that_tables_hold() -> None:
    """Held blocks stay with their tables, and are freed with them."""
    manager, tokens = BlockManager(8, 4, prefix_caching=True), list(range(9))
    table, other = committed(manager, 0, tokens), committed(manager, 1, [*range(50, 59)])
    manager.free(other)
    manager.reset_prefix_cache()
    assert manager.find_cached(tokens).num_tokens == 0
    assert len(table.blocks) == 3
    assert (manager.num_cached, manager.num_free) == (0, 5)
    manager.free(table)
    assert (manager.num_cached, manager.num_free) == (0, 8)
    check(manager)


def test_a_salt_survives_the_host() -> None:
    manager, swap = BlockManager(8, 4, prefix_caching=True), SwapSpace(8)
    tokens = list(range(9))
    table = committed(manager, 0, tokens, "one")
    assert swap.swap_out(manager, [(table, 9)]) is not None
    manager.reset_prefix_cache()
    tables, _ = swap.swap_in(manager, [0])
    manager.commit(tables[0], tokens, 9)
    assert manager.find_cached(tokens).num_tokens == 0
    assert manager.find_cached(tokens, "one").num_tokens == 8


def test_hits_are_as_frequent_as_a_simple_oracle_says() -> None:
    """A pool holds k prefixes of equal length and evicts the least recently used: exactly the k latest ones are hit."""
    rng = random.Random(8)
    manager = BlockManager(7 * 3 + 1, 4, prefix_caching=True)
    latest: list[int] = []
    for seq in range(400):
        prefix = rng.randrange(9)
        prompt = [prefix] * 12 + [100]
        table = manager.allocate(seq, prompt)
        assert (table.num_tokens == 12) == (prefix in latest[-7:]), (seq, prefix, latest)
        manager.append(table, len(prompt) - table.num_tokens)
        manager.commit(table, prompt, len(prompt))
        manager.free(table)
        latest = [other for other in latest if other != prefix] + [prefix]
        check(manager)


class CacheMachine(RuleBasedStateMachine):
    """Find the shortest history that breaks the bookkeeping: all operations, hits, hash collisions, swaps."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4, 8]),
        prefix_caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 12]),
    )
    def start(self, num_blocks: int, block_size: int, prefix_caching: bool, num_host_blocks: int) -> None:
        self.model = PoolModel(num_blocks, block_size, prefix_caching, num_host_blocks)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        prompt = data.draw(st.lists(st.sampled_from(ALPHABET), max_size=3 * self.model.block_size + 1))
        seq = self.model.allocate(prompt)
        if not self.model.append(seq, 0, prompt[len(self.model.tokens[seq]) :]):
            self.model.free(seq)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model.tables)))
        self.model.fork(parent, data.draw(st.none() | st.integers(0, len(self.model.tokens[parent]))))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), values=st.lists(st.sampled_from(ALPHABET), max_size=20))
    def append(self, data: st.DataObject, values: list[int]) -> None:
        self.model.append(data.draw(st.sampled_from(sorted(self.model.tables))), 0, values)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.model.free(data.draw(st.sampled_from(sorted(self.model.tables))))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def free_tail(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model.tables)))
        self.model.free_tail(seq, data.draw(st.integers(0, len(self.model.tokens[seq]))))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.model.swap_out(
            data.draw(st.lists(st.sampled_from(sorted(self.model.tables)), min_size=1, max_size=3, unique=True))
        )

    @precondition(lambda self: self.model.away)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        self.model.swap_in(
            data.draw(st.lists(st.sampled_from(sorted(self.model.away)), min_size=1, max_size=3, unique=True))
        )

    @precondition(lambda self: self.model.away)
    @rule(data=st.data())
    def abort_on_the_host(self, data: st.DataObject) -> None:
        self.model.discard(data.draw(st.sampled_from(sorted(self.model.away))))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.model.manager.reset_prefix_cache()

    @rule()
    def step(self) -> None:
        self.model.run_step()

    @rule()
    def every_table_reads_its_own_tokens(self) -> None:
        self.model.check()

    @invariant()
    def books_balance(self) -> None:
        check(self.model.manager)
        check_swap(self.model.swap)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.check()
            self.model.drain()


CacheMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
