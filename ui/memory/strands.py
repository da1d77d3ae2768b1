"""The strands: the text of every sequence as it lies in blocks, shared text once, parting where the block tables do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from time import monotonic

from msgspec import structs
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
# Seconds for which a copy on write is seen, and a sequence that has gone, of which its words stay for so long.
_TORN, _LEFT, _WORDS = 3.0, 5.0, 2.5
_LATE = 4.0  # seconds after which it is too late to show what happened; drawing may wait for 3
_FOLD, _HEAD = -1, -2  # lines that are no block
_ALL = -1  # stands for the numbers of all beams of a search
_MOST_FADING = 4  # sequences that have gone whose blocks are drawn, too
_GUIDE = (
    ("The model's memory of a text lies in blocks. Here each block is a line, with its first words.", "name"),
    ("│ a block of one answer, in its colour", "strand-0"),
    ("┃ a block that several answers share: it is stored once", "shared"),
    ("⧉ copied on write: an answer was about to write into a block that others share", "name"),
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
        found += [StrandLine(line, place) for place in _few(list(range(len(blocks))))]
    return found


@dataclass(frozen=True)
class Fading:
    """A line about a sequence that has gone: its name and what came back, or one of its blocks."""

    left: Left
    name: str
    words: str | None = None  # of a block


def summed(gone: Sequence[Left], searches: Callable[[str], bool]) -> list[Left]:
    """Those that have gone, once by each name; all beams of a search in one, for they come and go at speed."""
    found: dict[tuple[str, int, int], Left] = {}
    for left in gone:
        table = left.table
        index = _ALL if searches(table.owner) else table.index
        name = (table.owner, index, 0 if table.owner else table.seq_id)
        before = found.pop(name, None)
        words = left.words if before is None else [*before.words, *left.words]
        found[name] = replace(left, table=structs.replace(table, index=index), words=words)
    return list(found.values())


def _few(places: list[int]) -> list[int]:
    """Of many places the first and the last ones, and a fold between them."""
    return [*places[:_FIRST], _FOLD, *places[-_LAST:]] if len(places) > _FIRST + _LAST + 1 else places


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
        self._lines: list[StrandLine | Fading | tuple[str, str]] = []
        self._shown: str | None = None  # the request whose strands were brought into sight last
        self._fades = False  # a timer runs until something that is shown for a moment goes
        self._since: dict[tuple[str, int], float] = {}  # since when something that is shown for a moment has been shown
        self._names: dict[int, str] = {}  # of sequences, by seq_id: as they were called before they went

    def begin_anew(self) -> None:
        self._since.clear()
        self._names.clear()
        super().begin_anew()

    def catch_up(self) -> None:
        pool = self.memory.pool
        self._lines = []
        if pool is not None:
            left = [each for each in pool.left if self._is_new(("left", each.table.seq_id), each.moment, _LEFT)]
            copies = [each for each in pool.copies if self._is_torn(each)]
            known = [*pool.tables.values(), *(each.table for each in left)]
            self._names = {each.seq_id: self._names.get(each.seq_id) or self.memory.table_name(each) for each in known}
            self._lines += strand_lines(tree_lines(block_trees(in_order(pool.tables.values()))))
            self._lines += self._fading(left)
            if not self._fades and (left or copies):
                self._fades = True
                self.set_timer(_TORN / 4, self._fade)
            if not self._lines:
                self._lines += _guide(self.scrollable_content_region.width)
        self.set_lines(len(self._lines))
        self._follow_branch()

    def _is_new(self, what: tuple[str, int], heard: float, seconds: float) -> bool:
        """Whether something is still to be shown that is shown for some seconds. They begin when it is drawn first:
        beside a model that computes on the same cores that may be long after it was heard of.
        """
        now = monotonic()
        if now - heard >= _LATE + seconds:
            self._since.pop(what, None)
            return False
        return now - self._since.setdefault(what, now if now - heard < _LATE else heard) < seconds

    def _is_torn(self, block: int) -> bool:
        copy = self.memory.pool.copies.get(block) if self.memory.pool is not None else None
        return copy is not None and self._is_new(("copy", block), copy.moment, _TORN)

    def _fading(self, gone: Sequence[Left]) -> list[Fading]:
        """The lines of sequences that have gone: their names, and of a few their blocks, by their words, then dots."""
        lines = []
        for number, left in enumerate(summed(gone, lambda owner: self.memory.scores(owner, 0) is not None)):
            if left.table.index == _ALL:
                lines.append(Fading(left, f"beams of {self.memory.name(left.table.owner, _ALL)}"))
                continue
            lines.append(Fading(left, self._names[left.table.seq_id]))
            if number < _MOST_FADING:
                places = _few(list(range(len(left.words))))
                folded = f"⋮ {plural(len(left.words) - _FIRST - _LAST, 'block')}"
                lines += [Fading(left, "", folded if at == _FOLD else left.words[at]) for at in places]
        return lines

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
        if isinstance(line, Fading):
            return self._gone(line, width)
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
        if self._is_torn(block):
            marks.append((f" ⧉ {pool.copies[block].source}→{block} ", "torn"))
        room = max(4, width - cell_len(rail) - sum(cell_len(mark) for mark, _ in marks))
        return [(rail, kind), (_cut(text or f"block {block}", room), words), *marks]

    def _leaf(self, table: TableView, node: BlockNode | None) -> Parts:
        pool, swapped = self.memory.pool, table.state == "swapped"
        assert pool is not None
        parts = [(self.memory.table_name(table), "name" if swapped else _colour(table))]
        if (score := self.memory.scores(table.owner, table.index)) is not None:
            parts.append((f"  {score:.3f}", _colour(table)))
        hit = pool.hits.get(table.seq_id)
        if hit is not None and hit.num_found and self._is_new(("hit", table.seq_id), hit.moment, _LEFT):
            return [*parts, (f"  {count(hit.num_found)} of {plural(hit.num_tokens, 'token')} were here", "shared")]
        if table.state != "idle":
            parts.append((f" {table.state}", "swapped" if swapped else "fact"))
        own = 0 if node is None else len(node.blocks)
        parts.append((f"  {count(own)} {'on the host' if swapped else 'own'}", "swapped" if swapped else "fact"))
        return parts

    def _gone(self, line: Fading, width: int) -> Parts:
        pool, left = self.memory.pool, line.left
        assert pool is not None
        if line.words is None:
            back = f"{size(len(left.words) * pool.block_bytes)} came back"
            return [(f"✕ {line.name}  {back}", "fact")]
        words = _cut(clean_line(line.words.replace("\ufffd", "")), max(4, width - 4))
        if not self._is_new(("words", left.table.seq_id), left.moment, _WORDS):
            words = "·" * cell_len(words)
        return [(f"  ╎ {words}", "fact")]

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if pool is None:
            return Content("no model is loaded")
        logical, used = pool.figures.logical_blocks, pool.used_blocks
        if not used:
            return Content("no sequence holds a block")
        num_seqs = sum(1 for table in pool.tables.values() if table.state != "swapped")
        words = f"{plural(used, 'block')} for {plural(num_seqs, 'sequence')}"
        if logical <= used:
            return Content(f"{words}, nothing is shared")
        instead = f"{count(logical)} without sharing: {(logical - used) / logical:.0%} saved"
        return Content(f"{words}, {instead}" if len(words) + len(instead) + 2 <= width else f"{words}\n{instead}")


def in_order(tables: Iterable[TableView]) -> list[TableView]:
    """The tables request by request, and the answers of each by their numbers."""
    tables, first = list(tables), dict[str | int, int]()
    for number, table in enumerate(tables):
        first.setdefault(table.owner or table.seq_id, number)
    return sorted(tables, key=lambda table: (first[table.owner or table.seq_id], table.index))


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
