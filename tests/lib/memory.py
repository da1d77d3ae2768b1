"""The memory panel alone in an app, and a small cache for it to show.

In the cache are a pinned system prompt, two turns, four samples and three beams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from textual.app import App, ComposeResult
from textual.containers import Container, Vertical
from textual.pilot import Pilot

from minillm import ui
from minillm.outputs import StepReport
from minillm.service.messages import BlockFacts, CacheChanged, CacheCounts, Inspect, LogEntry, TableState, TableView
from minillm.ui.engine_app import EngineCommand
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import Pool
from minillm.ui.themes import find_theme, for_terminal

SIZE = 16
HOSTILE = "\x1b[31mred\x9b0m [bold]x[/] \u202e\r\n"


def new_pool(num_blocks: int = 128, num_host_blocks: int = 32) -> Pool:
    return Pool(num_blocks, SIZE, 2_048, num_host_blocks=num_host_blocks, max_model_len=1_024)


def name(owner: str, index: int) -> str:
    """Return the chat's name for a sequence."""
    return owner if owner in ("system prompt", "turn 1") or index < 0 else f"{owner} · {index + 1}"


def table(seq_id: int, owner: str, index: int, state: TableState, num_tokens: int, blocks: list[int]) -> TableView:
    return TableView(seq_id, owner, index, state, num_tokens, blocks)


SAMPLES = [table(3 + i, "turn 2", i, "running", 90 + i, [0, 1, 2, 4, 5, 20 + i]) for i in range(4)]
BEAMS = [
    table(10, "turn 3", 0, "running", 84, [0, 1, 2, 30, 31, 32]),
    table(11, "turn 3", 1, "running", 84, [0, 1, 2, 30, 31, 33]),
    table(12, "turn 3", 2, "running", 84, [0, 1, 2, 30, 34, 35]),
]
TABLES = [
    table(1, "system prompt", 0, "pinned", 48, [0, 1, 2]),
    table(2, "turn 1", 0, "idle", 75, [0, 1, 2, 4, 8]),
    *SAMPLES,
    *BEAMS,
    table(20, "turn 4", 0, "swapped", 40, [3, 4, 6]),
]
LOG = [
    LogEntry(0.5, "allocate", 1, "", [0, 1, 2]),
    LogEntry(1.2, "hit", 2, "", [0, 1, 2], detail=48),
    LogEntry(1.3, "allocate", 2, "turn 1", [4, 8]),
    LogEntry(2.0, "fork", 4, "turn 2", [0, 1, 2, 4, 5, 20], 3),
    LogEntry(2.1, "copy", 4, "turn 2", [20, 21], detail=3),
    LogEntry(3.0, "free", 77, "turn 9", [40, 41]),
    LogEntry(3.5, "evict", -1, "", [50]),
    LogEntry(4.0, "preempt", 20, "turn 4", [60, 61, 62]),
    LogEntry(4.0, "swap_out", 20, "turn 4", [60, 61, 62]),
    LogEntry(4.8, "swap_in", 20, "turn 4", [60, 61, 62]),
]


def picture(tables: list[TableView], log: list[LogEntry] | None = None) -> CacheChanged:
    """Return the event of a whole cache: these tables, and two cached blocks."""
    counts = CacheCounts(
        num_copies=7,
        num_evictions=1,
        num_hit_tokens=480,
        num_looked_up_tokens=800,
        num_preemptions=1,
        num_swapped_out=3,
        num_swapped_in=2,
        host_blocks_used=sum(len(one.blocks) for one in tables if one.state == "swapped"),
    )
    return CacheChanged(tables, cached=[50, 51], counts=counts, log=log or [])


def steps(num_steps: int) -> list[StepReport]:
    """Return the steps of a prefill in two chunks, then decode steps, one of them with a swap."""
    first = StepReport(1, 2, 512, 0, 0, 0, 0, 0.25, 0.2, 100.02)
    rest = [StepReport(n, 0, 0, 8, 0, 0, 0, 0.02, 0.015, 100 + 0.02 * n) for n in range(2, num_steps + 1)]
    rest[1:2] = [StepReport(3, 0, 0, 6, 1, 12, 4, 0.04, 0.01, 100.07)]
    return [first, *rest][:num_steps]


def facts(block: int) -> BlockFacts:
    """Return a block with hostile text among its tokens."""
    return BlockFacts(block, ["The", " quick", "\n", HOSTILE], 17, "16", 3.2)


STYLES = Path(ui.__file__).parent

WIDE, NARROW, HIGH = (120, 40), (80, 24), (120, 50)


class PanelApp(App[None]):
    """The panel alone."""

    AUTO_FOCUS = None
    CSS_PATH = [STYLES / "app.tcss", STYLES / "memory" / "memory.tcss"]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall"), (32, "-high")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return for_terminal(find_theme("dark"), "truecolor").variables

    def compose(self) -> ComposeResult:
        with Container(id="body"):
            yield Vertical(id="chat-pane")
            yield MemoryPanel()

    def on_mount(self) -> None:
        self.register_theme(for_terminal(find_theme("dark"), "truecolor"))
        self.theme = find_theme("dark").name
        self.screen.add_class("-memory")

    def on_engine_command(self, message: EngineCommand) -> None:
        assert isinstance(message.command, Inspect)
        self.asked.append(message.command.block)


@asynccontextmanager
async def panel_of(
    *pictures: CacheChanged, view: str = "pool", size: tuple[int, int] = WIDE, pool: Pool | None = None
) -> AsyncIterator[tuple[Pilot, MemoryPanel, Pool]]:
    """Run a panel that has taken these events, with a pool of 128 blocks unless another is given."""
    app = PanelApp()
    pool = pool or new_pool()
    async with app.run_test(size=size) as pilot:
        panel = app.screen.query_one(MemoryPanel)
        panel.show_pool(pool)
        panel.view = view
        await pilot.pause()
        for event in pictures:
            feed(panel, pool, event)
        await pilot.pause()
        yield pilot, panel, pool


def feed(panel: MemoryPanel, pool: Pool, event: CacheChanged) -> None:
    panel.take(event)
    panel.show_news(name, "turn 2")
