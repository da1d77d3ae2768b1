"""The forks, as the block tables tell them: shared blocks stand once, above the private ones of each sequence.

A radix tree over physical block ids. Forks share blocks from the first one on, so a block is shared along an edge or it
is private to a leaf; copy-on-write is where two of them part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from textual.content import Content

from minillm.runs import common_length
from minillm.service.messages import TableView
from minillm.ui.bars import hidden_keys
from minillm.ui.memory.line_view import LineView, Parts
from minillm.ui.memory.pool import Memory
from minillm.ui.numbers import bar, count, plural, spans

_MOST_SPANS = 4


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


class ForkTree(LineView):
    """A line per node. ``●`` is a run of blocks that all below it share; a name is a sequence, with its private blocks.

    A sequence without a block of its own stands where its last block is still shared: it has not been written to.
    """

    COMPONENT_CLASSES = {"rail", "shared", "name", "owned", "swapped", "fact"}  # noqa: RUF012
    BINDINGS = [*hidden_keys({"up": "scroll_up", "down": "scroll_down"})]  # noqa: RUF012

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._lines: list[TreeLine] = []

    def catch_up(self) -> None:
        pool = self.memory.pool
        self._lines = tree_lines(block_trees(list(pool.tables.values()))) if pool is not None else []
        self.set_lines(len(self._lines))

    def line(self, row: int, width: int) -> Parts:
        line = self._lines[row]
        rails = (line.rails, "rail")
        if line.table is not None:
            return [rails, *self._leaf(line.table, line.node)]
        node = line.node
        assert node is not None
        shared = f"● {plural(len(node.blocks), 'block')} ×{node.num_tables}"
        return [rails, (shared, "shared"), (f"  {spans(node.blocks, _MOST_SPANS)}", "fact")]

    def _leaf(self, table: TableView, node: BlockNode | None) -> Parts:
        pool = self.memory.pool
        assert pool is not None
        swapped = table.state == "swapped"
        parts = [(self.memory.table_name(table), "name")]
        if table.state != "idle":
            parts.append((f" {table.state}", "swapped" if swapped else "fact"))
        if node is None or not node.blocks:
            return [*parts, ("  0 own", "fact")]
        last = pool.filled_slots(table, len(table.blocks) - 1)
        return [
            *parts,
            (f"  {count(len(node.blocks))}{' on the host' if swapped else ' own'} ", "swapped" if swapped else "owned"),
            (bar(last / pool.block_size, 4), "owned"),
            (f" {spans(node.blocks, _MOST_SPANS)}", "fact"),
        ]

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if pool is None:
            return Content("no model is loaded")
        logical, used = pool.figures.logical_blocks, pool.used_blocks
        if not used:
            return Content("no sequence holds a block")
        num_seqs = sum(1 for table in pool.tables.values() if table.state != "swapped")
        words = f"{plural(used, 'block')} for {plural(num_seqs, 'sequence')}"
        instead = f"{count(logical)} without sharing: {max(0, logical - used) / max(1, logical):.0%} saved"
        return Content(f"{words}, {instead}" if len(words) + len(instead) + 2 <= width else f"{words}\n{instead}")
