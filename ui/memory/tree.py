"""The tree of block tables: shared blocks once, above the private ones of each sequence, and the lines that show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.runs import common_length
from minillm.service.messages import TableView

FOLD, HEAD = -1, -2  # lines that are no block

# Shared blocks stand once in the tree, above the private ones of each sequence: it is a radix tree over physical block
# ids. Forks share blocks from the first one on, so a block is shared along an edge or it is private to a leaf;
# copy-on-write is where two of them part.


@dataclass
class BlockNode:
    """A run of logical blocks that the same sequences hold. ``blocks`` are physical ids, the logical ones from
    ``start`` on. ``ends`` are the tables that have no block after them: more than one where a fork has not been written
    to.
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
    """The trees of all tables that hold a block, in the order in which their first tables come. The host's block ids
    mean other blocks: swapped tables are leaves of their own.
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


@dataclass(frozen=True)
class StrandLine:
    """A line of the view: a tree line's head, one of its blocks (``place`` in the node), or a fold of several."""

    tree: TreeLine
    place: int


def strand_lines(lines: Sequence[TreeLine], most: int = 6) -> list[StrandLine]:
    """Each line of the tree with its blocks below it; of many blocks the first and the last ones, ``most`` in all."""
    found = []
    for line in lines:
        found.append(StrandLine(line, HEAD))
        found += [StrandLine(line, place) for place in few(list(range(num_drawn(line))), most)]
    return found


def most_that_fit(lines: Sequence[TreeLine], height: int) -> int:
    """Return the largest ``most`` with which all `strand_lines` fit into so many lines; 0 if none does."""
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
    """Return the number of blocks that are drawn below a line's head; those on the host have no words."""
    swapped = line.table is not None and line.table.state == "swapped"
    return 0 if line.node is None or swapped else len(line.node.blocks)


def few(places: list[int], most: int) -> list[int]:
    """Return the first and the last of many places, ``most`` in all, and a fold between them."""
    if not most or len(places) <= most + 1:
        return places if most else []
    first = max(1, most // 3)
    return [*places[:first], FOLD, *places[len(places) - (most - first) :]]


def root_and_fork(lines: Sequence[StrandLine], row: int) -> tuple[int, int]:
    """Return the rows of the root of the tree that holds line ``row``, and of the node where its strand forks off."""
    rails = len(lines[row].tree.rails)
    fork = row
    while fork and (lines[fork].place != HEAD or (rails and len(lines[fork].tree.rails) >= rails)):
        fork -= 1
    root = fork
    while root and (lines[root].place != HEAD or lines[root].tree.rails):
        root -= 1
    return root, fork
