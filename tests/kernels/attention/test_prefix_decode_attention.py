"""Test attention over a prefix tree against the reference. It reads each shared block once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lib.kernels import (
    DEVICE,
    DTYPES,
    ON_GPU,
    TOLERANCE,
    combined,
    forked_tables,
    in_float64,
    randn,
    relative_error,
    rounded,
    shape_of,
)
from minillm.kernels import Pages, reference
from minillm.kernels.attention.plan import FREE, ITEM_WORDS, AttentionShape, Plan, WorkList, plan_attention, prefix_tree

pytest.importorskip("triton")
from minillm.kernels.attention.shared import prefix_attention


def check_against_reference(
    tables: list[list[int]], lens: list[int], block_size: int, shape: AttentionShape, dtype: torch.dtype,
    grown: int = 0, in_8_bits: bool = False,
) -> Plan:  # fmt: skip
    """Plan for ``tables`` without their last ``grown`` tokens each, attend with them, compare."""
    before = [max(0, length - grown) for length in lens]
    plan = plan_attention(tables, before, block_size, shape, len(tables) + 2, FREE)
    assert plan is not None, "this batch shares nothing"
    n = len(tables) + 2
    work = WorkList.allocate(n, shape, DEVICE)
    work.words.fill_(1)  # of the previous plan
    work = work.fill(plan)
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
    pages = Pages(pool[0], pool[1], padded, context)
    if in_8_bits:
        pages = rounded(pages)
    exact = reference.paged_attention(q.double(), in_float64(pages), scale)
    got = prefix_attention(q, pages, scale, work)
    assert relative_error(got, exact) < TOLERANCE[dtype]
    assert torch.equal(got[context == 0], torch.zeros_like(got[context == 0]))
    pages = pages._replace(window=max(lens) // 2)
    exact = reference.paged_attention(q.double(), in_float64(pages), scale)
    assert relative_error(prefix_attention(q, pages, scale, work), exact) < TOLERANCE[dtype]
    return plan


@pytest.mark.parametrize(
    ("dtype", "heads", "splitting"),
    combined(
        DTYPES,
        # sequences, heads, key heads, their size, and that of a block
        [
            (9, 8, 2, 32, 4),
            (7, 3, 3, 24, 1),
            (8, 6, 2, 16, 16),
            (6, 8, 1, 16, 2),
            *([(70, 32, 8, 128, 16), (40, 32, 32, 128, 1), (90, 9, 3, 64, 256), (33, 8, 1, 80, 64)] if ON_GPU else []),
        ],
        # processors, and whether the cache is in 8 bits: nothing is split, or much
        [(1, False), (132, False), (1, True), (132, True)] if ON_GPU else [(1, False), (16, False), (4, True)],
    ),
)
def test_prefix_attention(
    dtype: torch.dtype, heads: tuple[int, int, int, int, int], splitting: tuple[int, bool]
) -> None:
    (num_seqs, num_heads, num_kv_heads, head_dim, block_size), (processors, in_8_bits) = heads, splitting
    shape = shape_of(num_heads, num_kv_heads, head_dim, dtype, processors, in_8_bits)
    for seed in range(3 if ON_GPU else 1):
        tables, lens = forked_tables(num_seqs, block_size, 2000 if ON_GPU else 70, random.Random(seed))
        check_against_reference(tables, lens, block_size, shape, dtype, in_8_bits=in_8_bits)


@pytest.mark.parametrize("block_size", [1 << power for power in range(9)])
def test_a_tree_of_depth_three_whose_members_are_no_neighbours(block_size: int) -> None:
    """A system prompt, then one of two documents, then samples; unrelated sequences stand between them."""
    fresh = iter(range(10**6))
    blocks = max(1, 64 // block_size)

    def run(length: int) -> list[int]:
        return [next(fresh) for _ in range(length)]

    system = run(blocks)
    documents = [system + run(blocks) for _ in range(2)]
    beams = [documents[0] + run(blocks) for _ in range(2)]
    own = 2 if block_size < 64 else 1
    tables = [table + run(own) for parent in (*beams, *documents, system, []) for table in (parent, parent, parent)]
    lens = [len(table) * block_size - (index % block_size) for index, table in enumerate(tables)]
    mixed = list(range(0, 18, 3)) + list(range(1, 18, 3)) + list(range(2, 18, 3))
    tables, lens = [tables[i] for i in mixed], [lens[i] for i in mixed]
    tree = prefix_tree(tables, [length // block_size for length in lens])
    assert sorted((node.count, node.begin, node.end) for node in tree.nodes) == sorted(
        [(15, 0, blocks), (9, blocks, 2 * blocks), (3, blocks, 2 * blocks)] + [(3, 2 * blocks, 3 * blocks)] * 2
    )
    check_against_reference(tables, lens, block_size, shape_of(4, 2, 16, torch.float32), torch.float32)


def test_a_plan_holds_while_sequences_grow() -> None:
    shape = shape_of(4, 2, 16, torch.float32)
    tables, lens = forked_tables(12, 4, 300, random.Random(5))
    check_against_reference(tables, [length if length > 9 else 0 for length in lens], 4, shape, torch.float32, grown=9)


def test_a_shared_block_is_read_for_all() -> None:
    """One item reads the shared run, for any number of sequences, and no tail reads it again."""
    shape = shape_of(8, 2, 16, torch.bfloat16, processors=1)
    tables = [[*range(32), 100 + number] for number in range(10)]
    plan = check_against_reference(tables, [32 * 4 + 3] * 10, 4, shape, torch.bfloat16)
    items = [plan.items[at : at + ITEM_WORDS] for at in range(0, len(plan.items), ITEM_WORDS)]
    assert items == [[10, 0, 0, 0, 128, 0]]
    assert plan.tails[:10] == [128] * 10


def test_launches_in_a_row_use_results_of_their_own() -> None:
    """A launch writes its results over those of the previous one; the phases and the merge overlap."""
    shape = shape_of(8, 2, 64, torch.bfloat16, processors=132 if ON_GPU else 1)
    num_seqs, prefix = (40, 4096) if ON_GPU else (3, 32)
    for tail in (1, 8, 100):
        shared = list(range(prefix // 8))
        tables = [[*shared, *range(prefix + 20 * i, prefix + 20 * i + -(-tail // 8))] for i in range(num_seqs)]
        lens = torch.full((num_seqs,), prefix + tail, dtype=torch.int32, device=DEVICE)
        plan = plan_attention(tables, lens.tolist(), 8, shape, costs=FREE)
        assert plan is not None
        work = WorkList.allocate(num_seqs, shape, DEVICE).fill(plan)
        pool = randn(2, prefix + 20 * num_seqs, 8, 2, 64, dtype=torch.bfloat16)
        padded = torch.tensor(tables, dtype=torch.int32, device=DEVICE)
        queries = [randn(num_seqs, 8, 64, dtype=torch.bfloat16) for _ in range(12 if ON_GPU else 2)]

        pages = Pages(pool[0], pool[1], padded, lens)

        def attend(q: Tensor, pages: Pages = pages, work: WorkList = work) -> Tensor:
            return prefix_attention(q, pages, 0.125, work)

        alone = []
        for q in queries:
            alone.append(attend(q))
            if ON_GPU:
                torch.cuda.synchronize()
        exact = reference.paged_attention(queries[-1].double(), in_float64(pages), 0.125)
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
            prefix_attention(q, Pages(pool[0], pool[1], tables, lens), 0.25, work)
