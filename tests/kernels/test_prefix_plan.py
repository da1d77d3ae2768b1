"""The blocks that sequences share, found in their tables and cut into a list of work."""

from __future__ import annotations

import random

import torch
from shapes import forked_tables, shape_of

from minillm.kernels.prefix_plan import FREE, ITEM_WORDS, WorkList, plan_attention, prefix_tree


def test_the_tree_holds_what_tables_have_in_common_and_nothing_else() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        tables, lens = forked_tables(rng.randint(2, 30), rng.choice((1, 4)), 40, rng)
        block_size = 4 if seed % 2 else 1
        full = [min(len(table), length // block_size) for table, length in zip(tables, lens, strict=True)]
        tree = prefix_tree(tables, full)
        assert sorted(tree.order) == list(range(len(tables)))
        read: dict[int, list[int]] = {seq: [] for seq in tree.order}  # by going through the tree
        loads: dict[tuple[int, int], int] = {}
        for node in tree.nodes:
            lead = tables[tree.order[node.first]]
            for index in range(node.begin, node.end):
                loads[index, lead[index]] = loads.get((index, lead[index]), 0) + 1
            for seq in tree.order[node.first : node.first + node.count]:
                assert len(read[seq]) == node.begin, "a path without gaps"
                read[seq] += lead[node.begin : node.end]
        for seq, begin in zip(tree.order, tree.tails, strict=True):
            assert len(read[seq]) == begin
            for index in range(begin, full[seq]):
                key = index, tables[seq][index]
                loads[key] = loads.get(key, 0) + 1
            assert read[seq] + tables[seq][begin:] == tables[seq]
        assert set(loads.values()) <= {1}, "a full block is in one place of the tree"


def test_what_is_not_worth_it_gives_no_plan() -> None:
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)
    assert plan_attention([], [], 16, shape) is None
    assert plan_attention([[1, 2], [3, 4]], [32, 20], 16, shape, 2, FREE) is None, "nothing shared"
    assert plan_attention([[1, 2], [1, 4]], [15, 20], 16, shape, 2, FREE) is None, "no full block shared"

    def planned(num_seqs: int, prefix: int, tail: int) -> bool:
        tables = [[*range(prefix // 16), *range(10**6 * i, 10**6 * i + tail // 16)] for i in range(1, num_seqs + 1)]
        return plan_attention(tables, [prefix + tail] * num_seqs, 16, shape) is not None

    # Measured on an H200, plain and shared: 5.5/10.8, 14.2/19.1, 67.9/85.0, 35.9/17.4, 159.1/34.9, 171.4/49.7 us.
    assert [planned(2, 256, 64), planned(2, 4096, 64), planned(64, 64, 1024)] == [False] * 3
    assert [planned(32, 1024, 64), planned(64, 4096, 64), planned(256, 1024, 64)] == [True] * 3


def test_plans_fit_the_grid() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        n = rng.choice((2, 5, 40, 200))
        shape = shape_of(rng.choice((8, 16, 64)), 8, 64, torch.bfloat16, rng.choice((1, 10, 132)))
        tables, lens = forked_tables(n, 1, 400, rng)
        plan = plan_attention(tables, lens, 1, shape, n + 3, FREE)
        if plan is not None:
            assert len(plan.items) <= shape.max_items(n + 3) * ITEM_WORDS
            assert plan.starts[-1] <= shape.max_results(n + 3)
            assert sorted(plan.order) == list(range(n + 3))


def test_a_long_run_is_split_whatever_else_there_is() -> None:
    """256 sequences behind one prompt, in 64 groups of four that share a little more."""
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)
    tables = [[*range(512), *range(1000 + 9 * (i // 4), 1008 + 9 * (i // 4)), 10**5 + i] for i in range(256)]
    plan = plan_attention(tables, [521 * 16] * 256, 16, shape, 256, FREE)
    assert plan is not None
    items = [plan.items[at : at + ITEM_WORDS] for at in range(0, len(plan.items), ITEM_WORDS)]
    lengths = [end - begin for _, _, _, begin, end, _ in items]
    assert lengths == sorted(lengths, reverse=True), "the longest first"
    # 16 tiles of rows for each part of the root, in one part: 16 x 8 kv heads are just below 132.
    assert sorted(lengths) == [128] * 64 + [8192] * 16


def test_two_items_at_a_time_where_nodes_in_8_bits_take_longer_than_tails() -> None:
    """Sequences behind one prompt, 32/8 heads x 128 on an H200; 128 x (16,384 + 128): 139 and 105 us measured."""
    shape, wide = (shape_of(32, 8, 128, torch.bfloat16, 132, in_8_bits) for in_8_bits in (True, False))

    def at_a_time(num_seqs: int, prefix: int, tail: int, prompts: int = 1) -> int:
        tables = [
            [
                *range(10**5 * (i % prompts), 10**5 * (i % prompts) + prefix // 16),
                *range(10**7 + 99 * i, 10**7 + 99 * i + tail // 16),
            ]
            for i in range(num_seqs)
        ]
        lens = [prefix + tail] * num_seqs
        plan, alone = (plan_attention(tables, lens, 16, each, costs=FREE) for each in (shape, wide))
        assert plan is not None
        assert alone is not None
        assert plan.counts[0] * ITEM_WORDS == len(plan.items)
        assert alone.at_a_time == 1, "in 16 bits always one"
        assert WorkList.allocate(num_seqs, shape, torch.device("cpu")).fill(plan).at_a_time == plan.at_a_time
        return plan.at_a_time

    assert [at_a_time(256, 8192, 128), at_a_time(128, 8192, 64), at_a_time(256, 512, 8, prompts=32)] == [2, 2, 2]
    assert [at_a_time(256, 1024, 128), at_a_time(128, 2048, 192), at_a_time(32, 512, 64, prompts=8)] == [1, 1, 1]


def test_tails_are_many_where_a_multiprocessor_has_more_than_four() -> None:
    """With a node on every multiprocessor 64 x (4,096 + 128) takes 28, not 33 us, 256 x (1,024 + 512) 103, not 81."""
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)
    assert [shape.has_many_tails(num_seqs) for num_seqs in (1, 64, 66, 67, 256)] == [False, False, False, True, True]
