"""Test the six memory views in an app with only their panel: from events to the screen."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from msgspec import structs
from rich.segment import Segment
from textual.pilot import Pilot
from textual.widget import Widget

from lib import memory as script
from lib.memory import HIGH, HOSTILE, NARROW, TABLES, WIDE, feed, name, new_pool, panel_of, picture, table
from lib.ui import seen, until
from minillm.outputs import StepReport
from minillm.progress import size
from minillm.service.messages import CacheChanged, CacheCounts, LogEntry, MemoryUse, Stepped, TableView
from minillm.ui.bars import VIEWS, tab_labels
from minillm.ui.memory import strands
from minillm.ui.memory.figures import memory_lines
from minillm.ui.memory.logs import EventLog, StepList, event_words, split_bar
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import OWNED, Copy, Memory, Pool
from minillm.ui.memory.pool_map import Looks, PoolMap
from minillm.ui.memory.strands import Strands, block_trees, strand_lines, tree_lines
from minillm.ui.memory.strip import strip
from minillm.ui.memory.tables import BlockTableView
from minillm.ui.numbers import spans, sparkline

VIEW_NAMES = [view.name for view in VIEWS]


def feed_steps(panel: MemoryPanel, steps: list[StepReport]) -> None:
    panel.take(Stepped(steps))
    panel.show_news(name, "turn 2")


def focus_view(panel: MemoryPanel) -> None:
    """Give the keys to the view that is shown."""
    next(widget for widget in panel.query_one(f"#view-{panel.view}").query(Widget) if widget.can_focus).focus()


def styled(pilot: Pilot, text: str) -> Segment:
    """The segment on the screen that holds ``text``."""
    lines = pilot.app.screen._compositor.render_strips(pilot.app.size)
    return next(segment for strip in lines for segment in strip if text in segment.text)


async def settle(pilot: Pilot) -> None:
    """Wait longer than the panel does before it asks for a block."""
    await pilot.pause(0.15)
    await pilot.pause()


# --- the panel --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_change_of_the_pool_does_not_draw_the_box_around_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    async with panel_of(picture(TABLES)) as (pilot, panel, pool):
        box, drawn = panel.query_one("#pool"), list[object]()
        monkeypatch.setattr(box, "refresh", lambda *regions, **options: drawn.append(regions))
        feed(panel, pool, CacheChanged([table(99, "turn 9", 0, "running", 32, [120, 121])]))
        await pilot.pause()
        assert not drawn
        focus_view(panel)
        await pilot.press("c")
        await pilot.pause()
        assert drawn, "the subtitle names the other coloring now"


@pytest.mark.anyio
@pytest.mark.parametrize("size", [WIDE, NARROW, (250, 70)])
async def test_every_view_shows_itself_and_names_the_others(size: tuple[int, int]) -> None:
    expected = {
        "pool": ("of 128 blocks", "ppp·54··", "turn 2 · 1"),
        "tables": ("turn 2 · 1", "0 → 0", "×9"),
        "strands": ("├─", "turn 2 · 4", "own"),
        "events": ("turn 4", "swap"),
        "memory": ("used", "shared", "waste", "cached", "free", "paging", "sharing", "60%", "9,216"),
        "steps": ("decoded", "prefilled", "20.0", "▒", "█"),
    }
    async with panel_of(picture(TABLES, log=script.LOG), size=size) as (pilot, panel, _):
        feed_steps(panel, script.steps(12))
        for view, words in expected.items():
            panel.view = view
            await pilot.pause()
            await pilot.pause()
            shown = seen(pilot)
            for word in words:
                assert word in shown, (view, word)
            for key in ("F5", "6", "7", "8", "9", "10"):
                assert key in shown, (view, key)
            assert shown.count("▸") == 1


@pytest.mark.anyio
async def test_an_unknown_view_is_refused() -> None:
    async with panel_of() as (_, panel, _):
        with pytest.raises(ValueError, match="no view 'graph'"):
            panel.view = "graph"


@pytest.mark.anyio
async def test_a_view_catches_up_when_it_is_opened() -> None:
    async with panel_of(view="strands") as (pilot, panel, pool):
        assert "no text is in memory" in seen(pilot)
        panel.view = "tables"
        await pilot.pause()
        feed(panel, pool, picture(TABLES[:2]))
        panel.view = "pool"
        feed(panel, pool, picture(TABLES))
        await pilot.pause()
        assert "ppp·54··" in seen(pilot)
        panel.view = "strands"
        await pilot.pause()
        await pilot.pause()
        assert "turn 3 · 3" in seen(pilot)


@pytest.mark.anyio
async def test_the_tabs_open_views_with_the_mouse() -> None:
    async with panel_of(picture(TABLES)) as (pilot, panel, _):
        line = seen(pilot).splitlines()[panel.region.y]
        await pilot.click(offset=(line.index("strand") + 1, panel.region.y))
        assert panel.view == "strands"


@pytest.mark.parametrize("width", [44, 46, 60, 78, 200])
def test_the_tabs_fit(width: int) -> None:
    labels, gap = tab_labels(width)
    assert len(labels) == 6
    assert sum(len(key) + 1 + len(title) for key, title in labels) + 5 * gap <= width


@pytest.mark.anyio
async def test_without_a_pool_every_view_is_empty_and_calm() -> None:
    async with panel_of(picture(TABLES, log=script.LOG)) as (pilot, panel, _):
        panel.show_pool(None)
        for view in VIEW_NAMES:
            panel.view = view
            await pilot.pause()
            await pilot.pause()
            assert "turn 2" not in seen(pilot), view


# --- pool map ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_every_state_of_a_block_is_a_letter_or_a_shape_of_its_own() -> None:
    tables = [
        table(1, "system prompt", 0, "pinned", 16, [0]),
        table(2, "turn 1", 0, "idle", 32, [1, 2]),
        table(3, "turn 2", 0, "running", 24, [1, 3]),
        table(4, "turn 2", 1, "running", 24, [1, 3]),
        table(5, "turn 4", 0, "swapped", 20, [4, 5]),
        *(table(10 + i, "turn 5", i, "running", 16, [6]) for i in range(11)),
        table(6, "turn 6", 0, "running", 4, [7]),
    ]
    async with panel_of(picture(tables)) as (pilot, _, _):
        shown = seen(pilot)
        # pinned, shared by 3, owned, shared and half full, free, free, shared by many, owned and a quarter full
        assert "p3o▋··+▃" in shown
        assert "cc" in shown
        assert "host 2 of 32 blocks" in shown
        assert "····ww··" in shown
        for word in ("free", "owned", "shared by 2", "cached", "pinned", "partly filled", "swapped"):
            assert word in shown, word


@pytest.mark.anyio
async def test_colored_by_sequence_a_block_shows_its_sequences_letter() -> None:
    async with panel_of(picture(TABLES)) as (pilot, panel, pool):
        focus_view(panel)
        await pilot.press("c")
        await pilot.pause()
        shown = seen(pilot)
        assert "cdef" in shown
        assert "ghii····" in shown
        assert "b turn 1" in shown
        assert "* several" in shown
        panel.app.set_focus(None)
        await pilot.pause()
        # A block that changes hands looks the same by its state, so no change of it is told.
        moved = [table(2, "turn 1", 0, "idle", 64, [0, 1, 2, 4]), table(40, "turn 5", 0, "running", 16, [8])]
        feed(panel, pool, CacheChanged(moved))
        await pilot.pause()
        assert "***·**·· k·······" in seen(pilot)


@pytest.mark.anyio
async def test_the_cursor_asks_for_a_block_and_shows_its_facts() -> None:
    async with panel_of(picture(TABLES)) as (pilot, panel, pool):
        panel.query_one(PoolMap).focus()
        await pilot.press("right", "right", "right", "right")
        await settle(pilot)
        asked = pilot.app.asked  # type: ignore[attr-defined]
        assert asked[-1] == 4
        assert len(asked) < 5, "a block that is only passed over is not asked for"
        panel.show_facts(script.facts(4))
        await pilot.pause()
        shown = seen(pilot)
        for fact in (
            "block 4",
            "5 references",
            "16 of 16 slots",
            "turn 1 (3)",
            "turn 2 · 1",
            "node 17",
            "after 16",
            "3.2 s",
            "quick",
        ):
            assert fact in shown, fact
        before = len(asked)
        feed(panel, pool, CacheChanged(gone=[2]))
        await settle(pilot)
        assert asked[before:] == [4], "what has changed is asked for again"
        await pilot.press("home")
        await settle(pilot)
        panel.show_facts(script.facts(4))
        await pilot.pause()
        assert "references" not in seen(pilot), "an answer that comes too late"
        pilot.app.set_focus(None)
        await pilot.pause()
        assert "turn 2 · 1 (F6: 3 more)" in seen(pilot)


@pytest.mark.anyio
async def test_the_mouse_tells_blocks_of_the_device_and_of_the_host() -> None:
    async with panel_of(picture(TABLES)) as (pilot, _, _):
        lines = seen(pilot).splitlines()
        row = next(number for number, line in enumerate(lines) if "ppp·54··" in line)
        await pilot.hover(offset=(lines[row].index("ppp·54··") + 5, row))
        await settle(pilot)
        assert pilot.app.asked == [5]  # type: ignore[attr-defined]
        assert "block 5 …" in seen(pilot)
        row = next(number for number, line in enumerate(lines) if "···ww·w·" in line)
        await pilot.hover(offset=(lines[row].index("ww") + 1, row))
        await settle(pilot)
        assert "host block 4" in seen(pilot)
        assert "40 tokens in 3 blocks" in seen(pilot)
        assert pilot.app.asked == [5]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_tokens_and_names_of_strangers_are_shown_and_not_obeyed() -> None:
    rude = [table(2, HOSTILE, 0, "idle", 75, [0, 1, 2]), table(3, HOSTILE, 1, "running", 20, [0, 4])]
    log = [LogEntry(1.0, "copy\x1b[1m", 2, HOSTILE, [0]), LogEntry(1.0, "fork", 99, HOSTILE, [0], parent_id=2)]
    async with panel_of(picture(rude, log=log)) as (pilot, panel, _):
        panel.show_news(lambda owner, index: owner, HOSTILE)
        panel.query_one(PoolMap).focus()
        await pilot.press("right")
        await settle(pilot)
        panel.show_facts(script.facts(1))
        for view in VIEW_NAMES:
            if view != "pool":
                panel.view = view
            await pilot.pause()
            await pilot.pause()
            shown = seen(pilot)
            assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(shown), view
            if view in ("pool", "tables", "strands"):
                assert "␛[31mred‹9B›0m" in shown, view
            if view == "pool":
                assert "[bold]x[/]" in shown
                assert "↵" in shown


@pytest.mark.anyio
async def test_twenty_thousand_blocks_are_drawn_by_the_line() -> None:
    pool = Pool(20_000, 16, 1_024)
    async with panel_of(size=(200, 50), pool=pool) as (pilot, panel, _):
        pool_map = panel.query_one(PoolMap)
        assert pool_map.virtual_size.height == 1, "625 rows, all of them free"
        assert "625 rows of free blocks" in seen(pilot)
        pool_map.focus()
        await pilot.pause()
        assert pool_map.virtual_size.height == 625, "the keyboard reaches every block"
        pilot.app.set_focus(None)
        await pilot.pause()
        assert len(list(pool_map.walk_children())) == 0
        drawn: list[int] = []
        line = pool_map.line
        pool_map.line = lambda row, width: drawn.append(row) or line(row, width)  # type: ignore[func-returns-value, method-assign]
        feed(panel, pool, CacheChanged([table(1, "turn 1", 0, "running", 16, [33])]))
        feed(panel, pool, CacheChanged([table(2, "turn 2", 0, "running", 16, [19_999])]))
        await pilot.pause()
        cells = [line for line in seen(pilot).splitlines() if "········" in line or "of free blocks" in line]
        heads = [line.partition("│")[2].split()[0] for line in cells]
        assert heads == ["0", "32", "⋮", "19968"], "the rows that hold something, and a line for those between them"
        drawn.clear()
        feed(panel, pool, CacheChanged([table(1, "turn 1", 0, "running", 32, [33, 34])]))
        await pilot.pause()
        assert {row for row in drawn if drawn.count(row) == 1} == {1}, "only the row that changed"


# --- block tables -----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_tables_show_runs_fill_and_sharers() -> None:
    async with panel_of(picture(TABLES), view="tables", size=(160, 70)) as (pilot, _, _):
        pilot.app.screen.add_class("-expanded")
        pilot.app.screen.query_one("#chat-pane").display = False
        await pilot.pause()
        await pilot.pause()
        lines = [line.strip("│ ") for line in seen(pilot).splitlines()]
        start = next(i for i, line in enumerate(lines) if line.startswith("turn 2 · 1"))
        assert "running · 90 tokens · 6 blocks · 3 runs" in lines[start]
        brackets = [line[1:].lstrip()[0] for line in seen(pilot).splitlines() if "→" in line][:6]
        assert brackets == ["┌", "│", "└", "┌", "└", "╶"]
        rows = [line.split() for line in lines[start + 1 : start + 7]]
        assert rows[5][1:] == ["5", "→", "20", "▰▰▱▱", "10/16", "×1"]
        assert "×9 turn 2 · 2 +2, system prompt, turn 1, turn 3 · 1 +2" in lines[start + 1]
        assert "×4 turn 2 · 2 +2" in lines[start + 5]
        swapped = next(i for i, line in enumerate(lines) if line.startswith("turn 4 · 1"))
        assert "swapped" in lines[swapped]
        assert "on the CPU" in lines[swapped + 1]
        assert start < next(i for i, line in enumerate(lines) if line.startswith("system prompt")), "the current first"


@pytest.mark.anyio
async def test_blocks_from_disk_are_marked_until_they_have_other_content() -> None:
    [first] = TABLES[:1]
    event = structs.replace(picture([first]), loaded=first.blocks[:2])
    for view in ("tables", "strands"):
        async with panel_of(event, view=view, size=(160, 70)) as (pilot, panel, pool):
            await until(pilot, lambda: seen(pilot).count(" disk") == 2)
            feed(panel, pool, CacheChanged(unloaded=first.blocks[:1]))
            await until(pilot, lambda: seen(pilot).count(" disk") == 1)


@pytest.mark.parametrize("width", [42, 78])
def test_the_figures_show_the_disk_only_if_there_is_one(width: int) -> None:
    pool = new_pool()
    assert "disk" not in "\n".join(figures_text(pool, width, 40))
    counts = CacheCounts(disk_limit=2 * 10**9, disk_bytes=3 << 20, num_disk_read=8, disk_read_seconds=0.5)
    pool.apply(CacheChanged(counts=counts))
    lines = figures_text(pool, width, 40)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "disk 3.0 MiB of 1.9 GiB" in text
    assert f"from disk 8 blocks at {size(16 * pool.block_bytes)}/s" in text


@pytest.mark.anyio
async def test_the_tokens_of_the_cursors_block_on_demand() -> None:
    async with panel_of(picture(TABLES), view="tables") as (pilot, panel, _):
        focus_view(panel)
        asked = pilot.app.asked  # type: ignore[attr-defined]
        await pilot.press("down", "down")
        await settle(pilot)
        assert asked == []
        await pilot.press("t")
        await settle(pilot)
        assert asked == [1]
        panel.show_facts(script.facts(1))
        await pilot.pause()
        assert "The│ quick│↵│" in seen(pilot)
        await pilot.press("right", "down")
        await settle(pilot)
        assert asked[-1] == 0
        view = panel.query_one("#view-tables BlockTableView", BlockTableView)
        assert view._cursor == (4, 1), "the next sequence's first block"
        await pilot.press("t")
        await pilot.pause()
        assert "block 0" not in seen(pilot)


# --- fork tree --------------------------------------------------------------------------------------------------------


def drawn(tables: list[TableView]) -> list[str]:
    lines = []
    for line in tree_lines(block_trees(tables)):
        blocks = line.node.blocks if line.node is not None else []
        who = f"x{line.node.num_tables}" if line.table is None and line.node else f"{line.table.seq_id}"  # type: ignore[union-attr]
        lines.append(f"{line.rails}{who} {blocks}")
    return lines


def test_a_tree_of_a_prompt_four_samples_and_three_beams() -> None:
    assert drawn(TABLES) == [
        "x9 [0, 1, 2]",
        "├─ 1 []",
        "├─ x5 [4]",
        "│  ├─ 2 [8]",
        "│  └─ x4 [5]",
        "│     ├─ 3 [20]",
        "│     ├─ 4 [21]",
        "│     ├─ 5 [22]",
        "│     └─ 6 [23]",
        "└─ x3 [30]",
        "   ├─ x2 [31]",
        "   │  ├─ 10 [32]",
        "   │  └─ 11 [33]",
        "   └─ 12 [34, 35]",
        "20 [3, 4, 6]",
    ]


def test_forks_that_have_not_been_written_to_end_at_the_same_node() -> None:
    forks = [table(i, "a", i, "running", 20, [7, 9]) for i in range(3)]
    assert drawn(forks) == ["x3 [7, 9]", "├─ 0 []", "├─ 1 []", "└─ 2 []"]


def test_trees_come_in_the_order_of_their_tables_and_every_block_stands_once() -> None:
    changes = [
        table(1, "a", 0, "idle", 16, [50]),
        table(2, "b", 0, "idle", 16, [3]),
        table(3, "c", 0, "swapped", 16, [3]),
        table(4, "d", 0, "idle", 32, [50, 51]),
        table(5, "e", 0, "idle", 0, []),
    ]
    assert drawn(changes) == ["x2 [50]", "├─ 1 []", "└─ 4 [51]", "2 [3]", "3 [3]"]


def test_a_deep_tree_needs_no_deep_stack() -> None:
    changes = [table(i, "a", i, "idle", 16 * (i + 1), list(range(i + 1))) for i in range(2_000)]
    assert len(drawn(changes)) == 3_999


@pytest.mark.anyio
async def test_the_tree_tells_what_is_shared_and_what_is_private() -> None:
    async with panel_of(picture(TABLES), view="strands", size=HIGH) as (pilot, _, _):
        shown = seen(pilot)
        for words in (
            "┏ 3 blocks ×9",
            "├─ system prompt pinned  0 own",
            "│     └─ turn 2 · 4 running  1 own",
            "└─ turn 3 · 3 running  2 own",
            "turn 4 · 1 swapped  3 on the CPU",
            "9 texts in the memory of 2.9 · 68% saved",
            "16 blocks, 50 without sharing",
        ):
            assert words in shown, words


@pytest.mark.anyio
async def test_strands_show_the_first_words_of_each_block_once() -> None:
    event = picture(TABLES)
    event.words = {0: "You are a cat", 1: script.HOSTILE, 4: "Say why", 20: "A black cat", 21: "The cat of a bl\ufffd"}
    async with panel_of(event, view="strands", size=HIGH) as (pilot, _, _):
        lines = seen(pilot).splitlines()
        shown = "\n".join(lines)
        assert shown.count("You are a cat") == 1, "nine sequences share it"
        assert "\x1b" not in shown
        assert any("│ A black cat" in line and "▰" in line for line in lines), "a part of it is filled"
        assert "The cat of a bl" in shown
        assert "\ufffd" not in shown


@pytest.mark.anyio
async def test_a_copy_on_write_a_hit_and_a_sequence_that_goes_are_seen_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = picture(TABLES[:4], log=[LogEntry(1.2, "hit", 2, "", [0, 1, 2], detail=48)])
    before.words = {20: "The first words", 21: "and the last"}
    async with panel_of(before, view="strands") as (pilot, panel, pool):
        assert "48 of 75 tokens were cached" in seen(pilot)
        copied = table(4, "turn 2", 1, "running", 91, [0, 1, 2, 4, 5, 60])
        feed(
            panel, pool, CacheChanged([copied], gone=[3], log=[LogEntry(2.1, "copy", 4, "turn 2", [21, 60], detail=3)])
        )
        await pilot.pause()
        await pilot.pause()
        assert "❐ 21→60" in seen(pilot)
        assert "✕ turn 2 · 1  2.0 KiB freed" in seen(pilot)
        assert "╎ The first words" in seen(pilot)
        monkeypatch.setattr(strands, "_WORDS", 0.0)
        panel.query_one(Strands)._fade()
        await pilot.pause()
        assert "╎" not in seen(pilot), "the words are blank"
        pool.copies[60] = Copy(21, -100.0)
        pool.ended[0] = replace(pool.ended[0], moment=-100.0)
        panel.query_one(Strands)._fade()
        await pilot.pause()
        assert "❐ 21→60" in seen(pilot), "as long as its block lives"
        assert "freed" not in seen(pilot)
        feed(panel, pool, CacheChanged(gone=[4]))
        await pilot.pause()
        await pilot.pause()
        assert "21→60" not in seen(pilot)


@pytest.mark.anyio
async def test_what_is_shown_for_a_moment_is_shown_so_long_from_when_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with panel_of(picture(TABLES[:4]), view="strands") as (pilot, panel, pool):
        copied = table(4, "turn 2", 1, "running", 91, [0, 1, 2, 4, 5, 60])
        pool.apply(CacheChanged([copied], log=[LogEntry(2.1, "copy", 4, "turn 2", [21, 60], detail=3)]))
        late = time.monotonic() + strands._LATE - 0.5  # beside a model on the same cores it is drawn so late
        monkeypatch.setattr(strands, "monotonic", lambda: late)
        panel.show_news(name, "turn 2")
        await pilot.pause()
        await pilot.pause()
        panel.refresh()
        await pilot.pause()
        bright = styled(pilot, "❐ 21→60").style
        monkeypatch.setattr(strands, "monotonic", lambda: late + strands._TORN)
        panel.query_one(Strands)._fade()
        await pilot.pause()
        dim = styled(pilot, "❐ 21→60").style
        assert bright is not None
        assert dim is not None
        assert bright.bgcolor != dim.bgcolor, "it stands out for a moment"


@pytest.mark.anyio
async def test_a_sequence_that_goes_on_in_another_table_has_not_gone() -> None:
    async with panel_of(picture(TABLES[:4]), view="strands") as (pilot, panel, pool):
        feed(panel, pool, CacheChanged([table(9, "turn 2", 0, "idle", 80, [0, 1, 2, 4, 5, 20])], gone=[3]))
        await pilot.pause()
        assert "freed" not in seen(pilot)
        assert not pool.ended
        lines = [line for line in seen(pilot).splitlines() if "turn 2 ·" in line]
        assert ["turn 2 · 1" in line for line in lines] == [True, False], "in the order of the answers"


@pytest.mark.anyio
async def test_a_sequence_that_goes_is_called_as_before_also_where_it_has_another_name_by_then() -> None:
    async with panel_of(picture(TABLES[:4]), view="strands") as (pilot, panel, _):
        panel.take(CacheChanged([], gone=[4]))
        panel.show_news(lambda owner, index: f"{owner}b", "turn 2")
        await pilot.pause()
        await pilot.pause()
        assert "✕ turn 2 · 2  " in seen(pilot)
        assert "turn 2b" in seen(pilot)


def test_blocks_that_come_back_are_counted_once() -> None:
    pool = new_pool()
    pool.apply(CacheChanged([table(1, "a", 0, "idle", 32, [1, 2]), table(2, "a", 1, "idle", 48, [1, 2, 3])]))
    pool.apply(CacheChanged([], gone=[1, 2]))
    assert [len(ended.words) for ended in pool.ended] == [2, 1]


@pytest.mark.anyio
async def test_the_strands_go_to_the_branch_that_is_shown() -> None:
    branches = [table(n, f"turn {n}", 0, "idle", 160, list(range(10 * n, 10 * n + 10))) for n in range(1, 11)]
    async with panel_of(picture(branches), view="strands") as (pilot, panel, _):
        for number in (9, 1, 5):
            panel.show_news(name, f"turn {number}")
            await pilot.pause()
            await pilot.pause()
            [marked] = [line for line in seen(pilot).splitlines() if "▸ turn" in line]
            assert f"▸ {name(f'turn {number}', 0)}" in marked
        strands = panel.query_one(Strands)
        strands.scroll_to(y=0, animate=False, force=True)
        another = table(11, "turn 11", 0, "idle", 16, [120])
        panel.take(CacheChanged([another]))
        panel.show_news(name, "turn 5")
        await pilot.pause()
        assert strands.scroll_offset.y == 0, "the reader has gone elsewhere"


@pytest.mark.anyio
async def test_beams_have_their_scores_at_the_tips_and_are_gone_in_one_line() -> None:
    async with panel_of(picture(TABLES[:4]), view="strands") as (pilot, panel, _):
        panel.take(CacheChanged([table(9, "turn 2", 3, "running", 91, [0, 1, 2, 4, 5, 60])], gone=[4]))
        panel.take(CacheChanged([], gone=[9]))
        panel.show_news(name, "turn 2", lambda owner, index: -0.25 - index if owner == "turn 2" else None)
        await pilot.pause()
        await pilot.pause()
        assert "turn 2 · 1  -0.250" in seen(pilot)
        assert "✕ beams of turn 2  4.0 KiB freed" in seen(pilot)
        assert seen(pilot).count("✕") == 1, "two beams"


@pytest.mark.anyio
@pytest.mark.parametrize("size", [WIDE, NARROW])
async def test_where_no_block_is_held_the_strands_say_what_they_are(size: tuple[int, int]) -> None:
    async with panel_of(view="strands", size=size) as (pilot, panel, pool):
        assert "/tour shows it in a minute." in seen(pilot)
        await pilot.resize_terminal(size[0] + 40, size[1])
        await pilot.pause()
        assert "its first words" in seen(pilot) or "an answer that is gone" in seen(pilot)
        feed(panel, pool, picture(TABLES[:2]))
        await pilot.pause()
        await pilot.pause()
        assert "/tour" not in seen(pilot)


def test_the_strip_fills_its_cells_and_colors_them_by_the_most_shared_block() -> None:
    pool = new_pool()  # of 128 blocks
    pool.apply(
        CacheChanged(
            [table(1, "a", 0, "running", 48, [0, 1, 2]), table(2, "a", 1, "running", 64, [0, 1, 8, 9])], cached=[127]
        )
    )
    drawn = strip(Memory(pool), 16, 2)
    cells, words = drawn.plain.splitlines()
    assert cells == "⣄⣀·············⡀"
    assert words == "all 128 blocks, 8 to a cell · F5 map"
    colors = {drawn.plain[span.start : span.end]: span.style for span in drawn.spans}
    assert colors["⣄"] == "$secondary"
    one_each = strip(Memory(pool), 64, 3).plain.splitlines()
    assert [len(line) for line in one_each[:2]] == [64, 64]
    assert one_each[0].startswith("⣿⣿⣿·····⣿⣿·")
    assert one_each[2] == "all 128 blocks · F5 map"
    assert strip(Memory(), 64, 3).plain == ""
    many = Pool(20_000, 16, 1024)
    assert len(strip(Memory(many), 42, 3).plain.splitlines()) == 3


def test_a_candidate_has_one_color_in_the_strip_and_in_the_map() -> None:
    pool = new_pool()
    pool.apply(CacheChanged([table(9, "x", 0, "idle", 16, [30])]))
    pool.apply(CacheChanged([table(n, "a", n, "running", 16, [n]) for n in range(3)]))
    looks = Looks(pool)
    looks.find_all(by_sequence=True)
    cells = looks.cells(0, 3, on_host=False, by_sequence=True)
    assert [kind for _, kind in cells] == ["sequence-0", "sequence-1", "sequence-2"]
    assert len({mark for mark, _ in cells}) == 3
    assert [pool.looks[n] - OWNED for n in range(3)] == [0, 1, 2]


def test_of_many_blocks_the_first_and_the_last_are_drawn() -> None:
    [line] = tree_lines(block_trees([table(1, "a", 0, "idle", 16 * 100, list(range(100)))]))
    assert [each.place for each in strand_lines([line])] == [-2, 0, 1, -1, 96, 97, 98, 99]
    [line] = tree_lines(block_trees([table(1, "a", 0, "idle", 16 * 7, list(range(7)))]))
    assert [each.place for each in strand_lines([line])] == [-2, *range(7)]


# --- event log --------------------------------------------------------------------------------------------------------


def test_events_in_words() -> None:
    who = {4: "turn 2 · 2", 3: "turn 2 · 1"}
    told = [event_words(entry, lambda seq_id, owner: who.get(seq_id, owner or "?")) for entry in script.LOG]
    assert told[1] == "saved 48 tokens (blocks 0–2) for ?"
    assert told[3] == "turn 2 · 2 shares 6 blocks with turn 2 · 1: 0–2, 4–5, 20"
    assert told[4] == "20 → 21  turn 2 · 2 writes to a block that 3 others hold"
    assert told[6] == "a cached block is evicted: 50"
    assert "is preempted" in told[7]
    assert "to" not in told[9].split()
    assert event_words(LogEntry(0.0, "load", 9, "", [4, 5]), lambda *_: "?") == "2 blocks read from disk: 4–5"
    short = event_words(script.LOG[4], lambda seq_id, owner: who.get(seq_id, ""), short=True)
    assert short == "20→21 turn 2 · 2, 3 share"


def allocations(start: int, number: int) -> CacheChanged:
    log = [LogEntry(float(i), "allocate", 2, "turn 1", [i]) for i in range(start, start + number)]
    return CacheChanged(log=log)


@pytest.mark.anyio
async def test_the_log_follows_the_newest_event_unless_scrolled() -> None:
    async with panel_of(picture(TABLES), view="events") as (pilot, panel, pool):
        feed(panel, pool, allocations(0, 500))
        await pilot.pause()
        assert "turn 1 +499" in seen(pilot)
        log = panel.query_one(EventLog)
        log.scroll_to(y=100, animate=False)
        await pilot.pause()
        feed(panel, pool, allocations(500, 20))
        await pilot.pause()
        assert log.scroll_offset.y == 100
        assert "turn 1 +519" not in seen(pilot)
        log.scroll_to(y=log.max_scroll_y, animate=False)
        feed(panel, pool, allocations(520, 20))
        await pilot.pause()
        assert "turn 1 +539" in seen(pilot)


@pytest.mark.anyio
async def test_the_log_can_be_held_still() -> None:
    async with panel_of(picture(TABLES), allocations(0, 5), view="events") as (pilot, panel, pool):
        focus_view(panel)
        await pilot.press("space")
        feed(panel, pool, allocations(5, 7))
        await pilot.pause()
        assert "paused · 7 new" in seen(pilot)
        assert "turn 1 +11" not in seen(pilot)
        await pilot.press("x")
        assert "turn 1 +11" not in seen(pilot), "a filter does not let go"
        await pilot.press("space")
        await pilot.pause()
        assert "turn 1 +11" in seen(pilot)
        assert "paused" not in seen(pilot)


@pytest.mark.anyio
async def test_the_log_is_filtered_by_kind() -> None:
    async with panel_of(picture(TABLES, log=script.LOG), view="events") as (pilot, panel, pool):
        focus_view(panel)
        await pilot.press("a", "s")
        await pilot.pause()
        shown = seen(pilot)
        assert "alloc  " not in shown
        assert "swap in" not in shown
        assert "20→21 turn 2 · 2" in shown
        assert "6 match" in shown
        assert "○a allocate" in shown
        assert "●f fork" in shown
        feed(panel, pool, allocations(0, 3))
        await pilot.pause()
        assert "6 match" in seen(pilot)
        await pilot.press("/")
        await pilot.pause()
        assert "turn 1 +2" in seen(pilot)
        assert "swap in" in seen(pilot)


@pytest.mark.anyio
async def test_an_event_keeps_the_name_of_a_sequence_that_is_gone() -> None:
    async with panel_of(picture(TABLES), view="pool") as (pilot, panel, pool):
        gone = [LogEntry(9.0, "free", 5, "", [22])]
        feed(panel, pool, CacheChanged(gone=[5], log=gone))
        panel.view = "events"
        await pilot.pause()
        await pilot.pause()
        assert "turn 2 · 3 −22" in seen(pilot)


@pytest.mark.anyio
async def test_the_log_keeps_ten_thousand_lines() -> None:
    async with panel_of(view="events") as (pilot, panel, pool):
        for start in range(0, 24_000, 400):
            feed(panel, pool, allocations(start, 400))
        await pilot.pause()
        log = panel.query_one(EventLog)
        assert 10_000 <= log.virtual_size.height <= 11_000
        assert "23999" in seen(pilot)
        assert "14,000 not kept" in seen(pilot)


# --- memory and steps -------------------------------------------------------------------------------------------------


def figures_text(pool: Pool, width: int, height: int) -> list[str]:
    return ["".join(text for text, _ in parts) for parts in memory_lines(pool, width, height)]


@pytest.mark.parametrize(("width", "height"), [(42, 35), (78, 8), (240, 60)])
def test_memory_figures_are_token_true_and_fit(width: int, height: int) -> None:
    pool = new_pool()
    pool.apply(picture(TABLES))
    lines = figures_text(pool, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    text = "\n".join(lines)
    # 16 blocks of 16 slots hold 197 tokens; 7 of them are shared; 2 are cached; 50 entries in 9 tables.
    for figure in ("197", "112", "59", "32", "1,760", "256", "800", "9,216", "480 of 800"):
        assert figure in text, figure
    assert pool.num_blocks * pool.block_size == 197 + 59 + 32 + 1_760


@pytest.mark.parametrize("width", [42, 78])
def test_the_gauge_shows_the_model_the_cache_and_other_programs(width: int) -> None:
    pool = new_pool()
    pool.use = MemoryUse(24 << 30, 12 << 30, 5 << 30, 4 << 30, 1 << 30)
    lines = figures_text(pool, width, 40)
    assert max(map(len, lines)) <= width
    assert len(lines[0]) == width
    assert abs(lines[0].count("░") - width / 12) <= 1, "others: 2 of 24 GiB"
    text = " ".join(lines[1:5])
    for words in ("device 24.0 GiB", "weights 5.0", "cache 4.0", "steps 1.0", "others 2.0", "free 12.0"):
        assert words in text, words


def test_the_chart_shows_every_kind_that_is_there() -> None:
    pool = new_pool()
    for end in range(1, len(TABLES) + 1):
        pool.apply(picture(TABLES[:end]))
    chart = figures_text(pool, 42, 35)[-12:]
    assert {"o", "s", "~", "c", "·"} == {line[-1] for line in chart}
    assert chart[-1].endswith("o" * len(TABLES))


def test_the_chart_of_a_pool_that_is_hardly_filled_is_true_to_scale() -> None:
    pool = Pool(2048, 16, 4096)
    pool.apply(CacheChanged([table(1, "turn 1", 0, "idle", 111, [0, 4, 8, 12, 16, 20, 24])]))  # one slot is left
    lines = figures_text(pool, 42, 40)
    chart = [line[-1:] for line in lines[lines.index("showing 16 of 2,048 blocks") + 1 :]]
    assert (chart.count("~"), abs(chart.count("o") / len(chart) - 7 / 16) < 0.1) == (0, True)
    pool.apply(CacheChanged([table(1, "turn 1", 0, "idle", 1, [0])], gone=[1]))
    assert figures_text(pool, 42, 40)[-1].endswith(("o", "~")), "what is used is seen, however little it is"


def test_the_curves_of_the_kinds_have_one_scale() -> None:
    """A slot that is wasted is not drawn as high as a hundred that are used."""
    pool = Pool(2048, 16, 4096)
    pool.apply(CacheChanged([table(1, "turn 1", 0, "idle", 111, [0, 4, 8, 12, 16, 20, 24])]))
    lines = [line for line in figures_text(pool, 42, 40) if line.split()[-1:] != ["bytes"]]
    newest = {line.split()[0]: line[8:22][-1] for line in lines[:5]}
    assert newest == {"used": "▁", "shared": " ", "waste": "▁", "cached": " ", "free": "█"}
    pool.apply(CacheChanged(gone=[1], cached=list(range(1_024))))
    lines = figures_text(pool, 42, 40)
    newest = {line.split()[0]: line[8:22][-1] for line in lines[1:6]}
    assert newest["cached"] == newest["free"] == "▅", "each is half of the pool"


@pytest.mark.anyio
async def test_steps_show_what_they_did_and_where_their_time_went() -> None:
    async with panel_of(view="steps") as (pilot, panel, _):
        feed_steps(panel, script.steps(8))
        await pilot.pause()
        shown = seen(pilot)
        for words in ("512/2", "250.0", "!1 ↓12 ↑4", "▒ host", "█ device: computing", "tok/s decoded"):
            assert words in shown, words
        feed_steps(panel, script.steps(200)[8:])
        await pilot.pause()
        assert "200" in seen(pilot), "follows the newest"
        assert panel.query_one(StepList).virtual_size.height == 200


def test_the_bar_of_a_step_splits_its_time() -> None:
    step = script.steps(2)[1]
    assert split_bar(step, 8, step.seconds) == ("▒▒", "██████")
    assert split_bar(step, 8, 2 * step.seconds) == ("▒", "███"), "half as long as the longest one"
    assert split_bar(step, 8, 1_000 * step.seconds) == ("", "█"), "never nothing"
    assert split_bar(replace(step, seconds=0.0), 8, 1.0) == ("", "")


def test_small_charts_and_spans() -> None:
    assert sparkline([0, 1, 8, 4], 6, 8) == "   ▂█▅"
    assert spans([3, 4, 5, 9, 11, 12]) == "3–5, 9, 11–12"
    assert spans([3, 5, 7, 9], 2) == "3, 5, …"
