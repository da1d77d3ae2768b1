"""Attention over a prefix tree: the same numbers as the reference, whatever is shared, and shared blocks read once."""

from __future__ import annotations

import random

import pytest
import torch
from shapes import DEVICE, DTYPES, ON_GPU, TOLERANCE, randn, relative_error
from torch import Tensor

from minillm.kernels import reference
from minillm.kernels.prefix_plan import FREE, ITEM_WORDS, AttentionShape, Plan, WorkList, plan_attention, prefix_tree

pytest.importorskip("triton")
from minillm.kernels.prefix_decode_attention import prefix_attention


def forked_tables(
    num_seqs: int, block_size: int, longest: int, rng: random.Random
) -> tuple[list[list[int]], list[int]]:
    """Block tables as forks make them, in no order: trees of any depth, sequences alone, and padding between them.

    A table may begin with any part of another's full blocks; the others are its own.
    """
    fresh = iter(rng.sample(range(10 * num_seqs * longest), num_seqs * (longest // block_size + 2)))
    rows: list[tuple[list[int], int]] = []
    for number in range(num_seqs):
        length = longest if number < 2 else 0 if rng.random() < 0.1 else rng.randint(1, longest)
        parent, parent_length = rng.choice(rows) if rows and (number == 1 or rng.random() < 0.8) else ([], 0)
        shared = min(parent_length, length) // block_size
        shared = shared if number == 1 else rng.choice((shared, rng.randint(0, shared)))
        own = -(-length // block_size) - shared
        rows.append((parent[:shared] + [next(fresh) for _ in range(own)], length))
    numbers = {block: number for number, block in enumerate(sorted({block for table, _ in rows for block in table}))}
    rng.shuffle(rows)
    return [[numbers[block] for block in table] for table, _ in rows], [length for _, length in rows]


def shape_of(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, processors: int = 4
) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, dtype.itemsize, processors)


def check_against_reference(
    tables: list[list[int]], lens: list[int], block_size: int, shape: AttentionShape, dtype: torch.dtype, grown: int = 0
) -> Plan:
    """Plan for ``tables`` without their last ``grown`` tokens each, attend with them, compare."""
    before = [max(0, length - grown) for length in lens]
    plan = plan_attention(tables, before, block_size, shape, len(tables) + 2, FREE)
    assert plan is not None, "this batch shares nothing"
    n = len(tables) + 2
    work = WorkList.allocate(n, shape, DEVICE)
    work.words.fill_(1)  # of the plan before
    work.fill(plan)
    tables, lens = [*tables, [], []], [*lens, 0, 0]
    num_blocks = max(block for table in tables for block in table) + 1
    pool = torch.full((2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim), float("nan"), dtype=dtype)
    for table, length in zip(tables, lens, strict=True):
        for index, block in enumerate(table):
            held = min(block_size, length - index * block_size)
            pool[:, block, :held] = torch.randn(2, held, shape.num_kv_heads, shape.head_dim).to(dtype)
    pool = pool.to(DEVICE)
    width = max(map(len, tables)) + 1
    padded = torch.tensor([t + [10**6] * (width - len(t)) for t in tables], dtype=torch.int32, device=DEVICE)
    context = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    packed = randn(n, shape.num_heads + 1, shape.head_dim, dtype=dtype)
    q = packed[:, 1:]  # rows further apart than they are long
    scale = shape.head_dim**-0.5
    exact = reference.paged_attention(q.double(), pool[0].double(), pool[1].double(), padded, context, scale)
    got = prefix_attention(q, pool[0], pool[1], padded, context, scale, work)
    assert relative_error(got, exact) < TOLERANCE[dtype]
    assert torch.equal(got[context == 0], torch.zeros_like(got[context == 0]))
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (9, 8, 2, 32, 4),
        (7, 3, 3, 24, 1),
        (8, 6, 2, 16, 16),
        (6, 8, 1, 16, 2),
        *([(70, 32, 8, 128, 16), (40, 32, 32, 128, 1), (90, 9, 3, 64, 256), (33, 8, 1, 80, 64)] if ON_GPU else []),
    ],
)
@pytest.mark.parametrize("processors", [1, 132 if ON_GPU else 16])  # nothing is split, or much
def test_prefix_attention(
    dtype: torch.dtype, num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    processors: int,
) -> None:  # fmt: skip
    shape = shape_of(num_heads, num_kv_heads, head_dim, dtype, processors)
    for seed in range(3 if ON_GPU else 1):
        tables, lens = forked_tables(num_seqs, block_size, 2000 if ON_GPU else 70, random.Random(seed))
        check_against_reference(tables, lens, block_size, shape, dtype)


@pytest.mark.parametrize("block_size", [1 << power for power in range(9)])
def test_a_tree_of_depth_three_whose_members_are_no_neighbours(block_size: int) -> None:
    """System prompt, then one of two documents, then samples; and strangers between them."""
    fresh = iter(range(10**6))
    blocks = max(1, 64 // block_size)

    def run(length: int) -> list[int]:
        return [next(fresh) for _ in range(length)]

    system = run(blocks)
    documents = [system + run(blocks) for _ in range(2)]
    beams = [documents[0] + run(blocks) for _ in range(2)]
    tables = [table + run(2) for parent in (*beams, *documents, system, []) for table in (parent, parent, parent)]
    lens = [len(table) * block_size - (index % block_size) for index, table in enumerate(tables)]
    mixed = list(range(0, 18, 3)) + list(range(1, 18, 3)) + list(range(2, 18, 3))
    tables, lens = [tables[i] for i in mixed], [lens[i] for i in mixed]
    tree = prefix_tree(tables, [length // block_size for length in lens])
    assert sorted((node.count, node.begin, node.end) for node in tree.nodes) == sorted(
        [(15, 0, blocks), (9, blocks, 2 * blocks), (3, blocks, 2 * blocks)] + [(3, 2 * blocks, 3 * blocks)] * 2
    )
    check_against_reference(tables, lens, block_size, shape_of(4, 2, 16, torch.float32), torch.float32)


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


def test_a_plan_holds_while_sequences_grow() -> None:
    shape = shape_of(4, 2, 16, torch.float32)
    tables, lens = forked_tables(12, 4, 300, random.Random(5))
    check_against_reference(tables, [length if length > 9 else 0 for length in lens], 4, shape, torch.float32, grown=9)


def test_a_shared_block_is_read_for_all() -> None:
    """One item reads the shared run, whatever the number of sequences, and no tail reads it again."""
    shape = shape_of(8, 2, 16, torch.bfloat16, processors=1)
    tables = [[*range(32), 100 + number] for number in range(10)]
    plan = check_against_reference(tables, [32 * 4 + 3] * 10, 4, shape, torch.bfloat16)
    items = [plan.items[at : at + ITEM_WORDS] for at in range(0, len(plan.items), ITEM_WORDS)]
    assert items == [[10, 0, 0, 0, 128, 0]]
    assert plan.tails[:10] == [128] * 10


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
    # 16 tiles of rows for each part of the root, in two parts: 2 x 16 x 8 kv heads are just below 2 x 132.
    assert sorted(lengths) == [128] * 64 + [4096] * 32


def test_two_items_at_a_time_where_nodes_take_longer_than_tails() -> None:
    """Sequences behind one prompt, 32/8 heads x 128 on an H200: one and two at a time, measured, microseconds."""
    shape = shape_of(32, 8, 128, torch.bfloat16, processors=132)

    def programs(num_seqs: int, prefix: int, tail: int, prompts: int = 1) -> int:
        tables = [
            [
                *range(10**5 * (i % prompts), 10**5 * (i % prompts) + prefix // 16),
                *range(10**7 + 99 * i, 10**7 + 99 * i + tail // 16),
            ]
            for i in range(num_seqs)
        ]
        plan = plan_attention(tables, [prefix + tail] * num_seqs, 16, shape, costs=FREE)
        assert plan is not None
        assert plan.counts[0] * ITEM_WORDS == len(plan.items)
        return plan.counts[1] // 132

    # 208 and 141, 109 and 72, 41 and 37; 54 and 63, 43 and 54, 16 and 17.
    assert [programs(256, 8192, 128), programs(128, 8192, 64), programs(256, 512, 8, prompts=32)] == [2, 2, 2]
    assert [programs(256, 1024, 128), programs(128, 2048, 192), programs(32, 512, 64, prompts=8)] == [1, 1, 1]


def test_launches_in_a_row_use_results_of_their_own() -> None:
    """The results of a launch lie where those of the one before it lay; the phases and the merge overlap."""
    shape = shape_of(8, 2, 64, torch.bfloat16, processors=132 if ON_GPU else 1)
    num_seqs, prefix = (40, 4096) if ON_GPU else (3, 32)
    for tail in (1, 8, 100):
        shared = list(range(prefix // 8))
        tables = [[*shared, *range(prefix + 20 * i, prefix + 20 * i + -(-tail // 8))] for i in range(num_seqs)]
        lens = torch.full((num_seqs,), prefix + tail, dtype=torch.int32, device=DEVICE)
        plan = plan_attention(tables, lens.tolist(), 8, shape, costs=FREE)
        assert plan is not None
        work = WorkList.allocate(num_seqs, shape, DEVICE)
        work.fill(plan)
        pool = randn(2, prefix + 20 * num_seqs, 8, 2, 64, dtype=torch.bfloat16)
        padded = torch.tensor(tables, dtype=torch.int32, device=DEVICE)
        queries = [randn(num_seqs, 8, 64, dtype=torch.bfloat16) for _ in range(12 if ON_GPU else 2)]

        def attend(
            q: Tensor, pool: Tensor = pool, padded: Tensor = padded, lens: Tensor = lens, work: WorkList = work
        ) -> Tensor:
            return prefix_attention(q, pool[0], pool[1], padded, lens, 0.125, work)

        alone = []
        for q in queries:
            alone.append(attend(q))
            if ON_GPU:
                torch.cuda.synchronize()
        exact = reference.paged_attention(queries[-1].double(), pool[0].double(), pool[1].double(), padded, lens, 0.125)
        assert relative_error(alone[-1], exact) < TOLERANCE[torch.bfloat16]
        if ON_GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [attend(q) for q in queries]
            for _ in range(20):
                graph.replay()
        else:
            outs = [attend(q) for q in queries]
        assert all(torch.equal(out, expected) for out, expected in zip(outs, alone, strict=True))


def test_a_list_that_does_not_fit_is_refused() -> None:
    shape = shape_of(4, 2, 16, torch.float32)
    q, pool = randn(2, 4, 16), randn(2, 3, 4, 2, 16)
    tables, lens = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE)
    for work in (WorkList.allocate(3, shape, DEVICE), WorkList.allocate(2, shape_of(4, 4, 16, q.dtype), DEVICE)):
        with pytest.raises(ValueError, match="does not fit"):
            prefix_attention(q, pool[0], pool[1], tables, lens, 0.25, work)
