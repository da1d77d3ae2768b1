"""The strands view: the text of each sequence, block by block.

Text that sequences share is shown once. The lines fork where the block tables differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from time import monotonic

from msgspec import structs
from rich.cells import cell_len
from textual.content import Content

from minillm.progress import size
from minillm.service.messages import TableView
from minillm.text.safe import clean_line
from minillm.ui.bars import hidden_keys
from minillm.ui.memory.line_view import LineView, Parts
from minillm.ui.memory.pool import COPIED, FROM_DISK, NUM_COLORS, EndedTable, Memory
from minillm.ui.memory.tree import (
    FOLD,
    HEAD,
    BlockNode,
    StrandLine,
    block_trees,
    few,
    most_that_fit,
    root_and_fork,
    strand_lines,
    tree_lines,
)
from minillm.ui.numbers import bar, count, plural

# Seconds for which a copy on write is highlighted, and for which an ended sequence's name and words are shown.
_TORN, _ENDED, _WORDS = 3.0, 5.0, 2.5
_WHOLE = 1.0  # seconds before the words of an ended sequence begin to dissolve
_LATE = 4.0  # an event that was reported more seconds ago is not shown as new; drawing may be 3 s late
_FRAME = 0.5  # seconds between two updates of temporary lines
_ALL = -1  # index that stands for all beams of a search
_MOST_FADING, _MOST_WORDS = 4, 6  # words are shown for this many ended sequences, and for this many blocks of each
_GUIDE = (
    ("The model keeps text in memory in blocks. Here each line is a block, with its first words.", "name"),
    ("│ a block of one answer, in its color", "strand-0"),
    ("┃ a block that several answers share: it is stored once", "shared"),
    (f"{COPIED} copied on write: an answer had to write to a block that others share", "name"),
    ("✕ an answer that is gone; its blocks are freed", "fact"),
    ("/tour shows it in a minute.", "name"),
)  # shown while no block is in use
LEGEND = f"×3: shared by three · own: not shared · {COPIED} copied on write"


@dataclass(frozen=True)
class Fading:
    """A temporary line about an ended sequence: its name and freed memory, or the words of one of its blocks."""

    ended: EndedTable
    name: str
    words: str | None = None  # the words of a block; None in the line with the sequence's name


def combine_ended(gone: Sequence[EndedTable], searches: Callable[[str], bool]) -> list[EndedTable]:
    """Combine ended tables that are shown as one line.

    All tables of a sequence are combined, and the tables of all beams of a search, because beams come and go quickly.
    ``searches`` returns whether an owner is a beam search.
    """
    found: dict[tuple[str, int, int], EndedTable] = {}
    for ended in gone:
        table = ended.table
        index = _ALL if searches(table.owner) else table.index
        name = (table.owner, index, 0 if table.owner else table.seq_id)
        before = found.pop(name, None)
        words = ended.words if before is None else [*before.words, *ended.words]
        found[name] = replace(ended, table=structs.replace(table, index=index), words=words)
    return list(found.values())


class Strands(LineView):
    """Shows a line for each block, with the block's first words.

    A strand is the chain of lines for one sequence's blocks. The line of a block is thick if several sequences share
    the block. Otherwise the line has the color of the candidate that owns the block. Strands fork where the block
    tables differ. A copy on write is highlighted for a moment.
    """

    COMPONENT_CLASSES = {  # noqa: RUF012
        *("rail", "shared", "shared-words", "name", "swapped", "fact", "torn"),
        *(f"strand-{number}" for number in range(NUM_COLORS)),
    }
    BINDINGS = [*hidden_keys({"up": "scroll_up", "down": "scroll_down"})]  # noqa: RUF012

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._lines: list[StrandLine | Fading | tuple[str, str]] = []
        self._shown: str | None = None  # the request that was last scrolled into view
        self._most = 0  # maximum number of lines for the blocks of one tree node
        self._fades = False  # whether a timer for temporary lines is running
        self._since: dict[tuple[str, int], float] = {}  # (kind, id) of a temporary line -> time when first shown
        self._names: dict[int, str] = {}  # seq_id -> name of the sequence, stored before the sequence ends

    def reset(self) -> None:
        self._since.clear()
        self._names.clear()
        super().reset()

    def catch_up(self) -> None:
        pool, height = self.memory.pool, self.size.height
        self._lines = []
        if pool is not None:
            ended = [each for each in pool.ended if self._is_new(("ended", each.table.seq_id), each.moment, _ENDED)]
            torn = [each for each in pool.copies if self._is_torn(each)]
            known = [*pool.tables.values(), *(each.table for each in ended)]
            self._names = {each.seq_id: self._names.get(each.seq_id) or self.memory.table_name(each) for each in known}
            self._lines += self._lost(self.scrollable_content_region.width)
            tree = tree_lines(block_trees(in_order(pool.tables.values())))
            self._most = most_that_fit(tree, height - len(self._lines))
            self._lines += strand_lines(tree, self._most)
            self._lines += self._fading(ended, max(0, height - len(self._lines)))
            if not self._fades and (ended or torn):
                self._fades = True
                self.set_timer(_FRAME, self._fade)
            if not self._lines:
                self._lines += _guide(self.scrollable_content_region.width, height)
        self.set_lines(len(self._lines))
        self._follow_branch()

    def _age(self, what: tuple[str, int], heard: float) -> float:
        """Return the seconds since a temporary line was first drawn.

        ``heard`` is the time when the line's event was reported. If the model computes on the app's CPU cores, the line
        may first be drawn seconds later. It is then shown as long as any other line.
        """
        now = monotonic()
        return now - self._since.setdefault(what, now if now - heard < _LATE else heard)

    def _is_new(self, what: tuple[str, int], heard: float, seconds: float) -> bool:
        if monotonic() - heard >= _LATE + seconds:
            self._since.pop(what, None)
            return False
        return self._age(what, heard) < seconds

    def _is_torn(self, block: int) -> bool:
        copy = self.memory.pool.copies.get(block) if self.memory.pool is not None else None
        return copy is not None and self._is_new(("copy", block), copy.moment, _TORN)

    def _lost(self, width: int) -> list[tuple[str, str]]:
        """Return lines about the current answer's lost blocks.

        If the answer has no block table, the lines are about the answer. Otherwise they are about its beams without a
        table.
        """
        lines = [(line, "name") for line in self.memory.eviction_lines(width)]
        held = {table.index for table in self.memory.current_tables}
        owner, num_beams = self.memory.current, self.memory.num_beams if held else 0
        without = [self.memory.name(owner or "", index) for index in range(num_beams) if index not in held]
        return lines + [(f"{name}  ended early: holds no blocks", "fact") for name in without]

    def _fading(self, gone: Sequence[EndedTable], available_lines: int) -> list[Fading]:
        """Return at most ``available_lines`` lines about ended sequences.

        They show the sequences' names, and the words of some of their blocks.
        """
        all_gone = combine_ended(gone, lambda owner: self.memory.scores(owner, 0) is not None)[:available_lines]
        lines, available_lines = list[Fading](), available_lines - len(all_gone)
        for number, ended in enumerate(all_gone):
            if ended.table.index == _ALL:
                lines.append(Fading(ended, f"beams of {self.memory.name(ended.table.owner, _ALL)}"))
                continue
            lines.append(Fading(ended, self._names[ended.table.seq_id]))
            if number < _MOST_FADING and self._is_new(("words", ended.table.seq_id), ended.moment, _WORDS):
                places = few(list(range(len(ended.words))), _MOST_WORDS)[:available_lines]
                available_lines -= len(places)
                folded = f"⋮ {plural(len(ended.words) - _MOST_WORDS, 'block')}"
                lines += [Fading(ended, "", folded if at == FOLD else ended.words[at]) for at in places]
        return lines

    def _follow_branch(self) -> None:
        """Scroll to the strands of a new current answer, only once per answer, so that the user can scroll elsewhere.

        If all strands of the answer then fit on the screen, the first visible line is the root of their tree. Otherwise
        the first visible line is the last fork before these strands.
        """
        if (current := self.memory.current) == self._shown:
            return
        first = next((row for row, line in enumerate(self._lines) if isinstance(line, StrandLine)), 0)
        strands = [line for line in self._lines if isinstance(line, StrandLine)]
        rows = [row for row, line in enumerate(strands) if self._is_current(line)]
        if rows:
            self._shown = current
            root, fork = root_and_fork(strands, rows[0])
            begin = root if rows[-1] - root < self.size.height else fork
            self.show_line(first + rows[-1])
            self.show_line(first + begin if begin else 0)

    def _is_current(self, line: StrandLine) -> bool:
        return line.tree.table is not None and line.tree.table.owner == self.memory.current

    def on_resize(self) -> None:
        self.catch_up()
        self.refresh()

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
        if line.place != HEAD:
            below = line.tree.rails.replace("├─ ", "│  ").replace("└─ ", "   ")
            return [(below, "rail"), *self._block(line, width - cell_len(below))]
        if line.tree.table is not None:
            is_one_of_many = self._is_current(line) and len(self.memory.current_tables) == 1 < len(self.memory.tables)
            mark = [("▸ ", "rail")] if is_one_of_many else []
            leaf_width = width - sum(cell_len(text) for text, _ in (rails, *mark))
            return [rails, *mark, *self._leaf(line.tree.table, line.tree.node, leaf_width)]
        assert line.tree.node is not None
        shared, sharers = plural(len(line.tree.node.blocks), "block"), line.tree.node.num_tables
        return [rails, (f"┏ {shared} ×{sharers}", "shared")]

    def _block(self, line: StrandLine, width: int) -> Parts:
        pool, node, table = self.memory.pool, line.tree.node, line.tree.table
        assert pool is not None
        assert node is not None
        rail, kind, words = ("┃ ", "shared", "shared-words") if table is None else ("│ ", *[_color(table)] * 2)
        if line.place == FOLD:
            return [(rail, kind), (f"⋮ {plural(len(node.blocks) - self._most, 'block')}", "fact")]
        block = node.blocks[line.place]
        text, marks = clean_line(pool.words.get(block, "").replace("\ufffd", "")), list[tuple[str, str]]()
        if pool.filled[block] < pool.block_size:
            marks.append((" " + bar(pool.filled[block] / pool.block_size, 4), kind))
        if (copy := pool.copies.get(block)) is not None:
            marks.append((f" {COPIED} {copy.source}→{block} ", "torn" if self._is_torn(block) else "fact"))
        if block in pool.from_disk:
            marks.append((FROM_DISK, "fact"))
        text_width = max(4, width - cell_len(rail) - sum(cell_len(mark) for mark, _ in marks))
        return [(rail, kind), (_cut(text or f"block {block}", text_width), words), *marks]

    def _leaf(self, table: TableView, node: BlockNode | None, width: int) -> Parts:
        pool, swapped = self.memory.pool, table.state == "swapped"
        assert pool is not None
        parts = [(self.memory.table_name(table), "name" if swapped else _color(table))]
        if (score := self.memory.scores(table.owner, table.index)) is not None:
            parts.append((f"  {score:.3f}", _color(table)))
        hit = pool.hits.get(table.seq_id)
        if hit is not None and hit.num_found and self._is_new(("hit", table.seq_id), hit.moment, _ENDED):
            return [*parts, (f"  {count(hit.num_found)} of {plural(hit.num_tokens, 'token')} were cached", "shared")]
        own, kind = 0 if node is None else len(node.blocks), "swapped" if swapped else "fact"
        blocks = (f"  {count(own)} {'on the CPU' if swapped else 'own'}", kind)
        state = [] if table.state == "idle" else [(f" {table.state}", kind)]

        def fits(facts: Parts) -> bool:
            return sum(cell_len(text) for text, _ in (*parts, *facts)) <= width

        return [*parts, *next(filter(fits, ([*state, blocks], [blocks])), [])]

    def _gone(self, line: Fading, width: int) -> Parts:
        pool, ended = self.memory.pool, line.ended
        assert pool is not None
        if line.words is None:
            back = f"{size(len(ended.words) * pool.block_bytes)} freed"
            return [(f"✕ {line.name}  {back}", "fact")]
        words = _cut(clean_line(line.words.replace("\ufffd", "")), max(4, width - 4))
        age = self._age(("words", ended.table.seq_id), ended.moment)
        return [(f"  ╎ {with_blanks(words, (age - _WHOLE) / max(_WORDS - _WHOLE, 0.01))}", "fact")]

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if pool is None:
            return Content("no model is loaded")
        logical, used = pool.figures.logical_blocks, pool.used_blocks
        if not used:
            return Content("no text is in memory")
        tables = [table for table in pool.tables.values() if table.state != "swapped"]
        texts = plural(len(tables), "text" if any(table.state == "pinned" for table in tables) else "answer")
        if logical <= used:
            return _headline(f"{texts} in memory", f"{plural(used, 'block')}, nothing is shared", width)
        share = f"{used * len(tables) / logical:.1f}".removesuffix(".0")
        saved = f"{texts} in the memory of {share} · {(logical - used) / logical:.0%} saved"
        return _headline(saved, f"{plural(used, 'block')}, {count(logical)} without sharing", width)


def _headline(text: str, facts: str, width: int) -> Content:
    gap = " · " if cell_len(text) + cell_len(facts) + 3 <= width else "\n"
    return Content.assemble((text, "bold $foreground"), gap, facts)


def with_blanks(text: str, part: float) -> str:
    """Replace about the fraction ``part`` of a text's characters by blanks.

    A character's position alone determines when it disappears, so with a growing ``part`` a text dissolves.
    """
    return "".join(
        " " * cell_len(each) if (number * 61 + 17) % 97 < 97 * part else each for number, each in enumerate(text)
    )


def in_order(tables: Iterable[TableView]) -> list[TableView]:
    """Return the tables grouped by request. Within a request they are ordered by completion."""
    tables, first = list(tables), dict[str | int, int]()
    for number, table in enumerate(tables):
        first.setdefault(table.owner or table.seq_id, number)
    return sorted(tables, key=lambda table: (first[table.owner or table.seq_id], table.index))


def _guide(width: int, height: int) -> list[tuple[str, str]]:
    """Return lines of at most ``width`` cells that explain the strands view. If they fit, blank lines separate them."""
    lines: list[tuple[str, str]] = []
    for text, kind in _GUIDE:
        indent = "" if text[1] != " " else "  "
        lines += [(line, kind) for line in wrap(text, max(20, width), subsequent_indent=indent)] + [("", kind)]
    return lines[:-1] if len(lines) <= height + 1 else [line for line in lines if line[0]]


def _color(table: TableView) -> str:
    return f"strand-{table.index % NUM_COLORS}"


def _cut(text: str, width: int) -> str:
    """Return ``text``, cut to at most ``width`` cells."""
    if cell_len(text) <= width:
        return text
    while cell_len(text) > width - 1:
        text = text[:-1]
    return text + "…"
