"""The live panel: six views of the cache's memory, of which one is shown."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import reactive
from textual.timer import Timer

from minillm.service.messages import BlockFacts, CacheChanged, Inspect, Stepped, TableView
from minillm.ui.bars import ViewTabs
from minillm.ui.drawing import Drawn
from minillm.ui.memory.event_log import EventLog
from minillm.ui.memory.line_view import BlockChosen
from minillm.ui.memory.pool import Memory, Names, Pool
from minillm.ui.memory.views import PoolView, memory_views
from minillm.ui.messages import EngineCommand

_SETTLED = 0.08  # seconds: a block that the cursor only passes over is not asked for


class MemoryPanel(Vertical):
    """Only the view that is shown is kept up to date; the others catch up when they are opened."""

    view: reactive[str] = reactive("pool", init=False)

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory()
        self._log = EventLog(self._memory)
        self._views = memory_views(self._memory, self._log)
        self._empty = [name for name in self._views if name != "pool"]  # views that the first screen does not show
        self._stale: set[str] = set()
        self._changed: set[int] = set()  # blocks that look other than they are drawn
        self._inspect_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield ViewTabs()
        yield from self._views.values()

    def on_mount(self) -> None:
        self._show_view()
        self.call_after_refresh(self._fill_views)

    async def _fill_views(self) -> None:
        """Fill the views that the first screen does not show: they would delay it by a tenth."""
        for name in self._empty:
            await self._views[name].fill()
        self._empty = []
        self._catch_up()

    def show_pool(self, pool: Pool | None) -> None:
        """Another pool, or none."""
        self._memory.pool = pool
        self._changed.clear()  # blocks of the pool before, which may be more
        self._choose(None)
        for view in self._views.values():
            view.begin_anew()
        self._stale = set(self._views)
        self._catch_up()

    def take(self, event: CacheChanged | Stepped) -> None:
        """Take an event of the engine over; `show_news` shows it."""
        pool = self._memory.pool
        if pool is None:
            return
        if isinstance(event, Stepped):
            pool.steps.extend(event.steps)
        else:
            self._changed.update(pool.apply(event))

    def show_news(self, names: Names, current: str | None) -> None:
        """Show the changes since the last time. ``current``: the request whose tables come first."""
        memory, blocks = self._memory, self._changed
        if memory.pool is None:
            return
        memory.names, memory.current, self._changed = names, current, set()
        self._log.learn_owners()
        view, missed = self._views[self.view], self.view in self._stale or not self.size.height
        self._stale = set(self._views)
        if isinstance(view, PoolView) and not missed:
            self._stale.discard(self.view)
            view.blocks_changed(blocks)
            if memory.block in blocks and memory.on_host is None:
                self._ask()
        else:
            self._catch_up()

    def show_facts(self, facts: BlockFacts) -> None:
        """The answer to `Inspect`; one that comes too late is not shown."""
        self._memory.facts = facts
        self._update_block()

    def validate_view(self, view: str) -> str:
        if view not in self._views:
            raise ValueError(f"no view {view!r}: one of {', '.join(self._views)}")
        return view

    def watch_view(self) -> None:
        if self.is_mounted:
            self._choose(None)
            self._show_view()

    def _show_view(self) -> None:
        self.query_one(ViewTabs).current = self.view
        for name, view in self._views.items():
            view.display = name == self.view
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
        if self.view in self._stale and self.view not in self._empty and self.size.height and self.is_mounted:
            self._stale.discard(self.view)
            self._views[self.view].catch_up()

    def on_block_chosen(self, message: BlockChosen) -> None:
        message.stop()
        self._choose(message.block, message.table)

    def _choose(self, block: int | None, on_host: TableView | None = None) -> None:
        memory = self._memory
        if (block, on_host) == (memory.block, memory.on_host):
            return
        memory.block, memory.on_host = block, on_host
        self.set_class(block is not None, "-block")
        if block is not None and on_host is None:
            self._ask()
        self._update_block()

    def _ask(self) -> None:
        if self._inspect_timer is None:
            self._inspect_timer = self.set_timer(_SETTLED, self._post_question)

    def _post_question(self) -> None:
        self._inspect_timer = None
        if self._memory.block is not None and self._memory.on_host is None:
            self.post_message(EngineCommand(Inspect(self._memory.block)))

    def _update_block(self) -> None:
        for facts in self.query("#block-facts, #tables-block").results(Drawn):
            facts.update()
