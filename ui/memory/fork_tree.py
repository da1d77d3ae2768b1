"""The forks, as the blocks tell them: shared ones on the edges, private ones at the leaves."""

from __future__ import annotations

from rich.segment import Segment
from textual.binding import Binding
from textual.content import Content

from minillm.service.messages import TableView
from minillm.ui.memory.line_view import LineView
from minillm.ui.memory.memory import Memory
from minillm.ui.memory.tree import BlockNode, TreeLine, block_trees, tree_lines
from minillm.ui.numbers import bar, count, plural, spans

_MOST_SPANS = 4


class ForkTree(LineView):
    """A line per node. ``●`` is a run of blocks that all below it share; a name is a sequence, with its private blocks.

    A sequence without a block of its own stands where its last block is still shared: it has not been written to.
    """

    COMPONENT_CLASSES = {  # noqa: RUF012
        f"fork-tree--{name}" for name in ("rail", "shared", "name", "owned", "swapped", "fact")
    }
    BINDINGS = [  # noqa: RUF012
        Binding("up", "scroll_up", "Up", show=False),
        Binding("down", "scroll_down", "Down", show=False),
    ]

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._lines: list[TreeLine] = []

    def catch_up(self) -> None:
        pool = self.memory.pool
        self._lines = tree_lines(block_trees(list(pool.tables.values()))) if pool is not None else []
        self.set_lines(len(self._lines))

    def line(self, row: int, width: int) -> list[Segment]:
        line = self._lines[row]
        rails = Segment(line.rails, self.part("fork-tree--rail"))
        if line.table is None:
            assert line.node is not None
            return [rails, *self._shared(line.node)]
        return [rails, *self._leaf(line.table, line.node)]

    def _shared(self, node: BlockNode) -> list[Segment]:
        blocks = plural(len(node.blocks), "block")
        return [
            Segment(f"● {blocks} ×{node.num_tables}", self.part("fork-tree--shared")),
            Segment(f"  {spans(node.blocks, _MOST_SPANS)}", self.part("fork-tree--fact")),
        ]

    def _leaf(self, table: TableView, node: BlockNode | None) -> list[Segment]:
        assert self.memory.pool is not None
        segments = [Segment(self.memory.table_name(table), self.part("fork-tree--name"))]
        swapped = table.state == "swapped"
        if table.state != "idle":
            state = "fork-tree--swapped" if swapped else "fork-tree--fact"
            segments.append(Segment(f" {table.state}", self.part(state)))
        if node is None or not node.blocks:
            return [*segments, Segment("  0 own", self.part("fork-tree--fact"))]
        last = self.memory.pool.filled_slots(table, len(table.blocks) - 1)
        own = f"  {count(len(node.blocks))}{' on the host' if swapped else ' own'} "
        return [
            *segments,
            Segment(own, self.part("fork-tree--swapped" if swapped else "fork-tree--owned")),
            Segment(bar(last / self.memory.pool.block_size, 4), self.part("fork-tree--owned")),
            Segment(f" {spans(node.blocks, _MOST_SPANS)}", self.part("fork-tree--fact")),
        ]

    def headline(self, width: int, height: int) -> Content:
        """How much sharing saves, on one line of ``width`` cells or on two."""
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
