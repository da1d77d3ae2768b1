"""The tree of block tables, and the lines that draw it. Shared blocks appear once, above each sequence's own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.runs import common_length
from minillm.service.messages import TableView

FOLD, HEAD = -1, -2  # values of `StrandLine.place` for lines that are not a block

# The tree is a radix tree over physical block ids. Forked sequences share their first blocks. A shared block belongs to
# an inner node, any other block to a leaf. Tables diverge where a block was copied on write.


@dataclass
class BlockNode:
    """A node of the tree: consecutive logical blocks that the same sequences use.

    Attributes:
        start: index of the first logical block.
        blocks: the physical ids of the blocks from ``start`` on.
        ends: the tables that end with this node. Several tables end with it if their sequences were forked and have no
            new blocks yet.
    """

    start: int
    blocks: list[int]
    num_tables: int  # number of tables that pass through this node or end with it
    first: int  # index of the first of these tables in the list of all tables
    ends: list[TableView] = field(default_factory=list)
    children: list[BlockNode] = field(default_factory=list)


@dataclass(frozen=True)
class TreeLine:
    """A line of the drawn tree of blocks.

    It shows a node that several tables share, a node of one table, or a table that ends with a shared node.
    """

    rails: str  # the characters to the left of the line's text: "│  ├─ "
    node: BlockNode | None  # None for a table that ends with a shared node
    table: TableView | None  # None for a shared node


def block_trees(tables: Sequence[TableView]) -> list[BlockNode]:
    """Return the trees of all tables that have blocks, in the order of their first tables.

    Each swapped table is a tree with a single leaf. Its blocks are host blocks, and the ids of host blocks have no
    relation to the ids of device blocks.
    """
    order = {table.seq_id: number for number, table in enumerate(tables)}
    # After sorting, a node's tables are adjacent. Blocks that the first and the last of them share are shared by all.
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
    """Return the lines that draw the trees, parents before children."""
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
    """A line of the strands view: a node's heading, one of the node's blocks, or a fold in place of several blocks.

    ``place`` is the block's index in the node. For a heading or a fold, it is `HEAD` or `FOLD`.
    """

    tree: TreeLine
    place: int


def strand_lines(lines: Sequence[TreeLine], most: int = 6) -> list[StrandLine]:
    """Return a line for each line of the tree, followed by lines for the blocks of its node.

    A node gets lines for at most ``most`` of its blocks.
    """
    found = []
    for line in lines:
        found.append(StrandLine(line, HEAD))
        found += [StrandLine(line, place) for place in few(list(range(num_drawn(line))), most)]
    return found


def most_that_fit(lines: Sequence[TreeLine], height: int) -> int:
    """Return the largest ``most`` for which `strand_lines` returns at most ``height`` lines.

    Return 0 if there is no space for any blocks.
    """
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
    """Return the number of blocks below a line's heading. Swapped blocks get no lines."""
    swapped = line.table is not None and line.table.state == "swapped"
    return 0 if line.node is None or swapped else len(line.node.blocks)


def few(places: list[int], most: int) -> list[int]:
    """Return ``places``, shortened to ``most`` numbers if it is too long. `FOLD` stands for the numbers left out."""
    if not most or len(places) <= most + 1:
        return places if most else []
    first = max(1, most // 3)
    return [*places[:first], FOLD, *places[len(places) - (most - first) :]]


def root_and_fork(lines: Sequence[StrandLine], row: int) -> tuple[int, int]:
    """Return the indices of two headings, each at line ``row`` or above it.

    The first is the root of the tree that contains this line. The second is the last fork between the root and this
    line.
    """
    rails = len(lines[row].tree.rails)
    fork = row
    while fork and (lines[fork].place != HEAD or (rails and len(lines[fork].tree.rails) >= rails)):
        fork -= 1
    root = fork
    while root and (lines[root].place != HEAD or lines[root].tree.rails):
        root -= 1
    return root, fork
