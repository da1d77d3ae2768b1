"""Test the app's picture of the pool, built from messages, against the engine's bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.cache import BlockManager, BlockTable, OutOfBlocks, pool_stats
from minillm.cache.swap import SwapSpace
from minillm.service.cache_view import CacheView, Owner
from minillm.service.messages import CacheChanged, decode_event, encode
from minillm.ui.memory.pool import BlockState, Pool

SIZE, NUM_BLOCKS = 4, 40


class Engine:
    """The parts of an engine that the view reads: a cache, a swap space, and random changes to both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = BlockManager(NUM_BLOCKS, SIZE, prefix_caching=True)
        self.scheduler = SimpleNamespace(preemption=SimpleNamespace(swap=SwapSpace(16), count=0))
        self.tokenizer = None
        self.requests = SimpleNamespace(disk=None)
        self.tokens: dict[int, list[int]] = {}
        self.pinned: set[int] = set()
        self.next_id = 0

    def owners(self) -> dict[int, Owner]:
        return {
            seq_id: Owner(f"request {seq_id // 3}", seq_id % 3, "pinned" if seq_id in self.pinned else "running",
                          SimpleNamespace(token_ids=self.tokens[seq_id]))  # type: ignore[arg-type]
            for seq_id in self.tokens
            if seq_id % 7
        }  # fmt: skip

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def act(self) -> None:
        """Do one thing that an engine does to its cache, if there is room for it."""
        draw, cache, swap = self.random, self.cache, self.scheduler.preemption.swap
        tables = list(cache.tables.values())
        kind = draw.choice(["new", "grow", "grow", "grow", "fork", "free", "swap", "return", "pin"])
        if kind == "new" and cache.num_free > 8:
            tokens = [draw.choice([1, 2]) for _ in range(draw.randint(2, 20))]
            table = cache.allocate(self.new_id(), tokens)
            self.tokens[table.seq_id] = tokens
            self.grow(table, len(tokens) - table.num_tokens)
        elif kind == "grow" and tables:
            self.grow(draw.choice(tables), draw.randint(1, 6))
        elif kind == "fork" and tables:
            parent = draw.choice(tables)
            child = cache.fork(parent, self.new_id(), draw.randint(0, parent.num_tokens))
            self.tokens[child.seq_id] = self.tokens[parent.seq_id][: child.num_tokens]
        elif kind == "free" and tables:
            cache.free(draw.choice(tables))
        elif kind == "swap" and tables:
            swap.swap_out(cache, [(table, table.num_tokens) for table in draw.sample(tables, min(2, len(tables)))])
        elif kind == "return" and swap.saved:
            names = list(swap.saved)[:2]
            if swap.blocks_needed(names) <= cache.num_free:
                swap.swap_in(cache, names)
        elif kind == "pin" and tables:
            self.pinned ^= {draw.choice(tables).seq_id}

    def grow(self, table: BlockTable, count: int) -> None:
        tokens = self.tokens[table.seq_id]
        with suppress(OutOfBlocks):
            self.cache.append(table, count)
            tokens += [self.random.choice([1, 2]) for _ in range(table.num_tokens - len(tokens))]
            self.cache.take_copies()
            self.cache.commit(table, tokens, table.num_tokens)


def pictures(engine: Engine, num_pictures: int) -> Iterator[Pool]:
    """The app's pool after each of the messages, which have been through the pipe."""
    pool, view = Pool(NUM_BLOCKS, SIZE, 100, 16), CacheView(engine)  # type: ignore[arg-type]
    for _ in range(num_pictures):
        for _ in range(engine.random.randint(0, 4)):
            engine.act()
        if (event := view.changes(engine.owners())) is not None:
            received = decode_event(encode(event))
            assert isinstance(received, CacheChanged)
            before = [look(pool, block) for block in range(NUM_BLOCKS)]
            changed = pool.apply(received)
            assert set(changed) == {block for block in range(NUM_BLOCKS) if look(pool, block) != before[block]}
        yield pool


def look(pool: Pool, block: int) -> tuple[Any, ...]:
    return pool.ref_counts[block], pool.filled[block], pool.state(block)


@pytest.mark.parametrize("seed", range(20))
def test_the_apps_picture_is_the_engines(seed: int) -> None:
    engine = Engine(seed)
    for pool in pictures(engine, 150):
        cache, stats = engine.cache, pool_stats(engine.cache)
        assert list(pool.ref_counts) == cache.ref_counts
        saved = engine.scheduler.preemption.swap.saved
        assert {seq_id: table.blocks for seq_id, table in pool.tables.items()} == {
            seq_id: table.blocks for seq_id, table in {**cache.tables, **saved}.items()
        }
        assert {seq_id for seq_id, table in pool.tables.items() if table.state == "swapped"} == set(saved)
        figures = pool.figures
        assert (figures.free_blocks, figures.cached_blocks) == (cache.num_free - cache.num_cached, cache.num_cached)
        assert (figures.shared_blocks, figures.logical_blocks) == (stats.shared_blocks, stats.logical_blocks)
        assert (pool.used_blocks, figures.used_slots) == (stats.used_blocks, stats.used_slots)
        pinned = {b for seq_id in pool.tables.keys() & engine.pinned if seq_id % 7 for b in cache_blocks(cache, seq_id)}
        assert {b for b in range(NUM_BLOCKS) if pool.state(b) is BlockState.PINNED} == pinned
        assert figures.pinned_blocks == len(pinned)
        assert all((pool.state(b) is BlockState.CACHED) == cache.is_cached(b) for b in range(NUM_BLOCKS))
        assert pool.counts.num_copies == cache.num_copies
    assert pool.counts.num_copies
    assert pool.counts.num_evictions
    assert pool.counts.num_swapped_in


def cache_blocks(cache: BlockManager, seq_id: int) -> list[int]:
    return cache.tables[seq_id].blocks if seq_id in cache.tables else []


def test_nothing_new_is_no_message() -> None:
    engine = Engine(1)
    view = CacheView(engine)  # type: ignore[arg-type]
    assert view.changes({}) is not None, "the first one"
    assert view.changes({}) is None
    engine.cache.append(engine.cache.allocate(1), 3)
    event = view.changes({})
    assert event is not None
    assert [(table.seq_id, table.blocks, table.keep) for table in event.tables] == [(1, [0], 0)]
    engine.cache.append(engine.cache.tables[1], 3)
    event = view.changes({})
    assert event is not None
    assert [(table.blocks, table.keep, table.num_tokens) for table in event.tables] == [([1], 1, 6)]
    assert view.changes({}) is None


@pytest.mark.parametrize("size", [4, 32])
def test_the_first_words_of_each_block_are_sent_once(size: int) -> None:
    engine = Engine(1)
    engine.cache = BlockManager(NUM_BLOCKS, size, prefix_caching=True)
    engine.tokenizer = SimpleNamespace(decode=lambda token_ids: " ".join(map(str, token_ids)))  # type: ignore[assignment]
    view, table = CacheView(engine), engine.cache.allocate(1)  # type: ignore[arg-type]
    engine.tokens[1] = list(range(10, 10 + 3 * size))
    before: dict[int, str] = {}
    for count in (2, 1, size, 3, size - 3, size - 3):
        engine.cache.append(table, count)
        event = view.changes(engine.owners())
        assert event is not None
        whole = [engine.tokens[1][start : table.num_tokens] for start in range(0, table.num_tokens, size)]
        now = {
            block: " ".join(map(str, part[: min(size, 16)])) for block, part in zip(table.blocks, whole, strict=True)
        }
        assert event.words == {block: words for block, words in now.items() if before.get(block) != words}
        before = now
    assert len(before) == 3


@pytest.mark.parametrize("salt", [None, "a salt"])
def test_the_place_of_a_block_in_the_prefix_cache(salt: str | None) -> None:
    engine = Engine(1)
    view, table = CacheView(engine), engine.cache.allocate(1, salt=salt)  # type: ignore[arg-type]
    engine.tokens[1] = [5, 6, 7, 8, 9, 1, 2, 3, 4]
    engine.cache.append(table, 9)
    engine.cache.commit(table, engine.tokens[1], 9)
    first, second, tail = (view.facts(block) for block in table.blocks)
    assert (first.before, second.before, tail.before) == (salt or "", str(first.node), "")


def test_the_tokens_of_a_block() -> None:
    engine = Engine(1)
    view = CacheView(engine)  # type: ignore[arg-type]
    engine.tokens[1] = [5, 6, 7, 8, 9]
    table = engine.cache.allocate(1)
    engine.cache.append(table, 5)
    engine.cache.commit(table, engine.tokens[1], 5)
    view.changes(engine.owners())
    full, tail = (view.facts(block) for block in table.blocks)
    assert (full.tokens, tail.tokens) == (["5", "6", "7", "8"], ["9"])
    assert full.node is not None
    assert tail.node is None
    assert full.age is not None
    blocks = list(table.blocks)
    engine.cache.free(table)
    view.changes(engine.owners())
    assert view.facts(blocks[0]).tokens == full.tokens, "the prefix cache knows them"
    assert (view.facts(blocks[1]).tokens, view.facts(blocks[1]).age) == ([], None)
