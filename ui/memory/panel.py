"""The live panel: six views of the cache's memory, of which one is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from minillm.progress import size
from minillm.runs import contiguous_runs
from minillm.service.messages import BlockFacts, TableView
from minillm.ui.bars.tabs import ViewTabs
from minillm.ui.drawn import Drawn
from minillm.ui.memory.block_facts import block_facts, host_block_facts
from minillm.ui.memory.block_table import HEADING, BlockTableView, runs_line
from minillm.ui.memory.event_log import EventLog
from minillm.ui.memory.figures import MemoryFigures
from minillm.ui.memory.fork_tree import ForkTree, tree_summary
from minillm.ui.memory.names import Names, clean_names, table_name
from minillm.ui.memory.pool import Pool
from minillm.ui.memory.pool_map import PoolMap
from minillm.ui.memory.steps import HEADING as STEP_HEADING
from minillm.ui.memory.steps import StepList, steps_summary
from minillm.ui.numbers import count, plural

__all__ = ["MemoryPanel", "Names"]

_SETTLED = 0.08  # seconds: a block that the cursor only passes over is not asked for


class MemoryPanel(Vertical):
    """Only the view that is shown is kept up to date; the others catch up when they are opened."""

    VIEWS = ("pool", "tables", "tree", "events", "memory", "steps")

    view: reactive[str] = reactive("pool", init=False)

    @dataclass
    class InspectAsked(Message):
        """The reader wants to know more of a block of the device."""

        block: int

    def __init__(self) -> None:
        super().__init__()
        self._pool: Pool | None = None
        self._names: Names = clean_names(lambda owner, index: f"{owner} · {index + 1}")
        self._current: str | None = None
        self._stale: set[str] = set()
        self._chosen: int | None = None
        self._chosen_on_host: TableView | None = None
        self._facts: BlockFacts | None = None
        self._inspect_timer: Timer | None = None
        self._event_log = EventLog()  # which learns names from the start
        self._later: tuple[str, ...] = ("tables", "tree", "events", "memory", "steps")  # views that are empty yet

    def compose(self) -> ComposeResult:
        yield ViewTabs()
        with Container(id="view-pool", classes="view"):
            with Vertical(id="pool", classes="box"):
                yield Drawn(self._pool_facts, id="pool-facts")
                yield PoolMap()
                yield Drawn(self._pool_legend, id="pool-legend")
            with Vertical(id="table", classes="box"):
                yield Drawn(self._table_facts, id="table-facts")
                yield Drawn(lambda width, height: Content(HEADING), id="table-heading")
                yield BlockTableView()
            with Vertical(id="block", classes="box"):
                yield Drawn(self._block_facts, id="block-facts")
        yield from (Vertical(id=f"view-{view}", classes="view box") for view in self._later)

    async def _make_later_views(self) -> None:
        """Those that the first screen does not show: they would delay it by a tenth."""
        parts: dict[str, list[Widget]] = {
            "tables": [
                Drawn(self._tables_facts, id="tables-facts"),
                BlockTableView(headers=True),
                Drawn(self._block_facts, id="tables-block"),
            ],
            "tree": [Drawn(self._tree_facts, id="tree-facts"), ForkTree()],
            "events": [
                Drawn(self._event_log.headline, id="events-facts"),
                self._event_log,
                Drawn(self._event_log.legend, id="events-legend"),
            ],
            "memory": [MemoryFigures()],
            "steps": [
                Drawn(lambda width, height: steps_summary(self._pool, width), id="steps-facts"),
                Drawn(lambda width, height: Content(f"{STEP_HEADING}▒ host █ device"), id="steps-heading"),
                StepList(),
            ],
        }
        for view in self._later:
            await self.query_one(f"#view-{view}").mount_all(parts[view])
        self._later = ()
        self._catch_up()

    def on_mount(self) -> None:
        titles = {
            "#pool": ("pool", "c: by sequence"),
            "#table": ("block table", ""),
            "#block": ("block", ""),
            "#view-tables": ("block tables", "t: tokens"),
            "#view-tree": ("fork tree", ""),
            "#view-events": ("events", ""),
            "#view-memory": ("memory", ""),
            "#view-steps": ("steps", ""),
        }
        for selector, (title, keys) in titles.items():
            box = self.query_one(selector)
            box.border_title, box.border_subtitle = title, keys
        self._show_view()
        self.call_after_refresh(self._make_later_views)

    # --- what the chat tells it ---------------------------------------------------------------------------------------

    def show_pool(self, pool: Pool | None) -> None:
        """Another pool, or none."""
        self._pool = pool
        self._choose(None)
        self.query_one(PoolMap).show_pool(pool)
        self._event_log.show_pool(pool)
        self._stale = set(self.VIEWS)
        self._catch_up()

    def pool_changed(self, pool: Pool, blocks: Iterable[int], names: Names, current: str | None) -> None:
        """These blocks changed, or the tables. ``current``: whose tables come first, the request of the last answer."""
        self._pool, self._names, self._current = pool, clean_names(names), current
        self._event_log.learn_owners(pool)
        shown = "pool" in self._stale or not self.size.height
        self._stale |= set(self.VIEWS) - {"steps"}
        if self.view == "pool" and not shown:
            # Only the rows that changed, where nothing was missed.
            blocks = list(blocks)
            self.query_one(PoolMap).blocks_changed(blocks)
            self._stale.discard("pool")
            self._refresh_around_map()
            if self._chosen in blocks and self._chosen_on_host is None:
                self._ask()
        else:
            self._catch_up()

    def steps_changed(self, pool: Pool) -> None:
        """The engine made steps."""
        self._pool = pool
        self._stale.add("steps")
        self._catch_up()

    def show_facts(self, facts: BlockFacts, names: Names) -> None:
        """The answer to `InspectAsked`; one that comes too late is not shown."""
        self._names = clean_names(names)
        self._facts = facts
        self._refresh_block()

    # --- which view is shown ------------------------------------------------------------------------------------------

    def validate_view(self, view: str) -> str:
        if view not in self.VIEWS:
            raise ValueError(f"no view {view!r}: one of {', '.join(self.VIEWS)}")
        return view

    def watch_view(self) -> None:
        if self.is_mounted:
            self._choose(None)
            self._show_view()

    def _show_view(self) -> None:
        self.query_one(ViewTabs).current = self.view
        for view in self.VIEWS:
            self.query_one(f"#view-{view}").display = view == self.view
        self._stale.add(self.view)
        self.call_after_refresh(self._catch_up)

    @on(ViewTabs.Picked)
    def _picked(self, message: ViewTabs.Picked) -> None:
        message.stop()
        self.view = message.view

    def on_resize(self) -> None:
        self._catch_up()

    def _catch_up(self) -> None:
        """Bring the view that is shown up to date."""
        if self.view not in self._stale or not self.size.height or not self.is_mounted or self.view in self._later:
            return
        self._stale.discard(self.view)
        pool = self._pool
        if self.view == "pool":
            self.query_one(PoolMap).catch_up()
            self._refresh_around_map()
        elif self.view == "tables":
            tables = self._tables() if pool is not None else []
            self.query_one("#view-tables BlockTableView", BlockTableView).show_tables(pool, tables, self._names)
            self._update("#tables-facts")
        elif self.view == "tree":
            self.query_one(ForkTree).show_tables(pool, self._names)
            self._update("#tree-facts")
        elif self.view == "events":
            self._event_log.take_new(self._names)
            self._refresh_around_log()
        elif self.view == "memory":
            self.query_one(MemoryFigures).show_pool(pool)
        else:
            self.query_one(StepList).show_steps(pool)
            self._update("#steps-facts")

    def _update(self, selector: str) -> None:
        self.query_one(selector, Drawn).update()

    def _refresh_around_map(self) -> None:
        table = self._current_table()
        view = self.query_one("#table BlockTableView", BlockTableView)
        view.show_tables(self._pool, [] if table is None else [table], self._names)
        for part in ("#pool-facts", "#pool-legend", "#table-facts"):
            self._update(part)

    def _current_tables(self) -> list[TableView]:
        return self._pool.tables_of(self._current) if self._pool is not None and self._current is not None else []

    def _current_table(self) -> TableView | None:
        return next(iter(self._current_tables()), None)

    def _tables(self) -> list[TableView]:
        """All tables, those of the current answer first."""
        assert self._pool is not None
        return [
            *self._current_tables(),
            *(table for table in self._pool.tables.values() if table.owner != self._current or self._current is None),
        ]

    # --- one block ----------------------------------------------------------------------------------------------------

    @on(PoolMap.Chosen)
    def _block_chosen(self, message: PoolMap.Chosen) -> None:
        message.stop()
        self._choose(message.block, message.table)

    @on(BlockTableView.TokensAsked)
    def _tokens_asked(self, message: BlockTableView.TokensAsked) -> None:
        message.stop()
        self._choose(message.block, message.table)

    def _choose(self, block: int | None, on_host: TableView | None = None) -> None:
        if (block, on_host) == (self._chosen, self._chosen_on_host):
            return
        self._chosen, self._chosen_on_host = block, on_host
        self.set_class(block is not None, "-block")
        if block is not None and on_host is None:
            self._ask()
        self._refresh_block()

    def _ask(self) -> None:
        if self._inspect_timer is None:
            self._inspect_timer = self.set_timer(_SETTLED, self._post_question)

    def _post_question(self) -> None:
        self._inspect_timer = None
        if self._chosen is not None and self._chosen_on_host is None:
            self.post_message(self.InspectAsked(self._chosen))

    def _refresh_block(self) -> None:
        for facts in self.query("#block-facts, #tables-block").results(Drawn):
            facts.update()

    def _block_facts(self, width: int, height: int) -> Content:
        if self._chosen is None or self._pool is None:
            return Content("")
        if self._chosen_on_host is not None:
            return host_block_facts(self._chosen, self._chosen_on_host, self._names)
        if self._facts is None or self._facts.block != self._chosen:
            return Content(f"block {self._chosen} …")
        return block_facts(self._facts, self._pool, self._names)

    # --- the lines around them ----------------------------------------------------------------------------------------

    @on(PoolMap.Recoloured)
    def _recoloured(self, message: PoolMap.Recoloured) -> None:
        message.stop()
        by_sequence = self.query_one(PoolMap).by_sequence
        self.query_one("#pool").border_subtitle = "c: by state" if by_sequence else "c: by sequence"
        self._update("#pool-legend")

    @on(EventLog.Changed)
    def _log_changed(self, message: EventLog.Changed) -> None:
        message.stop()
        self._refresh_around_log()

    def _refresh_around_log(self) -> None:
        self._update("#events-facts")
        self._update("#events-legend")

    def _pool_facts(self, width: int, height: int) -> Content:
        pool = self._pool
        if pool is None:
            return Content("no model is loaded")
        return Content(
            f"{count(pool.used_blocks)} of {count(pool.num_blocks)} blocks of {plural(pool.block_size, 'slot')}\n"
            f"{size(pool.used_blocks * pool.block_bytes)} of {size(pool.num_blocks * pool.block_bytes)}"
            f" · {plural(pool.wasted_slots, 'slot')} empty\n"
            f"{count(pool.figures.shared_blocks)} shared (×{pool.sharing_ratio:.2f})"
            f" · {count(pool.counts.num_copies)} copied on write"
        )

    def _pool_legend(self, width: int, height: int) -> Content:
        return self.query_one(PoolMap).legend(self._names, width, height)

    def _table_facts(self, width: int, height: int) -> Content:
        tables = self._current_tables()
        if not tables:
            return Content("the conversation holds no block")
        table, more = tables[0], len(tables) - 1
        name = table_name(table, self._names) + (f" (F6: {more} more)" if more else "")
        facts = f"{table.state} · {plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}"
        runs = plural(len(list(contiguous_runs(table.blocks))), "contiguous run")
        where = runs_line(table.blocks, width - len(runs) - 2)
        if "→" in where:
            runs += f": {where}"
        return Content.assemble((name, "bold $foreground"), f"\n{facts}\n{runs}")

    def _tables_facts(self, width: int, height: int) -> Content:
        if self._pool is None:
            return Content("no model is loaded")
        figures = self._pool.figures
        return Content(
            f"{plural(len(self._pool.tables), 'sequence')} · {count(figures.logical_blocks)} logical"
            f" in {plural(self._pool.used_blocks, 'block')}"
        )

    def _tree_facts(self, width: int, height: int) -> Content:
        return Content(tree_summary(self._pool, width) if self._pool is not None else "no model is loaded")
