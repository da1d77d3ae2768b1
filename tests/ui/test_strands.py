"""Test the strands: folds, scrolling, and lines about answers without a strand."""

from __future__ import annotations

from functools import partial

import pytest
from textual.pilot import Pilot

from lib.memory import BEAMS, TABLES, feed, name, new_pool, panel_of, picture, table
from lib.ui import ask, chat, say, screen, seen, until
from minillm.service.messages import CacheChanged, CacheCounts, LogEntry
from minillm.ui.bars import KeyBar
from minillm.ui.memory.logs import EventLog
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool import COPIED
from minillm.ui.memory.strands import Strands, with_blanks
from minillm.ui.memory.tree import HEAD, block_trees, few, most_that_fit, root_and_fork, strand_lines, tree_lines

pytestmark = pytest.mark.anyio
TRUNK = list(range(40))


def test_runs_are_folded_as_far_as_space_asks_for_it() -> None:
    lines = tree_lines(block_trees([table(n, "a", n, "idle", 16 * 50, [*TRUNK, *range(50 * n, 50 * n + 10)])
                                    for n in (1, 2)]))  # fmt: skip
    for height in range(3, 70):
        most = most_that_fit(lines, height)
        drawn = len(strand_lines(lines, most))
        assert drawn <= height, height
        assert most == 40 or len(strand_lines(lines, most + 1)) > height, "no more would fit"
    assert len(strand_lines(lines, 40)) == 3 + 40 + 10 + 10
    assert most_that_fit(lines, 1) == 0, "heads alone, and a scrollbar"
    assert few(list(range(9)), 1) == [0, -1]
    assert few(list(range(9)), 2) == [0, -1, 8]


def test_the_root_and_the_fork_of_a_strand() -> None:
    rows = strand_lines(tree_lines(block_trees([table(9, "z", 0, "idle", 16, [100]), *BEAMS])), 1)
    heads = [row for row, line in enumerate(rows) if line.place == HEAD]
    nodes = [rows[row].tree.node for row in root_and_fork(rows, heads[-2])]
    root, fork = (None if node is None else node.blocks for node in nodes)
    assert (root, fork) == ([0, 1, 2, 30], [31])
    assert root_and_fork(rows, 0) == (0, 0)


async def test_the_trunk_stays_in_view_while_answers_grow() -> None:
    """At 120x40 the second question with three answers once scrolled the trunk out of view."""
    async with panel_of(view="strands", size=(120, 40)) as (pilot, panel, pool):
        for length in range(1, 30):
            answers = [table(n, "turn 2", n, "running", 16 * (9 + length), [*range(9), *range(30 * n, 30 * n + length)])
                       for n in (1, 2, 3)]  # fmt: skip
            feed(panel, pool, CacheChanged(answers))
            await pilot.pause()
        await pilot.pause()
        shown = seen(pilot)
        assert "┏ 9 blocks ×3" in shown
        assert all(f"turn 2 · {n + 1}" in shown for n in (1, 2, 3))
        assert panel.query_one(Strands).max_scroll_y == 0
        feed(panel, pool, CacheChanged(gone=[2, 3]))
        await pilot.pause()
        await pilot.pause()
        assert shown.count("⋮") > seen(pilot).split("✕")[0].count("⋮"), "there is space to unfold"


@pytest.mark.parametrize(("columns", "line"), [(60, "1 running  4 own"), (34, "1  4 own"), (26, "a long name · 1")])
async def test_a_narrow_line_keeps_the_number_of_blocks(columns: int, line: str) -> None:
    tables = [
        table(1, "turn 1", 0, "idle", 16 * 9, [*range(5), *range(30, 34)]),
        table(2, "a long name", 0, "running", 16 * 9, [*range(5), *range(60, 64)]),
    ]
    async with panel_of(picture(tables), view="strands", size=(columns, 40)) as (pilot, *_):
        await until(pilot, lambda: any(shown.rstrip().endswith(line) for shown in seen(pilot).splitlines()))


async def test_ghosts_take_only_the_space_that_the_living_leave() -> None:
    old = [table(n, "turn 1", n, "idle", 160, list(range(10 * n, 10 * n + 10))) for n in range(1, 4)]
    async with panel_of(picture(old), view="strands", size=(120, 24)) as (pilot, panel, pool):
        new = table(9, "turn 2", 0, "running", 16 * 20, list(range(100, 120)))
        feed(panel, pool, CacheChanged([new], gone=[1, 2, 3]))
        await pilot.pause()
        await pilot.pause()
        lines = [line for line in seen(pilot).splitlines() if "╎" in line or "✕" in line or "turn 2" in line]
        assert "turn 2" in lines[0], "first what lives"
        assert panel.query_one(Strands).max_scroll_y == 0


def test_words_dissolve_to_nothing() -> None:
    text = "a word 日本 and another"
    assert with_blanks(text, -0.5) == text
    half = with_blanks(text, 0.5)
    assert 0 < len(half.replace(" ", "")) < len(text.replace(" ", ""))
    assert not with_blanks(text, 1.0).strip()
    assert "·" not in with_blanks(text, 0.7)


def test_a_copy_is_marked_as_long_as_its_block_lives() -> None:
    pool = new_pool()
    copy = LogEntry(2.1, "copy", 4, "a", [21, 60], detail=1)
    pool.apply(CacheChanged([table(4, "a", 0, "running", 20, [3, 60])], log=[copy]))
    pool.apply(CacheChanged([table(4, "a", 0, "running", 60, [3, 60, 61, 62])]))
    assert pool.copies[60].source == 21
    pool.apply(CacheChanged(gone=[4], cached=[60]))
    assert 60 not in pool.copies


def test_the_mark_of_a_copy_is_in_usual_fonts() -> None:
    """DejaVu Sans Mono has the dingbats, and lacks most of the miscellaneous mathematical symbols."""
    assert 0x2701 <= ord(COPIED) <= 0x27BE


async def test_an_answer_without_blocks_tells_what_is_still_cached() -> None:
    async with panel_of(view="strands") as (pilot, panel, pool):
        answer = table(1, "turn 2", 1, "idle", 57, [3, 4, 5, 6])
        feed(panel, pool, CacheChanged([answer]))
        feed(panel, pool, CacheChanged(gone=[1], cached=[3, 4, 5]))
        panel.show_news(name, "branch", origin=("turn 2", 1))
        await pilot.pause()
        await pilot.pause()
        words = "branch · 0: 48 of 57 tokens still cached, the rest would be read again"
        assert words.replace(" · 0", "") in " ".join(seen(pilot).replace("│", " ").split())
        panel.view = "tables"
        await until(pilot, lambda: words.replace(" · 0", "") in " ".join(seen(pilot).replace("│", " ").split()))
        feed(panel, pool, CacheChanged(uncached=[4], log=[LogEntry(3.0, "evict", -1, "", [4])]))
        panel.show_news(name, "branch", origin=("turn 2", 1))
        panel.view = "pool"
        await pilot.pause()
        await pilot.pause()
        assert "16 of 57 tokens still cached" in seen(pilot)
        taken = [LogEntry(4.0, "allocate", 7, "x", [3])]
        feed(panel, pool, CacheChanged([table(7, "x", 0, "running", 1, [3])], uncached=[3], log=taken))
        panel.show_news(name, "branch", origin=("turn 2", 1))
        await pilot.pause()
        assert "0 of 57 tokens" in seen(pilot), "another text is in its first block"


async def test_a_beam_without_a_strand_of_its_own_is_named() -> None:
    async with panel_of(picture(TABLES[:4]), view="strands") as (pilot, panel, pool):
        feed(panel, pool, CacheChanged(gone=[3]))
        panel.show_news(name, "turn 2", lambda owner, index: -0.5, num_beams=3)
        await pilot.pause()
        await pilot.pause()
        assert "turn 2 · 1  ended early: holds no blocks" in seen(pilot)


async def test_blocks_of_wrong_draft_tokens_fill_no_log() -> None:
    async with panel_of(view="events") as (pilot, panel, pool):
        log = [LogEntry(1.0, "allocate", 1, "a", [38])]
        for _ in range(3):
            log += [LogEntry(1.0, "allocate", 1, "a", [39]), LogEntry(1.0, "cut", 1, "a", [39])]
        log += [LogEntry(2.0, "cut", 1, "a", [38, 37])]
        feed(panel, pool, CacheChanged(counts=CacheCounts(), log=log))
        await pilot.pause()
        kinds = [(entry.kind, entry.blocks) for entry in panel.query_one(EventLog)._entries]
        assert kinds == [("cut", [38, 37])] or kinds == [("allocate", [38]), ("cut", [38, 37])]


async def test_the_pane_takes_two_fifths_and_keys_or_a_drag_change_it() -> None:
    async with chat(size=(160, 50)) as pilot:
        panel = screen(pilot).query_one(MemoryPanel)
        assert panel.size.width == 64
        await pilot.press("alt+shift+left")
        await until(pilot, lambda: panel.size.width == 72)
        await pilot.press("alt+shift+right", "alt+shift+right")
        await until(pilot, lambda: panel.size.width == 56)
        edge = panel.region.x
        await pilot.mouse_down(offset=(edge, 10))
        await pilot.hover(offset=(80, 10))
        await pilot.mouse_up(offset=(80, 10))
        await until(pilot, lambda: panel.size.width == 80)
        await pilot.hover(offset=(40, 10))
        await pilot.pause()
        assert panel.size.width == 80, "the button is up"
        await pilot.press("alt+v")
        await until(pilot, lambda: panel.size.width == 160)
        await pilot.press("alt+v")
        for _ in range(12):
            await pilot.press("alt+shift+right")
        await until(pilot, lambda: panel.size.width == 46)


async def test_the_bar_of_keys_keeps_the_way_to_all_others_and_out() -> None:
    async with chat(size=(60, 18)) as pilot:
        shown = str(screen(pilot).query_one(KeyBar).render())
        for words in ("/ Commands", "^g Keys", "^q Quit", "f1 Help"):
            assert words in shown, words


def is_framed(pilot: Pilot[None], view: str) -> bool:
    return f"╭─ {view} ─" in seen(pilot)


async def test_names_and_the_words_of_a_view_are_on_the_screen() -> None:
    async with chat(size=(160, 50)) as pilot:
        await say(pilot, "/n 3")
        turn = await ask(pilot, "echo one")
        assert screen(pilot).memory.name_of(turn.answer.request_id, 1) == "turn 1 · answer 2"
        for view in ("tables", "strands", "events", "memory", "steps"):
            await say(pilot, f"/{view}") if screen(pilot).memory_view != view else None
            await until(pilot, partial(is_framed, pilot, view))
            assert " · " in str(screen(pilot).query(f"#view-{view} .legend").first().render())


async def test_equal_answers_say_so() -> None:
    async with chat(size=(160, 50)) as pilot:
        await say(pilot, "/n 3")
        turn = await ask(pilot, "echo one")
        view = screen(pilot).chat_pane.transcript.view_of(turn)
        assert view is not None
        for candidate in turn.answer.candidates:
            candidate.text = "A sentence that all of them say, word by word."
        await view.answer_view.flush()
        await pilot.pause()
        shown = seen(pilot)
        assert shown.count("the same as 1") == 2
        assert shown.count("A sentence that all of") == 1
