"""The six views of the memory: a list each, and the lines of facts around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget

from minillm.ui.drawn import Drawn
from minillm.ui.memory.block_facts import block_facts
from minillm.ui.memory.block_table import HEADING, BlockTableView
from minillm.ui.memory.event_log import EventLog
from minillm.ui.memory.figures import MemoryFigures
from minillm.ui.memory.fork_tree import ForkTree
from minillm.ui.memory.line_view import LineView
from minillm.ui.memory.memory import Memory
from minillm.ui.memory.pool_map import PoolMap
from minillm.ui.memory.steps import HEADING as STEP_HEADING
from minillm.ui.memory.steps import StepList


class MemoryView(Vertical):
    """A view of the memory in a box, empty until it is filled."""

    def __init__(self, name: str, title: str, parts: Callable[[], list[Widget]], keys: str = "") -> None:
        super().__init__(id=f"view-{name}", classes="view box")
        self.border_title, self.border_subtitle = title, keys
        self._parts = parts

    async def fill(self) -> None:
        """Make the widgets. Where the view is not seen on the first screen, that waits."""
        await self.mount_all(self._parts())

    def begin_anew(self) -> None:
        """There is another pool, or none."""
        for lines in self.query(LineView):
            lines.begin_anew()

    def catch_up(self) -> None:
        """Show the memory as it stands now."""
        for lines in self.query(LineView):
            lines.catch_up()
        self.update_facts()

    @on(EventLog.Changed)
    def update_facts(self) -> None:
        """Draw the changed lines around the lists."""
        for facts in self.query(Drawn):
            facts.update()


class PoolView(MemoryView):
    """Every block, and beside the map the current block table, or the block that the reader is at."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("pool", "", list)
        self.remove_class("box")
        self._map, self._table = PoolMap(memory), BlockTableView(memory)
        self._block_facts = _block_facts("block-facts", memory)

    def compose(self) -> ComposeResult:
        facts, legend = Drawn(self._map.headline, id="pool-facts"), Drawn(self._map.legend, id="pool-legend")
        yield _box("pool", "pool", facts, self._map, legend)
        facts = Drawn(self._table.headline, id="table-facts")
        yield _box("table", "block table", facts, _line("table-heading", HEADING), self._table)
        yield _box("block", "block", self._block_facts)

    def blocks_changed(self, blocks: Iterable[int]) -> None:
        """Draw only the rows of these blocks anew: nothing else was missed."""
        self._map.blocks_changed(blocks)
        self._table.catch_up()
        self.update_facts()

    @on(PoolMap.Recoloured)
    def name_colours(self) -> None:
        """Name the key for the other colours."""
        self.query_one("#pool").border_subtitle = "c: by state" if self._map.by_sequence else "c: by sequence"
        self.update_facts()

    def on_mount(self) -> None:
        self.name_colours()


def _box(name: str, title: str, *parts: Widget) -> Vertical:
    box = Vertical(*parts, id=name, classes="box")
    box.border_title = title
    return box


def _line(name: str, text: str) -> Drawn:
    return Drawn(lambda width, height: Content(text), id=name)


def _block_facts(name: str, memory: Memory) -> Drawn:
    return Drawn(lambda width, height: block_facts(memory), id=name)


def memory_views(memory: Memory, log: EventLog) -> dict[str, MemoryView]:
    """The views by name. ``log`` is there from the start, for it learns names."""

    def tables() -> list[Widget]:
        lines = BlockTableView(memory, headers=True)
        return [Drawn(lines.headline, id="tables-facts"), lines, _block_facts("tables-block", memory)]

    def tree() -> list[Widget]:
        lines = ForkTree(memory)
        return [Drawn(lines.headline, id="tree-facts"), lines]

    def events() -> list[Widget]:
        return [Drawn(log.headline, id="events-facts"), log, Drawn(log.legend, id="events-legend")]

    def steps() -> list[Widget]:
        lines, heading = StepList(memory), _line("steps-heading", f"{STEP_HEADING}▒ host █ device")
        return [Drawn(lines.headline, id="steps-facts"), heading, lines]

    return {
        "pool": PoolView(memory),
        "tables": MemoryView("tables", "block tables", tables, "t: tokens"),
        "tree": MemoryView("tree", "fork tree", tree),
        "events": MemoryView("events", "events", events),
        "memory": MemoryView("memory", "memory", lambda: [MemoryFigures(memory)]),
        "steps": MemoryView("steps", "steps", steps),
    }
