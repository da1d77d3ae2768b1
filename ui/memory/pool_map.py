"""A map of the block pool with a cell for each block. Only changed lines are redrawn."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from string import ascii_letters

from textual import events
from textual.content import Content
from textual.geometry import Region

from minillm.progress import size
from minillm.service.messages import TableView
from minillm.ui.bars import hidden_keys
from minillm.ui.drawing import flow
from minillm.ui.memory.line_view import BlockChosen, FactsChanged, LineView, Parts
from minillm.ui.memory.pool import FREE, NUM_COLORS, BlockState, Memory, Pool
from minillm.ui.numbers import count, plural

_GROUP = 8  # number of cells between two gaps
_RISING = "▁▂▃▄▅▆▇"  # marks of an owned block that is partly filled
_GROWING = "▏▎▍▌▋▊▉"  # marks of a shared block that is partly filled; another shape, for use without color
_CLASSES = {state: state.name.lower() for state in BlockState}
_LEGEND = (
    ("·", "free", "free"),
    ("o", "owned", "owned"),
    ("2", "shared", "shared by 2"),
    ("c", "cached", "cached"),
    ("p", "pinned", "pinned"),
    ("▃", "part-owned", "partly filled"),
    ("▍", "part-shared", "shared"),
)  # a block's mark, its component class, and its meaning
_SEQUENCE_CLASSES = tuple(f"sequence-{number}" for number in range(NUM_COLORS))
_COMPONENT_CLASSES = {*_CLASSES.values(), *_SEQUENCE_CLASSES, "part-owned", "part-shared", "swapped"}


class Looks:
    """The look of every block on the map: its mark, and a component class that sets the mark's color."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.host: dict[int, TableView] = {}  # host block -> the swapped table that uses it
        self._by_state = [("", "")] * pool.num_blocks
        self._letters: dict[int, int] = {}  # seq_id of a running sequence -> number of its letter
        self._colors: dict[int, int] = {}  # number of a letter -> number of its color
        self._sequence_of = bytearray(pool.num_blocks)  # for each block, 1 + index of its sequence's letter, or 0

    def find_all(self, *, by_sequence: bool) -> None:
        """Compute the mark and the component class (the color) of every block.

        With ``by_sequence``, also determine which sequence each block belongs to.
        """
        for block in range(self.pool.num_blocks):
            self.find(block)
        self.follow_host()
        if by_sequence:
            self.follow_sequences()

    def find(self, block: int) -> None:
        """Compute the mark and the component class (the color) of a block from its state."""
        state, size = self.pool.state(block), self.pool.block_size
        mark, kind = state.value, _CLASSES[state]
        if state is BlockState.OWNED or state is BlockState.SHARED:
            filled = self.pool.filled[block]
            if filled < size:
                owned = state is BlockState.OWNED
                levels, kind = (_RISING, "part-owned") if owned else (_GROWING, "part-shared")
                mark = levels[min(len(levels) - 1, filled * (len(levels) + 1) // size)]
            elif state is BlockState.SHARED:
                sharers = self.pool.ref_counts[block]
                mark = str(sharers) if sharers < 10 else "+"
        self._by_state[block] = mark, kind

    def on_device(self) -> list[TableView]:
        return [table for table in self.pool.tables.values() if table.state != "swapped"]

    def follow_host(self) -> None:
        """Update `host`, which maps each used block in host memory to its table."""
        swapped = [table for table in self.pool.tables.values() if table.state == "swapped"]
        host_blocks = range(self.pool.num_host_blocks)
        self.host = {block: table for table in swapped for block in table.blocks if block in host_blocks}

    def follow_sequences(self) -> bytearray:
        """Determine which sequence each block belongs to. Return the result of the previous call, for `owners_changed`.

        On the map, a sequence keeps its letter until it ends.
        """
        pool, before = self.pool, self._sequence_of
        for seq_id in self._letters.keys() - pool.tables.keys():
            del self._letters[seq_id]
        taken = set(self._letters.values())
        free = (number for number in range(len(pool.tables) + len(taken)) if number not in taken)
        self._sequence_of = bytearray(pool.num_blocks)
        of_several = {table.owner for table in pool.tables.values() if table.index}
        for table in pool.tables.values():
            if table.seq_id not in self._letters:
                self._letters[table.seq_id] = next(free)
            number = self._letters[table.seq_id]
            # A candidate has the color of its card and its strand.
            self._colors[number] = table.index if table.owner in of_several else number
            if table.state != "swapped":
                letter = 1 + self._letters[table.seq_id] % len(ascii_letters)
                for block in table.blocks:
                    self._sequence_of[block] = letter
        return before

    def owners_changed(self, before: bytearray, first: int, end: int) -> bool:
        """Return whether any block from ``first`` to ``end - 1`` belongs to another sequence than in ``before``.

        Such a block must be redrawn even if its state is the same.
        """
        return before[first:end] != self._sequence_of[first:end]

    def cells(self, first: int, end: int, *, on_host: bool, by_sequence: bool) -> list[tuple[str, str]]:
        """Return (mark, component class) for each block from ``first`` to ``end - 1``. The class sets the color."""
        if on_host:
            return [self._host_look(self.host.get(block), by_sequence) for block in range(first, end)]
        if by_sequence:
            return [self._sequence_look(block) for block in range(first, end)]
        return self._by_state[first:end]

    def _sequence_look(self, block: int) -> tuple[str, str]:
        letter = self._sequence_of[block]
        if self.pool.ref_counts[block] > 1:
            return "*", "shared"
        if letter:
            return self._letter_look(letter - 1)
        return (":" if self.pool.state(block) is BlockState.CACHED else "·"), "free"

    def _host_look(self, table: TableView | None, by_sequence: bool) -> tuple[str, str]:
        if table is None:
            return "·", "free"
        return self._letter_look(self._letters.get(table.seq_id, 0)) if by_sequence else ("w", "swapped")

    def _letter_look(self, number: int) -> tuple[str, str]:
        letter = number % len(ascii_letters)
        return ascii_letters[letter], _SEQUENCE_CLASSES[self._colors.get(number, number) % NUM_COLORS]

    def legend(self, name_of: Callable[[TableView], str], *, by_sequence: bool) -> Iterator[tuple[str, str, str]]:
        """Yield (mark, component class, meaning) for each entry of the map's legend."""
        if by_sequence:
            yield "*", "shared", "several"
            for seq_id, number in sorted(self._letters.items(), key=lambda item: item[1]):
                if seq_id in self.pool.tables:
                    yield (*self._letter_look(number), name_of(self.pool.tables[seq_id]))
            return
        yield from _LEGEND
        if self.host:
            yield "w", "swapped", "swapped"


@dataclass(frozen=True)
class Grid:
    """The position of each block's cell in the map.

    Below the rows of device blocks are a heading and the rows of host blocks. Host blocks are counted from 0 again.
    """

    num_blocks: int
    per_row: int
    label_width: int  # cells before a row's first block, including a space

    @property
    def num_rows(self) -> int:
        return -(-self.num_blocks // self.per_row)

    def block_at(self, x: int, row: int) -> tuple[int, bool] | None:
        """Return the number of the block at a cell, and whether it is in host memory. Return None for a gap.

        For a cell after the last block, the number is too large: no block has it.
        """
        group, cell = divmod(x - self.label_width, _GROUP + 1)
        column = group * _GROUP + cell
        if cell == _GROUP or not 0 <= column < self.per_row:
            return None
        on_host = row >= self.num_rows
        return (row - on_host * (self.num_rows + 1)) * self.per_row + column, on_host


class PoolMap(LineView):
    """Shows rows of blocks, each after the number of its first block. Blocks in host memory have the last rows.

    A free block is a dot. A full block shows a letter for its state, or the number of sequences that share it. A partly
    filled block is a bar. If the map is colored by sequence, a block shows the letter of its sequence.
    """

    COMPONENT_CLASSES = {*_COMPONENT_CLASSES, "label", "cursor"}  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"left": "move(-1, 0)", "right": "move(1, 0)", "up": "move(0, -1)", "down": "move(0, 1)"}),
        *hidden_keys({"home": "move_to(0)", "end": "move_to(-1)", "c": "color"}),
    ]

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._looks: Looks | None = None  # None without a pool
        self._grid = Grid(0, _GROUP, 0)
        self.by_sequence = False
        self._cursor = 0
        self._hovered: tuple[int, bool] | None = None  # the block under the mouse, and whether it is in host memory
        self._is_empty = bytearray()  # for each device row, whether all its blocks are free
        self._rows: list[int] = []  # for each line, the grid's row, or minus the number of rows that are folded into it
        self._lines: dict[int, int] = {}  # row of the grid that is not folded -> the line that shows it

    def reset(self) -> None:
        self._looks = None if self.memory.pool is None else Looks(self.memory.pool)
        self._cursor, self._hovered = 0, None
        self.catch_up()
        self.scroll_home(animate=False)

    def blocks_changed(self, blocks: Iterable[int]) -> None:
        """Redraw the rows of blocks that have changed.

        If some of these blocks are in use but none of their rows is visible, scroll to the last of their rows. Do not
        scroll while the map has the focus or the mouse.
        """
        looks, per_row = self._looks, self._grid.per_row
        if looks is None:
            return
        rows, used = set(), []  # rows with a changed block; rows with a changed block that is in use
        for block in blocks:
            looks.find(block)
            rows.add(block // per_row)
            if looks.pool.ref_counts[block]:
                used.append(block // per_row)
        on_host = looks.host
        looks.follow_host()
        before = looks.follow_sequences() if self.by_sequence else None
        filled = {row: self._all_free(row) for row in rows}
        if looks.host.keys() != on_host.keys():
            self._lay_out()
        elif any(self._is_empty[row] != free for row, free in filled.items()):
            for row, free in filled.items():
                self._is_empty[row] = free
            self._fold()
        top, bottom = self.scroll_offset.y, self.scroll_offset.y + self.size.height
        if before is not None:
            seen = [row for row in self._rows[top:bottom] if 0 <= row < self._grid.num_rows]
            rows |= {r for r in seen if looks.owners_changed(before, r * per_row, (r + 1) * per_row)}
        self._redraw(rows)
        # Do not scroll while the user has the focus or the mouse in the map.
        in_view = any(top <= self._lines.get(row, -1) < bottom for row in used)
        if used and not in_view and not self.has_focus and self._hovered is None:
            self._show_row(used[-1], centred=True)

    def _all_free(self, row: int) -> bool:
        assert self._looks is not None
        looks = self._looks.pool.looks[row * self._grid.per_row : (row + 1) * self._grid.per_row]
        return looks.count(FREE) == len(looks)

    def _show_row(self, row: int, *, centred: bool = False) -> None:
        self.show_line(self._lines.get(row, 0), centred=centred)

    def catch_up(self) -> None:
        if self._looks is not None:
            self._looks.find_all(by_sequence=self.by_sequence)
        self.on_resize()

    def on_resize(self) -> None:
        self._lay_out()
        if not self.has_focus:
            self._show_last_used()

    def _redraw(self, rows: set[int]) -> None:
        top, height, width = self.scroll_offset.y, self.size.height, self.size.width
        seen = [line - top for row in rows if 0 <= (line := self._lines.get(row, -1)) - top < height]
        if len(seen) > height // 2:
            self.refresh()  # drawing many separate regions would take longer than drawing all lines
        elif seen:
            self.refresh(*(Region(0, y, width, 1) for y in seen))

    def action_color(self) -> None:
        self.by_sequence = not self.by_sequence
        if self._looks is not None and self.by_sequence:
            self._looks.follow_sequences()
        self.refresh()
        self.post_message(FactsChanged())

    def action_move(self, blocks: int, rows: int) -> None:
        self._move_to(self._cursor + blocks + rows * self._grid.per_row)

    def action_move_to(self, block: int) -> None:
        if self._looks is not None:
            self._move_to(block % self._grid.num_blocks)

    def _move_to(self, block: int) -> None:
        if not 0 <= block < self._grid.num_blocks:
            return
        before, self._cursor = self._cursor, block
        rows = {before // self._grid.per_row, block // self._grid.per_row}
        self._show_row(block // self._grid.per_row)
        self._redraw(rows)
        self._post_chosen()

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        if self._looks is None:
            return
        self._fold()
        if not has_focus:
            self._redraw({self._cursor // self._grid.per_row})
            self._post_chosen()
        else:
            if not self._looks.pool.ref_counts[self._cursor]:
                tables = self._looks.on_device()
                self._cursor = next((table.blocks[0] for table in tables if table.blocks), self._cursor)
            self._move_to(self._cursor)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._hover(self._block_at(event))

    def on_leave(self) -> None:
        self._hover(None)

    def on_click(self, event: events.Click) -> None:
        found = self._block_at(event)
        if found is not None and not found[1]:
            self._move_to(found[0])

    def _block_at(self, event: events.MouseEvent) -> tuple[int, bool] | None:
        line = event.y + self.scroll_offset.y
        row = self._rows[line] if 0 <= line < len(self._rows) else -1
        found = self._grid.block_at(event.x, row) if row >= 0 else None
        if found is None or self._looks is None:
            return None
        block, on_host = found
        return found if (block in self._looks.host if on_host else block < self._grid.num_blocks) else None

    def _hover(self, block: tuple[int, bool] | None) -> None:
        if block != self._hovered and self._looks is not None:
            self._hovered = block
            self._post_chosen()

    def _post_chosen(self) -> None:
        """Send a message with the selected block: the block under the mouse, else the block at the cursor."""
        chosen = self._hovered or ((self._cursor, False) if self.has_focus else None)
        if chosen is None or not chosen[1]:
            self.post_message(BlockChosen(None if chosen is None else chosen[0]))
        elif self._looks is not None and (table := self._looks.host.get(chosen[0])) is not None:
            self.post_message(BlockChosen(chosen[0], table))

    def _show_last_used(self) -> None:
        used = [block for table in self._looks.on_device() for block in table.blocks[-1:]] if self._looks else []
        if used:
            self._show_row(used[-1] // self._grid.per_row, centred=True)

    def _lay_out(self) -> None:
        looks = self._looks
        if looks is None:
            self._grid = Grid(0, _GROUP, 0)
            self._is_empty = bytearray()
            self._fold()
            return
        num_blocks = looks.pool.num_blocks
        label_width = max(4, len(str(num_blocks - 1))) + 1
        groups = max(1, (self.scrollable_content_region.width - label_width + 1) // (_GROUP + 1))
        # The number of groups in a row is a power of two, so that each row begins at a round number.
        grid = self._grid = Grid(num_blocks, _GROUP * (1 << (groups.bit_length() - 1)), label_width)
        self._is_empty = bytearray(self._all_free(row) for row in range(grid.num_rows))
        self._fold()

    def _fold(self) -> None:
        """Choose the rows to show. If not all rows fit, several adjacent rows of free blocks become one line.

        While the map has the focus, all rows are shown, so that the cursor can reach every block.
        """
        host = self._looks.host if self._looks is not None else {}
        host_rows = 1 + -(-(max(host) + 1) // self._grid.per_row) if host else 0  # including the heading
        num_rows = self._grid.num_rows + host_rows
        self._rows = list(range(num_rows))
        if num_rows > self.size.height and not self.has_focus:
            runs = groupby(range(self._grid.num_rows), key=self._is_empty.__getitem__)
            parts = [(empty, list(run)) for empty, run in runs]
            folded = [[-len(run)] if empty and len(run) > 1 else run for empty, run in parts]
            self._rows = [*chain.from_iterable(folded), *range(self._grid.num_rows, num_rows)]
        self._lines = {row: line for line, row in enumerate(self._rows)}
        self.set_lines(len(self._rows))

    def line(self, row: int, width: int) -> Parts:
        looks, grid = self._looks, self._grid
        if looks is None or row >= len(self._rows):
            return []
        if (row := self._rows[row]) < 0:
            return [("⋮".rjust(grid.label_width - 1) + f" {plural(-row, 'row')} of free blocks", "label")]
        pool, on_host = looks.pool, row > grid.num_rows
        if row == grid.num_rows:
            words = f"{len(looks.host)} of {count(pool.num_host_blocks)} blocks"
            return [("host".rjust(grid.label_width - 1) + " " + words, "label")]
        first = (row - on_host * (grid.num_rows + 1)) * grid.per_row
        end = min(first + grid.per_row, pool.num_host_blocks if on_host else pool.num_blocks)
        cells = looks.cells(first, end, on_host=on_host, by_sequence=self.by_sequence)
        if self.has_focus and not on_host and first <= self._cursor < end:
            mark, kind = cells[self._cursor - first]
            cells[self._cursor - first] = mark, f"{kind} cursor"
        for gap in reversed(range(_GROUP, len(cells), _GROUP)):
            cells.insert(gap, (" ", "free"))
        # Adjacent cells of the same class share a segment, so that a row of 128 cells has only a few segments.
        runs = [("".join(mark for mark, _ in run), kind) for kind, run in groupby(cells, key=itemgetter(1))]
        return [(f"{first:>{grid.label_width - 1}} ", "label"), *runs]

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if pool is None:
            return Content("no model is loaded")
        return Content(
            f"{count(pool.used_blocks)} of {count(pool.num_blocks)} blocks of {plural(pool.block_size, 'slot')}\n"
            f"{size(pool.used_blocks * pool.block_bytes)} of {size(pool.num_blocks * pool.block_bytes)}"
            f" · {plural(pool.wasted_slots, 'slot')} empty\n"
            f"{count(pool.figures.shared_blocks)} shared (×{pool.sharing_ratio:.2f})"
            f" · {count(pool.counts.num_copies)} copied on write"
        )

    def legend(self, width: int, height: int) -> Content:
        if self._looks is None:
            return Content("")
        items = [
            Content.assemble((mark, self.get_visual_style(kind)), " " + meaning)
            for mark, kind, meaning in self._looks.legend(self.memory.table_name, by_sequence=self.by_sequence)
        ]
        return flow(items, width, height)
