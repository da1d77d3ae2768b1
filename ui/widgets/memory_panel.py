"""The live panel beside the chat: the pool, and the conversation's block table."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from minillm.service.messages import TableView
from ui.numbers import count, plural, size
from ui.pool import Pool, contiguous_runs
from ui.widgets.block_table import HEADING, BlockTableView, runs_line
from ui.widgets.pool_map import PoolMap


class MemoryPanel(Vertical):
    """Two parts, one above the other; where there is little room, the table is one line of runs."""

    def compose(self) -> ComposeResult:
        with Vertical(id="pool"):
            yield Static(id="pool-facts")
            yield PoolMap()
            yield Static(_legend(), id="pool-legend")
        with Vertical(id="table"):
            yield Static(id="table-facts")
            yield Static(Content(f"  {HEADING}"), id="table-heading")
            yield BlockTableView()
            yield Static(id="table-runs")

    def on_mount(self) -> None:
        self.query_one("#pool").border_title = "pool"
        self.query_one("#table").border_title = "block table"

    def show_pool(self, pool: Pool | None) -> None:
        """Another pool, or none."""
        self.query_one(PoolMap).show_pool(pool)
        self.refresh_facts(pool, None)

    def pool_changed(self, pool: Pool, blocks: Iterable[int], table: TableView | None) -> None:
        """These blocks changed; ``table`` is the conversation's."""
        self.query_one(PoolMap).blocks_changed(blocks)
        self.refresh_facts(pool, table)

    def refresh_facts(self, pool: Pool | None, table: TableView | None) -> None:
        self.query_one("#pool-facts", Static).update(Content(_pool_facts(pool)))
        self.query_one("#table-facts", Static).update(Content(_table_facts(pool, table)))
        runs = runs_line(table.blocks, max(10, self.size.width - 4)) if table is not None else ""
        self.query_one("#table-runs", Static).update(Content(runs))
        self.query_one(BlockTableView).show_table(pool, table)


def _legend() -> Content:
    return Content.assemble(
        ("·", "$foreground 40%"), " free  ", ("o", "$background on $primary"), " owned  ",
        ("s", "$background on $secondary"), " shared  ", ("▃", "$primary"), " partly filled",
    )  # fmt: skip


def _pool_facts(pool: Pool | None) -> str:
    if pool is None:
        return "no model is loaded"
    return (
        f"{count(pool.used_blocks)} of {count(pool.num_blocks)} blocks of {plural(pool.block_size, 'slot')}\n"
        f"{size(pool.used_blocks * pool.block_bytes)} of {size(pool.num_blocks * pool.block_bytes)}"
        f" · {plural(pool.wasted_slots, 'slot')} empty\n"
        f"{count(pool.shared_blocks)} shared (×{pool.sharing_ratio:.2f}) · {count(pool.num_copies)} copied on write"
    )


def _table_facts(pool: Pool | None, table: TableView | None) -> str:
    if pool is None or table is None:
        return "the conversation holds no block"
    runs = len(contiguous_runs(table.blocks))
    return (
        f"{table.state} · {plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}\n"
        f"{plural(runs, 'contiguous run')}"
    )
