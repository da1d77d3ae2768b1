"""The pool of blocks, a cell each: thousands of them, drawn a line at a time, redrawn only where they changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from string import ascii_letters

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from minillm.service.messages import TableView
from minillm.ui.drawn import flow
from minillm.ui.memory.line_view import LineView
from minillm.ui.memory.names import Names, table_name
from minillm.ui.memory.pool import BlockState, Pool
from minillm.ui.numbers import count

_RISING = "▁▂▃▄▅▆▇"  # how full an owned block is
_GROWING = "▏▎▍▌▋▊▉"  # and a shared one: another shape, so that it needs no colour
_GROUP = 8  # blocks between two gaps
_NUM_COLOURS = 8  # of sequences; the letters tell 52 of them apart
_CLASSES = {state: f"pool-map--{state.name.lower()}" for state in BlockState}
_FREE, _OWNED, _SHARED = (_CLASSES[state] for state in (BlockState.FREE, BlockState.OWNED, BlockState.SHARED))
_PART_OWNED, _PART_SHARED, _SWAPPED = "pool-map--part-owned", "pool-map--part-shared", "pool-map--swapped"
_SEQUENCE_CLASSES = tuple(f"pool-map--sequence-{number}" for number in range(_NUM_COLOURS))


class PoolMap(LineView):
    """A row is the number of its first block, then its cells; rows of the host's memory follow while it holds any.

    A free block is a dot; a full one its letter on its colour, or the number of its sharers; a partly filled one a bar
    in its colour. Coloured by sequence, a block shows its sequence's letter.
    """

    COMPONENT_CLASSES = {  # noqa: RUF012
        *(*_CLASSES.values(), *_SEQUENCE_CLASSES, _PART_OWNED, _PART_SHARED, _SWAPPED, "pool-map--label")
    }
    BINDINGS = [  # noqa: RUF012
        Binding("left", "move(-1, 0)", "Block", show=False),
        Binding("right", "move(1, 0)", "Block", show=False),
        Binding("up", "move(0, -1)", "Row", show=False),
        Binding("down", "move(0, 1)", "Row", show=False),
        Binding("home", "move_to(0)", "First block", show=False),
        Binding("end", "move_to(-1)", "Last block", show=False),
        Binding("c", "colour", "By sequence", show=False),
    ]

    by_sequence: reactive[bool] = reactive(False, init=False)

    @dataclass
    class Chosen(Message):
        """The cursor or the mouse is on a block now, or on none. Of the host's blocks if ``table`` holds it there."""

        block: int | None
        table: TableView | None = None

    class Recoloured(Message):
        """Coloured the other way: the legend is another one."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: Pool | None = None
        self._per_row = _GROUP
        self._marks: list[str] = []  # of each block, by state: what is drawn in its cell
        self._kinds: list[str] = []  # and its component class
        self._cursor = 0
        self._hovered: int | None = None
        self._letters: dict[int, int] = {}  # seq_id -> its letter's number, as long as it lives
        self._sequence_of = bytearray()  # block -> 1 + its sequence's letter; 0 where it has none
        self._host: dict[int, TableView] = {}  # host block -> who waits there

    # --- what it is told ----------------------------------------------------------------------------------------------

    def show_pool(self, pool: Pool | None) -> None:
        """Another pool, or none."""
        self._pool = pool
        self._cursor, self._hovered = 0, None
        self._letters.clear()
        self._find_looks()
        self._follow_tables()
        self._lay_out()
        self.scroll_home(animate=False)

    def blocks_changed(self, blocks: Iterable[int]) -> None:
        """Draw the rows of these blocks again; where none of those in use is in view, bring the last one there."""
        if self._pool is None:
            return
        rows, used = set(), []  # rows with a change; rows where a block in use changed
        for block in blocks:
            self._find_look(block)
            rows.add(block // self._per_row)
            if self._pool.ref_counts[block]:
                used.append(block // self._per_row)
        before, on_host = self._sequence_of, self._host
        self._follow_tables()
        if self._host.keys() != on_host.keys():
            self._lay_out()
        elif self.by_sequence:
            rows |= self._rows_that_differ(before)
        self._redraw(rows)
        # Whoever has moved into the map looks at it themselves.
        top = self.scroll_offset.y
        in_view = any(top <= row < top + self.size.height for row in used)
        if used and not in_view and not self.has_focus and self._hovered is None:
            self._show_row(used[-1])

    def catch_up(self) -> None:
        """Draw everything anew."""
        self._find_looks()
        self._follow_tables()
        self._lay_out()
        if not self.has_focus:
            self._show_last_used()

    def _find_looks(self) -> None:
        num_blocks = self._pool.num_blocks if self._pool is not None else 0
        self._marks, self._kinds = [""] * num_blocks, [""] * num_blocks
        for block in range(num_blocks):
            self._find_look(block)

    def _redraw(self, rows: set[int]) -> None:
        top, height, width = self.scroll_offset.y, self.size.height, self.size.width
        seen = [row - top for row in rows if 0 <= row - top < height]
        if len(seen) > height // 2:
            self.refresh()  # each region costs more than a line
        elif seen:
            self.refresh(*(Region(0, y, width, 1) for y in seen))

    def _rows_that_differ(self, before: bytearray) -> set[int]:
        """Rows in view whose blocks have changed hands: a block may look the same and be another sequence's."""
        top, size = self.scroll_offset.y, self._per_row
        starts = ((row, row * size) for row in range(top, top + self.size.height))
        return {row for row, at in starts if before[at : at + size] != self._sequence_of[at : at + size]}

    def _follow_tables(self) -> None:
        """Who holds what, as far as it is drawn."""
        pool = self._pool
        if pool is None:
            self._host, self._sequence_of = {}, bytearray()
            return
        swapped = [table for table in pool.tables.values() if table.state == "swapped"]
        self._host = {block: table for table in swapped for block in table.blocks if 0 <= block < pool.num_host_blocks}
        if not self.by_sequence:
            return
        for seq_id in self._letters.keys() - pool.tables.keys():
            del self._letters[seq_id]
        taken = set(self._letters.values())
        free = (number for number in range(len(pool.tables) + len(taken)) if number not in taken)
        owners = bytearray(pool.num_blocks)
        for table in pool.tables.values():
            if table.seq_id not in self._letters:
                self._letters[table.seq_id] = next(free)
            if table.state != "swapped":
                letter = 1 + self._letters[table.seq_id] % len(ascii_letters)
                for block in table.blocks:
                    owners[block] = letter
        self._sequence_of = owners

    def watch_by_sequence(self) -> None:
        self._follow_tables()
        self.refresh()
        self.post_message(self.Recoloured())

    def action_colour(self) -> None:
        self.by_sequence = not self.by_sequence

    # --- where the cursor and the mouse are ---------------------------------------------------------------------------

    def action_move(self, blocks: int, rows: int) -> None:
        self._move_to(self._cursor + blocks + rows * self._per_row)

    def action_move_to(self, block: int) -> None:
        if self._pool is not None:
            self._move_to(block % self._pool.num_blocks)

    def _move_to(self, block: int) -> None:
        if self._pool is None or not 0 <= block < self._pool.num_blocks:
            return
        before, self._cursor = self._cursor, block
        self.show_line(block // self._per_row)
        self._redraw({before // self._per_row, block // self._per_row})
        self._say_chosen()

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        if self._pool is None:
            return
        if not has_focus:
            self._redraw({self._cursor // self._per_row})
            self._say_chosen()
        else:
            if not self._pool.ref_counts[self._cursor]:
                self._cursor = next((table.blocks[0] for table in self._on_device() if table.blocks), self._cursor)
            self._move_to(self._cursor)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._hover(self._block_at(event.x, event.y + self.scroll_offset.y))

    def on_leave(self) -> None:
        self._hover(None)

    def on_click(self, event: events.Click) -> None:
        block = self._block_at(event.x, event.y + self.scroll_offset.y)
        if block is not None:
            self._move_to(block)

    def _hover(self, block: int | None) -> None:
        """``block`` counts on through the host's blocks."""
        if block == self._hovered or self._pool is None:
            return
        self._hovered = block
        self._say_chosen()

    def _say_chosen(self) -> None:
        """The mouse goes before the cursor, which is only where the keys go to."""
        block = self._hovered
        if block is None and self.has_focus:
            block = self._cursor
        if block is None or self._pool is None or block < self._pool.num_blocks:
            self.post_message(self.Chosen(block))
        elif (table := self._host.get(block - self._pool.num_blocks)) is not None:
            self.post_message(self.Chosen(block - self._pool.num_blocks, table))

    def _block_at(self, x: int, row: int) -> int | None:
        if self._pool is None:
            return None
        group, cell = divmod(x - self._label_width, _GROUP + 1)
        column = group * _GROUP + cell
        if cell == _GROUP or not 0 <= column < self._per_row:
            return None
        if row < self._num_rows:
            block = row * self._per_row + column
            return block if block < self._pool.num_blocks else None
        block = (row - self._num_rows - 1) * self._per_row + column
        return self._pool.num_blocks + block if block in self._host else None

    def _on_device(self) -> list[TableView]:
        return [table for table in self._pool.tables.values() if table.state != "swapped"] if self._pool else []

    # --- drawing ------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._lay_out()
        if not self.has_focus:
            self._show_last_used()

    def _show_last_used(self) -> None:
        used = [block for table in self._on_device() for block in table.blocks[-1:]]
        if used:
            self._show_row(used[-1] // self._per_row)

    def _show_row(self, row: int) -> None:
        top, height = self.scroll_offset.y, self.size.height
        if height and not top <= row < top + height:
            self.scroll_to(y=max(0, row - height // 2), animate=False, force=True)

    def _lay_out(self) -> None:
        if self._pool is None:
            self.set_lines(0)
            return
        room = self.scrollable_content_region.width - self._label_width
        groups = max(1, (room + 1) // (_GROUP + 1))
        # A power of two of groups: then the row's first block is a round number.
        self._per_row = _GROUP * (1 << (groups.bit_length() - 1))
        host_rows = 1 + -(-(max(self._host) + 1) // self._per_row) if self._host else 0
        self.set_lines(self._num_rows + host_rows)

    @property
    def _num_rows(self) -> int:
        """Rows of the device's blocks."""
        return -(-self._pool.num_blocks // self._per_row) if self._pool is not None else 0

    @property
    def _label_width(self) -> int:
        return max(4, len(str(self._pool.num_blocks - 1))) + 1 if self._pool is not None else 0

    def line(self, row: int, width: int) -> list[Segment]:
        pool = self._pool
        if pool is None:
            return []
        if row == self._num_rows:
            words = f"{len(self._host)} of {count(pool.num_host_blocks)} blocks"
            return [Segment("host".rjust(self._label_width - 1) + " " + words, self.part("pool-map--label"))]
        on_host = row > self._num_rows
        first = (row - on_host * (self._num_rows + 1)) * self._per_row
        end = min(first + self._per_row, pool.num_host_blocks if on_host else pool.num_blocks)
        if on_host or self.by_sequence:
            look = self._host_look if on_host else self._sequence_look
            looks = [look(block) for block in range(first, end)]
            marks, kinds = [mark for mark, _ in looks], [kind for _, kind in looks]
        else:
            marks, kinds = self._marks[first:end], self._kinds[first:end]
        groups = range(0, len(marks), _GROUP)
        text = " ".join("".join(marks[start : start + _GROUP]) for start in groups)
        cells = [kind for start in groups for kind in (*kinds[start : start + _GROUP], _FREE)]
        segments = [Segment(f"{first:>{self._label_width - 1}} ", self.part("pool-map--label"))]
        at = 0
        # Neighbours that look alike are one segment: a row of 128 cells is a handful.
        for kind, run in groupby(cells[:-1]):
            end = at + len(list(run))
            segments.append(Segment(text[at:end], self.part(kind)))
            at = end
        return self._with_cursor(segments, self._cursor - first) if self.has_focus and not on_host else segments

    def _with_cursor(self, segments: list[Segment], column: int) -> list[Segment]:
        """The cell of a column of blocks in reverse, if it is one of this row's."""
        if not 0 <= column < self._per_row:
            return segments
        cell = self._label_width + column + column // _GROUP
        strip = Strip(segments)
        reverse = Style(reverse=True)
        marked = [Segment(text, (style or self.base) + reverse) for text, style, _ in strip.crop(cell, cell + 1)]
        return [*strip.crop(0, cell), *marked, *strip.crop(cell + 1)]

    def _find_look(self, block: int) -> None:
        """Note how a block is drawn by its state."""
        assert self._pool is not None
        state, size = self._pool.state(block), self._pool.block_size
        mark, kind = state.value, _CLASSES[state]
        if state is BlockState.OWNED or state is BlockState.SHARED:
            filled = self._pool.filled[block]
            if filled < size:
                owned = state is BlockState.OWNED
                levels, kind = (_RISING, _PART_OWNED) if owned else (_GROWING, _PART_SHARED)
                mark = levels[min(len(levels) - 1, filled * (len(levels) + 1) // size)]
            elif state is BlockState.SHARED:
                sharers = self._pool.ref_counts[block]
                mark = str(sharers) if sharers < 10 else "+"
        self._marks[block], self._kinds[block] = mark, kind

    def _sequence_look(self, block: int) -> tuple[str, str]:
        assert self._pool is not None
        letter = self._sequence_of[block]
        if self._pool.ref_counts[block] > 1:
            return "*", _SHARED
        if letter:
            return ascii_letters[letter - 1], _SEQUENCE_CLASSES[(letter - 1) % _NUM_COLOURS]
        return (":" if self._pool.state(block) is BlockState.CACHED else "·"), _FREE

    def _host_look(self, block: int) -> tuple[str, str]:
        table = self._host.get(block)
        if table is None:
            return "·", _FREE
        if self.by_sequence:
            letter = self._letters.get(table.seq_id, 0) % len(ascii_letters)
            return ascii_letters[letter], _SEQUENCE_CLASSES[letter % _NUM_COLOURS]
        return "w", _SWAPPED

    def legend(self, names: Names, width: int, num_lines: int) -> Content:
        """What the marks mean, as far as it fits."""
        if self._pool is None:
            return Content("")
        items = self._sequence_legend(names) if self.by_sequence else self._state_legend()
        return flow(items, width, num_lines)

    def _item(self, mark: str, component: str, meaning: str) -> Content:
        return Content.assemble((mark, self.get_visual_style(component)), " " + meaning)

    def _state_legend(self) -> list[Content]:
        items = [
            self._item("·", _FREE, "free"),
            self._item("o", _OWNED, "owned"),
            self._item("2", _SHARED, "shared by 2"),
            self._item("c", _CLASSES[BlockState.CACHED], "cached"),
            self._item("p", _CLASSES[BlockState.PINNED], "pinned"),
            self._item("▃", _PART_OWNED, "partly filled"),
            self._item("▍", _PART_SHARED, "shared"),
        ]
        return [*items, self._item("w", _SWAPPED, "swapped")] if self._host else items

    def _sequence_legend(self, names: Names) -> list[Content]:
        assert self._pool is not None
        items = [self._item("*", _SHARED, "several")]
        tables = [table for table in self._pool.tables.values() if table.seq_id in self._letters]
        for table in sorted(tables, key=lambda table: self._letters[table.seq_id]):
            letter = self._letters[table.seq_id] % len(ascii_letters)
            component = _SEQUENCE_CLASSES[letter % _NUM_COLOURS]
            items.append(self._item(ascii_letters[letter], component, table_name(table, names)))
        return items
