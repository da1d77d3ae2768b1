"""The strands: the text of every sequence as it lies in blocks, shared text once, parting where the block tables do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap

from rich.cells import cell_len
from textual.content import Content

from minillm.cache.runs import common_length
from minillm.progress import size
from minillm.service.messages import TableView
from minillm.text.safe import clean_line
from minillm.ui.bars import hidden_keys
from minillm.ui.memory.line_view import LineView, Parts
from minillm.ui.memory.pool import NUM_COLOURS, Left, Memory
from minillm.ui.numbers import bar, count, plural

_FIRST, _LAST = 2, 4  # blocks of a long run that are drawn
_TORN, _LEFT = 1.5, 4.0  # seconds for which a copy on write is seen, and a sequence that has gone
_FOLD, _HEAD = -1, -2  # lines that are no block
_GUIDE = (
    ("The model's memory of a text lies in blocks. Here each block is a line, with its first words.", "name"),
    ("│ a block of one answer, in its colour", "strand-0"),
    ("┃ a block that several answers share: it is stored once", "shared"),
    ("⧉ copied on write: an answer came to write into a block that others share", "name"),
    ("✕ gone, and its blocks with it", "fact"),
    ("/tour shows it in a minute.", "name"),
)  # where no block is held

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


def strand_lines(lines: Sequence[TreeLine]) -> list[StrandLine]:
    """Each line of the tree with its blocks below it; of many the first and the last ones."""
    found = []
    for line in lines:
        found.append(StrandLine(line, _HEAD))
        swapped = line.table is not None and line.table.state == "swapped"
        blocks = [] if line.node is None or swapped else line.node.blocks
        places = list(range(len(blocks)))
        if len(places) > _FIRST + _LAST + 1:
            places[_FIRST:-_LAST] = [_FOLD]
        found += [StrandLine(line, place) for place in places]
    return found


def summed(gone: Sequence[Left]) -> list[Left]:
    """Those that have gone, once by each name: beams come and go at speed."""
    found: dict[tuple[str, int, int], Left] = {}
    for left in gone:
        table = left.table
        name = (table.owner, table.index, 0 if table.owner else table.seq_id)
        before = found.pop(name, None)
        found[name] = left if before is None else replace(left, num_blocks=left.num_blocks + before.num_blocks)
    return list(found.values())


class Strands(LineView):
    """A line per block with its first words: thick where several sequences share it, in its candidate's colour where
    one owns it. A strand parts where the tables do; a block that was copied on write is seen to tear.
    """

    COMPONENT_CLASSES = {  # noqa: RUF012
        *("rail", "shared", "shared-words", "name", "swapped", "fact", "torn"),
        *(f"strand-{number}" for number in range(NUM_COLOURS)),
    }
    BINDINGS = [*hidden_keys({"up": "scroll_up", "down": "scroll_down"})]  # noqa: RUF012
    follows = True

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._lines: list[StrandLine | Left | tuple[str, str]] = []
        self._shown: str | None = None  # the request whose strands were brought into sight last
        self._fades = False  # a timer runs until something that is shown for a moment goes

    def catch_up(self) -> None:
        pool, now = self.memory.pool, time.monotonic()
        self._lines = []
        if pool is not None:
            self._lines += strand_lines(tree_lines(block_trees(list(pool.tables.values()))))
            self._lines += summed([left for left in pool.left if now - left.moment < _LEFT])
            moments = [left.moment for left in pool.left] + [copy.moment for copy in pool.copies.values()]
            if not self._fades and any(now - moment < _LEFT for moment in moments):
                self._fades = True
                self.set_timer(_TORN / 2, self._fade)
            if not self._lines:
                self._lines += _guide(self.scrollable_content_region.width)
        self.set_lines(len(self._lines))
        self._follow_branch()

    def _follow_branch(self) -> None:
        """Bring the current answer's strands into sight, once for each answer that becomes the current one:
        the reader may look elsewhere meanwhile.
        """
        if (current := self.memory.current) == self._shown:
            return
        rows = [row for row, line in enumerate(self._lines) if isinstance(line, StrandLine) and self._is_current(line)]
        if rows:
            self._shown = current
            self.show_line(rows[0])
            self.show_line(rows[-1])

    def _is_current(self, line: StrandLine) -> bool:
        return line.tree.table is not None and line.tree.table.owner == self.memory.current

    def on_resize(self) -> None:
        if self._lines and isinstance(self._lines[0], tuple):
            self.catch_up()
        super().on_resize()

    def _fade(self) -> None:
        self._fades = False
        self.catch_up()
        self.refresh()

    def line(self, row: int, width: int) -> Parts:
        line = self._lines[row]
        if isinstance(line, Left):
            return self._left(line)
        if isinstance(line, tuple):
            return [line]
        rails = (line.tree.rails, "rail")
        if line.place != _HEAD:
            below = line.tree.rails.replace("├─ ", "│  ").replace("└─ ", "   ")
            return [(below, "rail"), *self._block(line, width - cell_len(below))]
        if line.tree.table is not None:
            is_one_of_many = self._is_current(line) and len(self.memory.current_tables) == 1 < len(self.memory.tables)
            mark = [("▸ ", "rail")] if is_one_of_many else []
            return [rails, *mark, *self._leaf(line.tree.table, line.tree.node)]
        assert line.tree.node is not None
        shared, sharers = plural(len(line.tree.node.blocks), "block"), line.tree.node.num_tables
        return [rails, (f"┏ {shared} ×{sharers}", "shared")]

    def _block(self, line: StrandLine, width: int) -> Parts:
        pool, node, table = self.memory.pool, line.tree.node, line.tree.table
        assert pool is not None
        assert node is not None
        rail, kind, words = ("┃ ", "shared", "shared-words") if table is None else ("│ ", *[_colour(table)] * 2)
        if line.place == _FOLD:
            return [(rail, kind), (f"⋮ {plural(len(node.blocks) - _FIRST - _LAST, 'block')}", "fact")]
        block = node.blocks[line.place]
        text, marks = clean_line(pool.words.get(block, "").replace("\ufffd", "")), list[tuple[str, str]]()
        if pool.filled[block] < pool.block_size:
            marks.append((" " + bar(pool.filled[block] / pool.block_size, 4), kind))
        copy = pool.copies.get(block)
        if copy is not None and time.monotonic() - copy.moment < _TORN:
            marks.append((f" ⧉ {copy.source}→{block}", "torn"))
        room = max(4, width - cell_len(rail) - sum(cell_len(mark) for mark, _ in marks))
        return [(rail, kind), (_cut(text or f"block {block}", room), words), *marks]

    def _leaf(self, table: TableView, node: BlockNode | None) -> Parts:
        pool, swapped = self.memory.pool, table.state == "swapped"
        assert pool is not None
        parts = [(self.memory.table_name(table), "name" if swapped else _colour(table))]
        if (score := self.memory.scores(table.owner, table.index)) is not None:
            parts.append((f"  {score:.3f}", _colour(table)))
        if table.state != "idle":
            parts.append((f" {table.state}", "swapped" if swapped else "fact"))
        own = 0 if node is None else len(node.blocks)
        parts.append((f"  {count(own)} {'on the host' if swapped else 'own'}", "swapped" if swapped else "fact"))
        found, moment = pool.hits.get(table.seq_id, (0, 0.0))
        if found and time.monotonic() - moment < _LEFT:
            parts.append((f"  {count(found)} of {plural(table.num_tokens, 'token')} were here", "shared"))
        return parts

    def _left(self, left: Left) -> Parts:
        pool = self.memory.pool
        assert pool is not None
        back = f"{size(left.num_blocks * pool.block_bytes)} came back"
        return [(f"✕ {self.memory.table_name(left.table)}  {back}", "fact")]

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


def _guide(width: int) -> list[tuple[str, str]]:
    """What the strands mean, in lines of at most so many cells."""
    lines: list[tuple[str, str]] = []
    for text, kind in _GUIDE:
        indent = "" if text[1] != " " else "  "
        lines += [(line, kind) for line in wrap(text, max(20, width), subsequent_indent=indent)] + [("", kind)]
    return lines[:-1]


def _colour(table: TableView) -> str:
    return f"strand-{table.index % NUM_COLOURS}"


def _cut(text: str, room: int) -> str:
    """The text in at most so many cells."""
    if cell_len(text) <= room:
        return text
    while cell_len(text) > room - 1:
        text = text[:-1]
    return text + "…"
