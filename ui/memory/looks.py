"""How blocks are drawn on the map: by their state or by their sequence, those of the device and those of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from string import ascii_letters

from minillm.service.messages import TableView
from minillm.ui.memory.pool import BlockState, Pool

_RISING = "▁▂▃▄▅▆▇"  # how full an owned block is
_GROWING = "▏▎▍▌▋▊▉"  # and a shared one: another shape, so that it needs no colour
_NUM_COLOURS = 8  # of sequences; the letters tell 52 of them apart
_CLASSES = {state: state.name.lower() for state in BlockState}
FREE = _CLASSES[BlockState.FREE]
_SHARED = _CLASSES[BlockState.SHARED]
_PART_OWNED, _PART_SHARED, _SWAPPED = "part-owned", "part-shared", "swapped"
_SEQUENCE_CLASSES = tuple(f"sequence-{number}" for number in range(_NUM_COLOURS))
COMPONENT_CLASSES = {*_CLASSES.values(), *_SEQUENCE_CLASSES, _PART_OWNED, _PART_SHARED, _SWAPPED}


class Looks:
    """The mark of every block of a pool, and the component class of its colour."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.host: dict[int, TableView] = {}  # host block -> the table that waits there
        self._marks = [""] * pool.num_blocks
        self._kinds = [""] * pool.num_blocks
        self._letters: dict[int, int] = {}  # seq_id -> its letter's number, as long as it lives
        self._sequence_of = bytearray(pool.num_blocks)  # block -> 1 + its sequence's letter; 0 where it has none

    def find_all(self, *, by_sequence: bool) -> None:
        """Find everything anew."""
        for block in range(self.pool.num_blocks):
            self.find(block)
        self.follow_host()
        if by_sequence:
            self.follow_sequences()

    def find(self, block: int) -> None:
        """Find how a block looks by its state."""
        state, size = self.pool.state(block), self.pool.block_size
        mark, kind = state.value, _CLASSES[state]
        if state is BlockState.OWNED or state is BlockState.SHARED:
            filled = self.pool.filled[block]
            if filled < size:
                owned = state is BlockState.OWNED
                levels, kind = (_RISING, _PART_OWNED) if owned else (_GROWING, _PART_SHARED)
                mark = levels[min(len(levels) - 1, filled * (len(levels) + 1) // size)]
            elif state is BlockState.SHARED:
                sharers = self.pool.ref_counts[block]
                mark = str(sharers) if sharers < 10 else "+"
        self._marks[block], self._kinds[block] = mark, kind

    def on_device(self) -> list[TableView]:
        return [table for table in self.pool.tables.values() if table.state != "swapped"]

    def follow_host(self) -> None:
        """Find the tables that wait on the host."""
        swapped = [table for table in self.pool.tables.values() if table.state == "swapped"]
        room = range(self.pool.num_host_blocks)
        self.host = {block: table for table in swapped for block in table.blocks if block in room}

    def follow_sequences(self) -> bytearray:
        """Find the sequence of each block; returns those before. A sequence keeps its letter as long as it lives."""
        pool, before = self.pool, self._sequence_of
        for seq_id in self._letters.keys() - pool.tables.keys():
            del self._letters[seq_id]
        taken = set(self._letters.values())
        free = (number for number in range(len(pool.tables) + len(taken)) if number not in taken)
        self._sequence_of = bytearray(pool.num_blocks)
        for table in pool.tables.values():
            if table.seq_id not in self._letters:
                self._letters[table.seq_id] = next(free)
            if table.state != "swapped":
                letter = 1 + self._letters[table.seq_id] % len(ascii_letters)
                for block in table.blocks:
                    self._sequence_of[block] = letter
        return before

    def changed_hands(self, before: bytearray, first: int, end: int) -> bool:
        """Whether a block from ``first`` to ``end`` is another sequence's: it may look the same by its state."""
        return before[first:end] != self._sequence_of[first:end]

    def device_cells(self, first: int, end: int, *, by_sequence: bool) -> tuple[list[str], list[str]]:
        """Marks and classes of the device's blocks from ``first`` to ``end``."""
        if not by_sequence:
            return self._marks[first:end], self._kinds[first:end]
        looks = [self._sequence_look(block) for block in range(first, end)]
        return [mark for mark, _ in looks], [kind for _, kind in looks]

    def host_cells(self, first: int, end: int, *, by_sequence: bool) -> tuple[list[str], list[str]]:
        """The same of the host's blocks."""
        looks = [self._host_look(self.host.get(block), by_sequence) for block in range(first, end)]
        return [mark for mark, _ in looks], [kind for _, kind in looks]

    def _sequence_look(self, block: int) -> tuple[str, str]:
        letter = self._sequence_of[block]
        if self.pool.ref_counts[block] > 1:
            return "*", _SHARED
        if letter:
            return _letter_look(letter - 1)
        return (":" if self.pool.state(block) is BlockState.CACHED else "·"), FREE

    def _host_look(self, table: TableView | None, by_sequence: bool) -> tuple[str, str]:
        if table is None:
            return "·", FREE
        return _letter_look(self._letters.get(table.seq_id, 0)) if by_sequence else ("w", _SWAPPED)

    def legend(self, name_of: Callable[[TableView], str], *, by_sequence: bool) -> Iterator[tuple[str, str, str]]:
        """Marks, their classes, and their meanings."""
        if by_sequence:
            yield "*", _SHARED, "several"
            for seq_id, number in sorted(self._letters.items(), key=lambda item: item[1]):
                if seq_id in self.pool.tables:
                    yield (*_letter_look(number), name_of(self.pool.tables[seq_id]))
            return
        yield "·", FREE, "free"
        yield "o", _CLASSES[BlockState.OWNED], "owned"
        yield "2", _SHARED, "shared by 2"
        yield "c", _CLASSES[BlockState.CACHED], "cached"
        yield "p", _CLASSES[BlockState.PINNED], "pinned"
        yield "▃", _PART_OWNED, "partly filled"
        yield "▍", _PART_SHARED, "shared"
        if self.host:
            yield "w", _SWAPPED, "swapped"


def _letter_look(number: int) -> tuple[str, str]:
    letter = number % len(ascii_letters)
    return ascii_letters[letter], _SEQUENCE_CLASSES[letter % _NUM_COLOURS]
