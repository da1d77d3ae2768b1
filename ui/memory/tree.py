"""Block tables as a tree: shared blocks stand once, above the private ones of each sequence.

A radix tree over physical block ids. Forks share blocks from the first one on, so a block is shared along an edge or it
is private to a leaf; copy-on-write is where two of them part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.runs import common_length
from minillm.service.messages import TableView


@dataclass
class BlockNode:
    """A run of logical blocks that the same sequences hold.

    ``blocks`` are physical ids, the logical ones from ``start`` on. ``ends`` are the tables that have no block after
    them: more than one where a fork has not been written to.
    """

    start: int
    blocks: list[int]
    num_tables: int  # that go through here, those that end here included
    first: int  # the number of the earliest of them, among all tables
    ends: list[TableView] = field(default_factory=list)
    children: list[BlockNode] = field(default_factory=list)


@dataclass(frozen=True)
class TreeLine:
    """A line of the drawn tree: a node, or one of the tables that end at a shared node (``node`` is None then)."""

    rails: str  # drawn before it: "│  ├─ "
    node: BlockNode | None
    table: TableView | None  # whose leaf it is


def block_trees(tables: Sequence[TableView]) -> list[BlockNode]:
    """The trees of all tables that hold a block, in the order in which their first tables come.

    The host's block ids mean other blocks: swapped tables are leaves of their own.
    """
    order = {table.seq_id: number for number, table in enumerate(tables)}
    # Sorted, the tables of every node stand side by side: all of them share the blocks of the first and the last.
    device = sorted((table for table in tables if table.blocks and table.state != "swapped"), key=lambda t: t.blocks)
    top = BlockNode(0, [], len(device), 0)
    waiting = [(top, 0, len(device), 0)]
    while waiting:
        node, begin, end, depth = waiting.pop()
        while begin < end and len(device[begin].blocks) == depth:
            node.ends.append(device[begin])
            begin += 1
        node.ends.sort(key=lambda table: order[table.seq_id])
        while begin < end:
            head = device[begin].blocks[depth]
            stop = begin + 1
            while stop < end and device[stop].blocks[depth] == head:
                stop += 1
            length = common_length(device[begin].blocks, device[stop - 1].blocks, depth)
            first = min(order[table.seq_id] for table in device[begin:stop])
            child = BlockNode(depth, device[begin].blocks[depth:length], stop - begin, first)
            node.children.append(child)
            waiting.append((child, begin, stop, length))
            begin = stop
        node.children.sort(key=lambda child: child.first)
    for table in tables:
        if table.blocks and table.state == "swapped":
            top.children.append(BlockNode(0, list(table.blocks), 1, order[table.seq_id], [table]))
    return sorted(top.children, key=lambda root: root.first)


def tree_lines(roots: Sequence[BlockNode]) -> list[TreeLine]:
    """The trees as lines, parents before children."""
    lines: list[TreeLine] = []
    waiting: list[tuple[str, str, BlockNode | TableView]] = [("", "", root) for root in reversed(roots)]
    while waiting:
        rails, below, item = waiting.pop()
        if isinstance(item, TableView):
            lines.append(TreeLine(rails, None, item))
            continue
        if item.num_tables == 1:
            lines.append(TreeLine(rails, item, item.ends[0]))
            continue
        lines.append(TreeLine(rails, item, None))
        parts: list[BlockNode | TableView] = [*item.ends, *item.children]
        for number in range(len(parts) - 1, -1, -1):
            last = number == len(parts) - 1
            waiting.append((below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), parts[number]))
    return lines
