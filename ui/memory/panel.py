"""The memory panel: six live views of the cache. One of them is visible."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from minillm.service.messages import BlockFacts, CacheChanged, Inspect, MemoryUse, Stepped, TableView
from minillm.text.safe import clean, clean_line
from minillm.ui.bars import ViewTabs
from minillm.ui.drawing import TextCanvas
from minillm.ui.engine_app import EngineCommand
from minillm.ui.memory.figures import MemoryFigures
from minillm.ui.memory.line_view import BlockChosen, LineView
from minillm.ui.memory.logs import STEP_HEADING, EventLog, StepList
from minillm.ui.memory.pool import Memory, Names, Pool, Scores
from minillm.ui.memory.pool_map import PoolMap
from minillm.ui.memory.strands import LEGEND, Strands
from minillm.ui.memory.strip import strip
from minillm.ui.memory.tables import HEADING, BlockTableView
from minillm.ui.numbers import duration, plural

_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥"})
_SETTLED = 0.08  # seconds from the selection of a block to the request for its details


class MemoryView(Vertical):
    """A view of the memory, with a border and title. It has no widgets inside until `fill` is called."""

    def __init__(self, name: str, title: str, parts: Callable[[], list[Widget]], keys: str = "") -> None:
        super().__init__(id=f"view-{name}", classes="view box")
        self.border_title, self.border_subtitle = title, keys
        self._parts = parts

    async def fill(self) -> None:
        """Create the view's widgets. For views that the first screen does not show, this happens later."""
        await self.mount_all(self._parts())

    def reset(self) -> None:
        for lines in self.query(LineView):
            lines.reset()

    def catch_up(self) -> None:
        for lines in self.query(LineView):
            lines.catch_up()
        self.update_facts()

    def on_facts_changed(self) -> None:
        self.update_facts()

    def update_facts(self) -> None:
        for facts in self.query(TextCanvas):
            facts.update()


class PoolView(MemoryView):
    """Shows every block as a map. Next to it are the current block table, and details of the selected block."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("pool", "", list)
        self.remove_class("box")
        self._map, self._table = PoolMap(memory), BlockTableView(memory)
        self._block_facts = _block_facts("block-facts", memory)

    def compose(self) -> ComposeResult:
        facts, legend = TextCanvas(self._map.headline, id="pool-facts"), TextCanvas(self._map.legend, id="pool-legend")
        yield _box("pool", "pool", facts, self._map, legend)
        facts = TextCanvas(self._table.headline, id="table-facts")
        yield _box("table", "table", facts, _line("table-heading", HEADING), self._table)
        yield _box("block", "block", self._block_facts)

    def blocks_changed(self, blocks: Iterable[int]) -> None:
        """Redraw only the rows with these blocks. The other rows have not changed."""
        self._map.blocks_changed(blocks)
        self._table.catch_up()
        self.update_facts()

    def on_facts_changed(self) -> None:
        # This is not done with every change of the pool, because a new subtitle redraws the whole box.
        self.query_one("#pool").border_subtitle = "c: by state" if self._map.by_sequence else "c: by sequence"
        super().on_facts_changed()

    def on_mount(self) -> None:
        self.on_facts_changed()


def _box(name: str, title: str, *parts: Widget) -> Vertical:
    box = Vertical(*parts, id=name, classes="box")
    box.border_title = title
    return box


def _line(name: str, text: str) -> TextCanvas:
    return TextCanvas(lambda width, height: Content(text), id=name)


def _legend(text: str) -> TextCanvas:
    """Return a legend for the bottom of a view."""
    return TextCanvas(lambda width, height: Content(text), classes="legend")


def _block_facts(name: str, memory: Memory) -> TextCanvas:
    return TextCanvas(lambda width, height: block_facts(memory), id=name)


def memory_views(memory: Memory, log: EventLog) -> dict[str, MemoryView]:
    """Return all memory views by name.

    ``log`` shows the cache events. It is created before the other widgets, because it must know the owners of all
    sequences from the start.
    """

    def with_headline(name: str, lines: LineView, *others: Widget) -> list[Widget]:
        return [TextCanvas(lines.headline, id=f"{name}-facts"), *others, lines]

    def tables() -> list[Widget]:
        facts = _block_facts("tables-block", memory)
        words = "×3: three sequences share the block · run: adjacent blocks in the pool"
        return [*with_headline("tables", BlockTableView(memory, headers=True)), facts, _legend(words)]

    def events() -> list[Widget]:
        words = "hit: found in the cache · evict: removed from it · preempt: waits for free blocks"
        return [*with_headline("events", log), TextCanvas(log.legend, id="events-legend"), _legend(words)]

    def strands() -> list[Widget]:
        whole = TextCanvas(lambda width, height: strip(memory, width, height), id="strands-strip")
        return [*with_headline("strands", Strands(memory)), whole, _legend(LEGEND)]

    def steps() -> list[Widget]:
        words = "▒ host: scheduling · █ device: computing · ! preempted · ↓ ↑ swapped out, in"
        return [*with_headline("steps", StepList(memory), _line("steps-heading", STEP_HEADING)), _legend(words)]

    def figures() -> list[Widget]:
        words = "waste: empty slots · cached: free, but reusable by a prompt that begins alike"
        return [MemoryFigures(memory), _legend(words)]

    return {
        "pool": PoolView(memory),
        "tables": MemoryView("tables", "tables", tables, "t: tokens"),
        "strands": MemoryView("strands", "strands", strands),
        "events": MemoryView("events", "events", events),
        "memory": MemoryView("memory", "memory", figures),
        "steps": MemoryView("steps", "steps", steps),
    }


def block_facts(memory: Memory) -> Content:
    """Return a text about the selected block: state, filled slots, age, owners, tokens, place in the prefix cache."""
    block, pool, facts = memory.block, memory.pool, memory.facts
    if block is None or pool is None:
        return Content("")
    if memory.on_host is not None:
        table = memory.on_host
        waits = f"{plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}"
        owner = _fact("owner", f"{memory.table_name(table)} ({table.blocks.index(block)})\n")
        return Content.assemble((f"host block {block}", "bold"), " · swapped\n", owner, _fact("waits", waits))
    if facts is None or facts.block != block:
        return Content(f"block {block} …")
    state, references = pool.state(block).name.lower(), plural(pool.ref_counts[block], "reference")
    lines = [
        Content.assemble((f"block {block}", "bold"), f" · {state} · {references}"),
        _fact("filled", f"{pool.filled[block]} of {plural(pool.block_size, 'slot')}"),
    ]
    if facts.age is not None:
        lines.append(_fact("age", duration(facts.age)))
    if holders := pool.holders(block):
        lines.append(_fact("owners", ", ".join(f"{memory.table_name(table)} ({n})" for table, n in holders)))
    if facts.tokens:
        lines.append(Content.assemble(("tokens  ", "$dim"), token_text(facts.tokens)))
    if facts.node is not None:
        after = f" after {clean_line(facts.before, 40)}" if facts.before else ", the first block"
        lines.append(_fact("hash", f"node {facts.node}{after}"))
    return Content("\n").join(lines)


def token_text(tokens: list[str]) -> Content:
    """Return tokens as text, with a thin line after each token, and symbols for invisible characters."""
    rule = ("│", "$frame")
    return Content.assemble(*(part for token in tokens for part in (clean(token).translate(_VISIBLE), rule)))


def _fact(name: str, text: str) -> Content:
    return Content.assemble((f"{name:<8}", "$dim"), text)


class MemoryPanel(Vertical):
    """The panel with all views. Only the visible view is kept up to date. Another view is updated when it is opened."""

    view: reactive[str] = reactive("strands", init=False)

    @dataclass
    class Dragged(Message):
        """The left edge was dragged with the mouse to column ``x`` of the screen."""

        x: int

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory()
        self._log = EventLog(self._memory)
        self._views = memory_views(self._memory, self._log)
        # Views to fill later, because the first screen does not show them. The pool view is filled at once, because its
        # parts need their layout.
        self._empty = [name for name in self._views if name not in ("pool", "strands")]
        self._stale: set[str] = set()
        self._changed: set[int] = set()  # blocks that changed since the views last showed them
        self._inspect_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield ViewTabs()
        yield from self._views.values()

    async def on_mount(self) -> None:
        await self._views["strands"].fill()
        self._show_view()
        self.call_after_refresh(self._fill_views)

    async def _fill_views(self) -> None:
        """Create the widgets of the views that the first screen does not show.

        If this were done earlier, the first screen would appear a tenth later.
        """
        for name in self._empty:
            await self._views[name].fill()
        self._empty = []
        self._catch_up()

    def show_pool(self, pool: Pool | None) -> None:
        """Show another pool, or none if no model is loaded."""
        self._memory.pool = pool
        self._changed.clear()  # they belong to the previous pool, which may have had more blocks
        self._choose(None)
        for view in self._views.values():
            view.reset()
        self._stale = set(self._views)
        self._catch_up()

    def take(self, event: CacheChanged | Stepped | MemoryUse) -> None:
        """Apply an event of the engine to the data. `show_news` then draws the change."""
        pool = self._memory.pool
        if pool is None:
            return
        if isinstance(event, Stepped):
            pool.steps.extend(event.steps)
        elif isinstance(event, MemoryUse):
            pool.use = event
        else:
            self._changed.update(pool.apply(event))

    def show_news(
        self,
        names: Names,
        current: str | None,
        scores: Scores = lambda owner, index: None,
        origin: tuple[str, int] | None = None,
        num_beams: int = 0,
    ) -> None:
        """Show the changes since the last call.

        Args:
            names: returns a sequence's name for display.
            scores: returns the score of a beam, or None for other sequences.
            current: the request of the last answer. Its tables are shown first.
            origin: if another request computed the current answer as a candidate: this request and the candidate's
                index.
            num_beams: number of beams of the current answer after its search has ended, else 0.
        """
        memory, blocks = self._memory, self._changed
        if memory.pool is None:
            return
        memory.names, memory.scores, memory.current, memory.origin = names, scores, current, origin
        memory.num_beams, self._changed = num_beams, set()
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
        """Show the details of a block that the engine sent in answer to `Inspect`.

        Do nothing if another block is selected by now.
        """
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

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.screen_x == self.region.x:
            event.stop()
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self.app.mouse_captured is self:
            self.post_message(self.Dragged(int(event.screen_x)))

    def on_mouse_up(self) -> None:
        self.release_mouse()

    def _catch_up(self) -> None:
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
        for facts in self.query("#block-facts, #tables-block").results(TextCanvas):
            facts.update()
