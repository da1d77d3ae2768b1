"""Test the plan for shared blocks: find them in the block tables, and split them into work items."""

from __future__ import annotations

import random

import torch

from lib.kernels import forked_tables, shape_of
from minillm.kernels.attention.plan import FREE, ITEM_WORDS, WorkList, plan_attention, prefix_tree


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
    """Plan 256 sequences of one prompt, in 64 groups of four that share some more blocks."""
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)
    tables = [[*range(512), *range(1000 + 9 * (i // 4), 1008 + 9 * (i // 4)), 10**5 + i] for i in range(256)]
    plan = plan_attention(tables, [521 * 16] * 256, 16, shape, 256, FREE)
    assert plan is not None
    items = [plan.items[at : at + ITEM_WORDS] for at in range(0, len(plan.items), ITEM_WORDS)]
    lengths = [end - begin for _, _, _, begin, end, _ in items]
    assert lengths == sorted(lengths, reverse=True), "the longest first"
    # 16 tiles of rows for each part of the root, in one part: 16 x 8 kv heads are just below 132.
    assert sorted(lengths) == [128] * 64 + [8192] * 16


def test_nodes_in_8_bits_are_spread_as_tails_leave_room() -> None:
    """Plan sequences of one prompt, 32/8 heads x 128 on an H200. In 16 bits each item has a multiprocessor."""
    shape, wide = (shape_of(32, 8, 128, torch.bfloat16, 132, in_8_bits) for in_8_bits in (True, False))

    def spread(num_seqs: int, prefix: int, tail: int, prompts: int = 1) -> tuple[int, int]:
        """Items at a time on a multiprocessor, and on how many."""
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
        assert alone.counts[2] == 1, "in 16 bits always one"
        assert alone.counts[0] * 8 <= 132 or prompts > 1
        work = WorkList.allocate(num_seqs, shape, torch.device("cpu")).fill(plan)
        assert [*work.counts.tolist(), *work.launch] == plan.counts
        assert work.first(1).launch == work.launch
        return work.at_a_time, plan.counts[1]

    # Few tails lie beside nodes that have all multiprocessors: 28 us and 29 to 33 by two.
    assert [spread(64, 4096, 128), spread(16, 4096, 64), spread(8, 2048, 128)] == [(1, 132)] * 3
    # Half of the multiprocessors, for tails take as long: 34 us, and 40 one by one; 50 and 64.
    assert [spread(256, 1024, 128), spread(64, 4096, 1024)] == [(2, 66)] * 2
    # Three quarters: 28 us, 34 in half of them and 33 one by one; 26, and 30 in all of them.
    assert [spread(128, 2048, 128), spread(128, 2048, 64)] == [(2, 99)] * 2
    # All, for nodes are most of the work: 106 us, and 139 one by one. Or a program would take two: 41 and 44.
    assert [spread(128, 16384, 128), *(spread(256, 512, tail, prompts=32) for tail in (16, 112))] == [(2, 132)] * 3


def test_long_tails_are_cut_into_twice_as_many_parts() -> None:
    """64 x (4,096 + 1,024): 50 us and 62, in 16 bits 86 and 100; but 64 x (4,096 + 128) 33 and 28, 31 and 28."""
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)
    cases = (1, 16, 33, 64, 256)
    assert [shape.tail_splits(num_seqs) for num_seqs in cases] == [64, 4, 2, 1, 1]
    assert [shape.tail_splits(num_seqs, 511) for num_seqs in cases] == [64, 4, 2, 1, 1]
    assert [shape.tail_splits(num_seqs, 1024) for num_seqs in cases] == [64, 4, 4, 2, 1]
