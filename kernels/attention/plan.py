"""Plan how decode attention reads blocks that several sequences of a batch share.

Sequences share blocks if their block tables begin with the same ids. Such tables form a *prefix tree* (ChunkAttention,
Ye et al. 2024). A *node* is a run of blocks shared by exactly the same sequences. A sequence's *tail* is the rest of
its context, which it reads alone. `prefix_tree` builds the tree. `plan_attention` splits the nodes into *items* of
similar cost, so that few sequences fill the GPU as well as many. A `WorkList` holds the items on the device for
`minillm.kernels.attention.shared`; a captured CUDA graph can read it. The kernels read the ends of the tails from the
context lengths, so a work list stays valid while sequences only grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from minillm.kernels.arguments import next_power_of_2

# The words of an item: its number of sequences (0: no work), one of these sequences, the index of the first one in
# `WorkList.order`, the first token, the token after the last, and the index of the item's partial result among those
# of each sequence.
ITEM_WORDS = 6

_PROGRAMS = 4  # per multiprocessor, in decode attention; `minillm bench kernels --op paged_attention` measured 1 to 16
_TAIL_PROGRAMS = 4, 8  # desired programs per multiprocessor that read tails: for short tails, and for long ones
_LONG_PART = 256  # minimum tokens in each part of a long tail


def most_parts(num_seqs: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the maximum number of parts into which decode attention splits each context, enough to fill the GPU."""
    return max(1, _PROGRAMS * num_processors // max(1, num_seqs * num_kv_heads))


@dataclass(frozen=True)
class Spread:
    """A way to split nodes into items and assign them to multiprocessors."""

    at_a_time: int  # items that run on a multiprocessor at the same time
    num_processors: int  # multiprocessors that run items
    parts: list[int]  # number of parts of each node, which is split along its tokens
    longest: int  # tiles of the longest item
    num_tasks: int  # items times kv heads
    num_results: float  # partial results per sequence, on average


@dataclass(frozen=True)
class Costs:
    """Times in microseconds and rates in bytes per microsecond. They decide whether and how shared blocks are read
    once.

    Reading a shared block once saves reads, although most of them would hit the L2. It costs two more launches, and
    partial results are written and merged. It also makes reading tails (unshared parts of contexts) slower.
    docs/decisions/shared-blocks.md has the figures of an H200.
    """

    launch: float = 3.0  # time of the two additional launches
    spared_rate: float = 7e6  # rate of the reads that sharing saves
    tail_rate: float = 4.3e6  # rate of reading tails
    tail_loss: float = 0.15  # fraction by which reading tails takes longer
    node_bytes: float = 1e6  # minimum that a node must save
    # For an 8-bit cache, where `AttentionShape.ways` offers several ways:
    tile: float = 1.0  # per tile of an item that shares its multiprocessor only with tails
    pair_tile: float = 1.45  # per tile of two items that share a multiprocessor, without tails
    pair: float = 3.0  # extra time to start and end two items, and to start tails after them
    turn: float = 8.0  # for each item after a program's first
    result: float = 0.6  # to write and merge one partial result of a sequence
    processor_rate: float = 4.4e4  # rate of reading tails on one multiprocessor without items

    def is_faster(self, spared: int, tails: int) -> bool:
        """Return whether it is faster to read shared blocks once.

        This saves ``spared`` bytes of reads, but the unshared parts of contexts, ``tails`` bytes, are read more slowly.
        """
        return spared / self.spared_rate > self.launch + self.tail_loss * tails / self.tail_rate

    def of_spread(self, spread: Spread, tails: int, num_processors: int) -> float:
        """Estimate the microseconds to read shared blocks, split as in ``spread``, and ``tails`` bytes of other blocks.

        A single item (a part of shared blocks) and other blocks do not overlap on one multiprocessor: times add up. Two
        items fill a multiprocessor, so other multiprocessors read other blocks. The GPU has ``num_processors``.
        """
        turns = -(-spread.num_tasks // (spread.at_a_time * spread.num_processors))
        nodes = (turns - 1) * self.turn
        merged = self.result * spread.num_results
        if spread.at_a_time == 1:
            return nodes + turns * spread.longest * self.tile + tails / self.tail_rate + merged
        nodes += self.pair + turns * spread.longest * self.pair_tile
        others = num_processors - spread.num_processors
        left = tails - min(self.tail_rate, others * self.processor_rate) * nodes
        behind = max(0.0, left / self.tail_rate)
        return nodes + merged + behind + min(behind, self.pair)


MEASURED = Costs()
FREE = Costs(launch=0, tail_loss=0, node_bytes=0)  # sharing always pays


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a model and a device that determine how attention is split."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_size: int  # bytes of one element of the queries
    num_processors: int  # multiprocessors of the GPU
    row_bytes: int | None = None  # bytes of a token's K or V in one head; None: computed from element_size

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all heads."""
        return 2 * self.num_kv_heads * (self.row_bytes or self.head_dim * self.element_size)

    @property
    def dim_tile(self) -> int:
        return max(16, next_power_of_2(self.head_dim))

    @property
    def tile(self) -> int:
        """Tokens per tile. A tile with 16 kB of K keeps memory busy without filling shared memory."""
        widest = 32 if self.element_size == 4 else 128  # float32 has no tensor cores: larger tiles overflow registers
        return max(16, min(widest, 16384 // (self.dim_tile * self.element_size)))

    @property
    def rows(self) -> int:
        """Query rows in a tile over shared blocks: at least 64 (for Hopper's tensor cores), or 16 in float32."""
        return max(16 if self.element_size == 4 else 64, next_power_of_2(self.group))

    def ways(self, num_seqs: int) -> list[tuple[int, int]]:
        """Return the candidate pairs (items per multiprocessor, number of multiprocessors that run items).

        A 16-bit cache has one candidate. An 8-bit cache also has pairs with two items per multiprocessor, because a
        single item is limited by latency. If much of the contexts is not shared, only pairs with two items remain: a
        single item takes twice as long next to programs that read unshared blocks.
        """
        everywhere = self.num_processors
        one = [(1, everywhere)]
        if self.row_bytes is None or self.row_bytes >= self.head_dim * self.element_size:
            return one
        many_tails = num_seqs * self.num_kv_heads > _TAIL_PROGRAMS[0] * everywhere
        return [*([] if many_tails else one), *((2, max(1, everywhere * i // 4)) for i in (2, 3, 4))]

    @property
    def seqs(self) -> int:
        """Number of sequences with queries in a tile over shared blocks."""
        return self.rows // self.group

    def num_parts(self, num_seqs: int) -> int:
        """Return the maximum number of parts of each context in decode attention: see `most_parts`."""
        return most_parts(num_seqs, self.num_kv_heads, self.num_processors)

    def tail_splits(self, num_seqs: int, tokens: float = 0) -> int:
        """Return the number of parts into which to split each tail: the part of a context that only one sequence reads.

        A program waits for each of its loads, so a multiprocessor should have several programs, and twice as many for
        long tails. Short tails get fewer parts, because merging more parts would cost more than it saves. The number is
        a power of two, because kernels are compiled for each number. ``tokens`` is the average length of a tail.
        """
        splits, more = (programs * self.num_processors // (num_seqs * self.num_kv_heads) for programs in _TAIL_PROGRAMS)
        return 1 << (max(1, min(64, more if tokens >= more * _LONG_PART else splits)).bit_length() - 1)

    def max_items(self, num_seqs: int) -> int:
        """Return the maximum number of items in a plan for ``num_seqs`` sequences."""
        return num_seqs // 4 + 4 * self.num_processors // self.num_kv_heads + 4

    def max_results(self, num_seqs: int) -> int:
        """Return the maximum number of partial results in a plan, over all of its ``num_seqs`` sequences."""
        return 4 * (num_seqs + self.num_processors)


@dataclass(frozen=True)
class WorkList:
    """A `Plan` of how to read shared blocks, on the device. All tensors are slices of one buffer at a fixed address."""

    order: Tensor  # [n] int32, the sequences, ordered so that those of each node are adjacent
    tails: Tensor  # [n] int32, in that order: the first token of each sequence's tail
    starts: Tensor  # [n + 1] int32, in that order: the index of each sequence's first partial result
    counts: Tensor  # [2] int32: the number of items, and of multiprocessors that run items
    items: Tensor  # [max_items(n), ITEM_WORDS] int32
    shape: AttentionShape
    words: Tensor  # int32, the whole buffer
    capacity: int  # maximum number of sequences
    # Known to the host, because launches depend on them:
    at_a_time: int = 1  # items per multiprocessor
    tail_splits: int = 1  # parts of each tail

    @classmethod
    def allocate(cls, num_seqs: int, shape: AttentionShape, device: torch.device) -> WorkList:
        """Allocate memory for plans of up to ``num_seqs`` sequences; `fill` it before use."""
        size = 3 * num_seqs + 3 + shape.max_items(num_seqs) * ITEM_WORDS
        return cls._view(torch.zeros(size, dtype=torch.int32, device=device), num_seqs, num_seqs, shape)

    @classmethod
    def _view(cls, words: Tensor, capacity: int, num_seqs: int, shape: AttentionShape) -> WorkList:
        items = words[3 * capacity + 3 :][: shape.max_items(num_seqs) * ITEM_WORDS]
        order, tails = words[:num_seqs], words[capacity:][:num_seqs]
        starts, counts = words[2 * capacity :][: num_seqs + 1], words[3 * capacity + 1 :][:2]
        return cls(order, tails, starts, counts, items.view(-1, ITEM_WORDS), shape, words, capacity)

    def first(self, num_seqs: int) -> WorkList:
        """Return a work list for a smaller batch, in the same memory."""
        smaller = self._view(self.words, self.capacity, num_seqs, self.shape)
        return replace(smaller, at_a_time=self.at_a_time, tail_splits=self.tail_splits)

    @property
    def launch(self) -> tuple[int, int]:
        """Return (items per multiprocessor, parts of each tail), which determine the kernels' grids.

        A captured CUDA graph can replay any work list for which both are equal.
        """
        return self.at_a_time, self.tail_splits

    def fill(self, plan: Plan) -> WorkList:
        """Copy ``plan`` to the device in one transfer, without waiting for it.

        Return a work list with the same memory and the plan's `launch`. The plan may have at most as many sequences as
        the work list's capacity.
        """
        padding = [0] * (self.capacity - len(plan.order))
        words = plan.order + padding + plan.tails + padding + plan.starts + padding + plan.counts[:2] + plan.items
        sent = torch.tensor(words, dtype=torch.int32, pin_memory=self.words.is_cuda)
        self.words[: len(words)].copy_(sent, non_blocking=True)
        return replace(self, at_a_time=plan.counts[2], tail_splits=plan.counts[3])


@dataclass(frozen=True)
class Node:
    """A run of blocks that ``count`` sequences share: entries ``begin … end - 1`` of their block tables.

    The sequences are adjacent in `PrefixTree.order`, from index ``first`` on.
    """

    first: int
    count: int
    begin: int
    end: int


@dataclass(frozen=True)
class PrefixTree:
    """The runs of blocks that sequences share, and the first block that each sequence shares with no other sequence."""

    order: list[int]  # the sequences, ordered so that those of each node are adjacent
    tails: list[int]  # in that order: the first block of each sequence's tail
    nodes: list[Node]  # parents before their children


@dataclass(frozen=True)
class Plan:
    """A work list before it is copied to the device: see `WorkList`."""

    order: list[int]
    tails: list[int]
    starts: list[int]
    counts: list[int]  # number of items, of multiprocessors that run them, of items on each, of parts of each tail
    items: list[int]


def prefix_tree(tables: Sequence[Sequence[int]], num_full: Sequence[int], min_blocks: int = 1) -> PrefixTree:
    """Return the prefix tree of block tables, which list each sequence's block ids in logical order.

    Only the first ``num_full[i]`` blocks of sequence i are full and may be shared. A run of shared blocks becomes a
    node if ``blocks * (sequences - 1)``, the number of saved reads, is at least ``min_blocks``.
    """
    order: list[int] = []
    tails: list[int] = []
    nodes: list[Node] = []
    # (sequences that agree up to a block, that block, the first block that no ancestor node holds)
    stack = [(list(range(len(tables))), 0, 0)] if tables else []
    while stack:
        members, depth, unread = stack.pop()
        if len(members) == 1:
            order.append(members[0])
            tails.append(unread)
            continue
        groups: dict[int, list[int]] = {}
        for member in members:
            # A sequence that ends here is a separate group: its key differs from all block ids.
            key = tables[member][depth] if num_full[member] > depth else -1 - member
            groups.setdefault(key, []).append(member)
        if len(groups) > 1:
            stack += [(group, depth, unread) for group in reversed(groups.values())]
            continue
        end = _common_blocks(tables, members, depth, min(num_full[member] for member in members))
        if (end - unread) * (len(members) - 1) >= min_blocks:
            nodes.append(Node(len(order), len(members), unread, end))
            unread = end
        stack.append((members, end, unread))
    return PrefixTree(order, tails, nodes)


def _common_blocks(tables: Sequence[Sequence[int]], members: list[int], begin: int, end: int) -> int:
    """Return the first index at which the members' block tables differ, from ``begin`` to at most ``end``.

    Every block is compared, because equal blocks may follow blocks that differ. This happens if two sequences computed
    the same tokens at the same time.
    """
    lead = tables[members[0]]
    run = lead[begin:end]
    for member in members[1:]:
        table = tables[member]
        if table[begin:end] != run:
            end = next(i for i in range(begin, end) if table[i] != lead[i])
            run = lead[begin:end]
    return end


def plan_attention(
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    block_size: int,
    shape: AttentionShape,
    num_rows: int | None = None,
    costs: Costs = MEASURED,
    fixed: Sequence[int] | None = None,
) -> Plan | None:
    """Plan the decode attention of a batch. Return None if reading shared blocks once saves no time.

    Args:
        num_rows: number of rows in the batch, including padding after the sequences; by default there is no padding.
        fixed: for each sequence, how many of its first blocks may be shared; by default all full blocks.
    """
    num_rows = len(tables) if num_rows is None else num_rows
    total = sum(context_lens) * shape.token_bytes
    if not costs.is_faster(total, 0):
        return None  # even if everything were shared
    num_full = [length // block_size for length in context_lens]
    if fixed is not None:
        num_full = [min(pair) for pair in zip(num_full, fixed, strict=True)]
    min_blocks = max(1, math.ceil(costs.node_bytes / (shape.token_bytes * block_size)))
    while True:
        tree = prefix_tree(tables, num_full, min_blocks)
        lengths = [(node.end - node.begin) * block_size * shape.token_bytes for node in tree.nodes]
        shared = sum(length * node.count for length, node in zip(lengths, tree.nodes, strict=True))
        if not tree.nodes or not costs.is_faster(shared - sum(lengths), total - shared):
            return None
        plan = _cut(tree, block_size, shape, num_rows, total - shared, costs)
        if plan is not None:
            return plan
        min_blocks *= 4


def _cut(
    tree: PrefixTree, block_size: int, shape: AttentionShape, num_rows: int, tail_bytes: int, costs: Costs
) -> Plan | None:
    """Split the nodes of a prefix tree into work items. Return None if a work list cannot hold the items.

    ``tail_bytes`` is the size of all tails together. A tail is the part of a context that only one sequence reads.
    """
    tiles = [-(-(node.end - node.begin) * block_size // shape.tile) for node in tree.nodes]
    spreads = [_spread(tree, tiles, shape, num_rows, *way) for way in shape.ways(num_rows)]
    possible = [spread for spread in spreads if spread is not None]
    if not possible:
        return None
    spread = min(possible, key=lambda each: costs.of_spread(each, tail_bytes, shape.num_processors))
    results = [0] * len(tree.order)  # per sequence, from the nodes so far
    items: list[tuple[int, list[int]]] = []
    for node, num_tiles, num_parts in zip(tree.nodes, tiles, spread.parts, strict=True):
        last, end = node.first + node.count, node.end * block_size
        step = -(-num_tiles // num_parts) * shape.tile
        for part, begin in enumerate(range(node.begin * block_size, end, step)):
            for first in range(node.first, last, shape.seqs):
                words = [min(shape.seqs, last - first), tree.order[first], first, begin, min(begin + step, end)]
                items.append((min(begin + step, end) - begin, [*words, results[node.first] + part]))
        results[node.first : last] = [results[node.first] + part + 1] * node.count
    items.sort(key=lambda item: -item[0])  # longest first, so that none starts when the others end
    starts = list(accumulate(results, initial=0))
    padding = num_rows - len(results)
    own = tail_bytes / shape.token_bytes
    return Plan(
        order=tree.order + list(range(len(results), num_rows)),
        tails=[block * block_size for block in tree.tails] + [0] * padding,
        starts=starts + [starts[-1]] * padding,
        counts=[len(items), spread.num_processors, spread.at_a_time, shape.tail_splits(num_rows, own / num_rows)],
        items=[word for _, words in items for word in words],
    )


def _spread(
    tree: PrefixTree, tiles: list[int], shape: AttentionShape, num_rows: int, at_a_time: int, num_processors: int
) -> Spread | None:
    """Split the nodes of a prefix tree into work items. Return None if a work list cannot hold items or results.

    ``tiles`` is the number of tiles of each node. Each of ``num_processors`` multiprocessors runs ``at_a_time`` items
    at a time.
    """
    chunks = [-(-node.count // shape.seqs) for node in tree.nodes]
    deepest = max(tiles)
    # Computing a tile costs about as much as merging a result, so a node of n tiles, in parts of t tiles, takes a time
    # of t + n / t. With few sequences, the whole GPU is free for one node.
    longest = 1 if shape.tail_splits(num_rows) > 1 else math.isqrt(deepest - 1) + 1
    at_once = at_a_time * num_processors // shape.num_kv_heads
    while True:
        parts = [-(-count // longest) for count in tiles]
        num_items = sum(map(int.__mul__, parts, chunks))
        num_results = sum(count * node.count for count, node in zip(parts, tree.nodes, strict=True))
        fits = num_items <= shape.max_items(num_rows) and num_results <= shape.max_results(num_rows)
        # A few more items than run at a time would double the time. Only long ones count: short ones fill the gaps.
        long = sum(p * c for p, c, count in zip(parts, chunks, tiles, strict=True) if 2 * count > longest)
        if fits and (long <= at_once or longest >= deepest):
            break
        if longest >= deepest:
            return None
        longest += -(-longest // 8)
    longest = max(-(-count // p) for count, p in zip(tiles, parts, strict=True))
    num_tasks = num_items * shape.num_kv_heads
    return Spread(at_a_time, num_processors, parts, longest, num_tasks, num_results / len(tree.order))
