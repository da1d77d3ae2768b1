"""The tree of block tables, with shared blocks once, above the private ones of each sequence; and its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.runs import common_length
from minillm.service.messages import TableView

FOLD, HEAD = -1, -2  # lines that are no block

# The tree is a radix tree over physical block ids. Forks share blocks from the first one on, so a block is either
# shared along an edge or private to a leaf. Tables part where a block was copied on write.


@dataclass
class BlockNode:
    """A run of logical blocks that the same sequences hold.

    ``blocks`` are the physical ids of the logical blocks from ``start`` on. ``ends`` are the tables without a block
    after them: several if a fork has not been written to.
    """

    start: int
    blocks: list[int]
    num_tables: int  # tables that pass through or end here
    first: int  # the number of the earliest of them among all tables
    ends: list[TableView] = field(default_factory=list)
    children: list[BlockNode] = field(default_factory=list)


@dataclass(frozen=True)
class TreeLine:
    """A line of the drawn tree: a node, or a table that ends at a shared node (without ``node``)."""

    rails: str  # drawn before it: "│  ├─ "
    node: BlockNode | None
    table: TableView | None  # the table, if this is a leaf


def block_trees(tables: Sequence[TableView]) -> list[BlockNode]:
    """Return the trees of all tables that hold a block, ordered by their first tables.

    Block ids in host memory are not those of the device, so swapped tables are leaves of their own.
    """
    order = {table.seq_id: number for number, table in enumerate(tables)}
    # After sorting, the tables of each node are adjacent, and all share the common blocks of the first and the last.
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
    """Return the trees as lines, parents before children."""
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


@dataclass(frozen=True)
class StrandLine:
    """A line of the view: a tree line's heading, one of its blocks (``place`` in the node), or a fold of several."""

    tree: TreeLine
    place: int


def strand_lines(lines: Sequence[TreeLine], most: int = 6) -> list[StrandLine]:
    """Return each line of the tree with its blocks after it. Of many blocks, only the first and last ``most``."""
    found = []
    for line in lines:
        found.append(StrandLine(line, HEAD))
        found += [StrandLine(line, place) for place in few(list(range(num_drawn(line))), most)]
    return found


def most_that_fit(lines: Sequence[TreeLine], height: int) -> int:
    """Return the largest ``most`` with which all `strand_lines` fit in ``height`` lines, 0 if none does."""
    sizes = [num_drawn(line) for line in lines]
    low, high = 0, max(sizes, default=0)
    while low < high:
        most = (low + high + 1) // 2
        if len(lines) + sum(size if size <= most + 1 else most + 1 for size in sizes) <= height:
            low = most
        else:
            high = most - 1
    return low


def num_drawn(line: TreeLine) -> int:
    """Return the number of blocks drawn below a line's heading. Swapped blocks have no words."""
    swapped = line.table is not None and line.table.state == "swapped"
    return 0 if line.node is None or swapped else len(line.node.blocks)


def few(places: list[int], most: int) -> list[int]:
    """Return the first and last of many places, ``most`` in total, with a fold between them."""
    if not most or len(places) <= most + 1:
        return places if most else []
    first = max(1, most // 3)
    return [*places[:first], FOLD, *places[len(places) - (most - first) :]]


def root_and_fork(lines: Sequence[StrandLine], row: int) -> tuple[int, int]:
    """Return the rows of the root of the tree that contains line ``row``, and of the node where its strand forks."""
    rails = len(lines[row].tree.rails)
    fork = row
    while fork and (lines[fork].place != HEAD or (rails and len(lines[fork].tree.rails) >= rails)):
        fork -= 1
    root = fork
    while root and (lines[root].place != HEAD or lines[root].tree.rails):
        root -= 1
    return root, fork
