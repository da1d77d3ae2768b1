"""Test the parts of the app that need no terminal: the pool's picture, Markdown, settings, numbers."""

from __future__ import annotations

import pytest

from minillm.progress import Progress, size
from minillm.service.messages import CacheChanged, CacheCounts, LogEntry, TableView
from minillm.ui.bars import progress_line
from minillm.ui.chat.markdown import harmless_parser
from minillm.ui.chat.turn_view import shortened
from minillm.ui.memory.pool import BlockState, Pool, PoolFigures
from minillm.ui.memory.tables import runs_line
from minillm.ui.numbers import bar, duration, plural


def test_the_pool_follows_the_changes() -> None:
    pool = Pool(8, 16, 100)
    log = [LogEntry(1.0, "allocate", 1, "c", [2])]
    tables = [TableView(1, "c", 1, "idle", 20, [2, 3]), TableView(2, "c", 0, "running", 16, [2])]
    event = CacheChanged(tables, cached=[5, 99], counts=CacheCounts(num_copies=2), log=log, num_unlogged=3)
    assert sorted(pool.apply(event)) == [2, 3, 5]
    states = [pool.state(block) for block in (0, 2, 3, 5)]
    assert states == [BlockState.FREE, BlockState.SHARED, BlockState.OWNED, BlockState.CACHED]
    assert [pool.ref_counts[block] for block in (0, 2, 3, 5)] == [0, 2, 1, 0]
    assert [pool.filled[block] for block in (0, 2, 3, 5)] == [0, 16, 4, 16]
    assert pool.figures == PoolFigures(5, 1, 1, 0, logical_blocks=3, used_slots=20)
    assert (pool.used_blocks, pool.wasted_slots, pool.sharing_ratio, pool.counts.num_copies) == (2, 12, 1.5, 2)
    assert [table.seq_id for table in pool.tables_of("c")] == [2, 1]
    assert pool.tables_of("x") == []
    table = pool.tables[1]
    assert [pool.filled_slots(table, index) for index in (0, 1, 2)] == [16, 4, 0]
    assert [(table.seq_id, number) for table, number in pool.holders(2)] == [(1, 0), (2, 0)]
    more = TableView(1, "c", 1, "pinned", 40, [6, 7], keep=1)
    assert sorted(pool.apply(CacheChanged([more], gone=[2], uncached=[5], log=log))) == [2, 3, 5, 6, 7]
    assert [pool.state(block).value for block in range(8)] == list("··p···pp")
    assert [pool.filled[block] for block in (2, 6, 7)] == [16, 16, 8]
    assert {seq_id: table.blocks for seq_id, table in pool.tables.items()} == {1: [2, 6, 7]}
    assert (len(pool.log), pool.num_logged, len(pool.history)) == (2, 5, 2)
    # The blocks of a table on the host are not the device's.
    assert sorted(pool.apply(CacheChanged([TableView(1, "c", 1, "swapped", 40, [0, 1, 2])]))) == [2, 6, 7]
    assert pool.figures == PoolFigures(free_blocks=8)


def test_runs_of_a_block_table_in_one_line() -> None:
    assert runs_line([4, 5, 6, 2], 80) == "0–2 → 4–6, 3 → 2"
    assert runs_line([1, 3, 5, 7, 9], 20) == "0 → 1, and 4 more"


@pytest.mark.parametrize("target", ["javascript:alert(1)", "file:///etc/passwd", "https://a.example/x"])
def test_links_and_pictures_become_text_with_their_target(target: str) -> None:
    for source in (f"[word]({target})", f"![word]({target})"):
        children = harmless_parser().parse(source)[1].children or []
        assert not {token.type for token in children} & {"link_open", "image", "html_inline"}
        assert any(token.type == "code_inline" and token.content.startswith(target[:4]) for token in children) or (
            target.startswith(("javascript", "file")) and target in "".join(token.content for token in children)
        )


def test_characters_that_the_parser_makes_are_cleaned_too() -> None:
    for source in ("&#x1b;[31m &#x202e;", "`&#x9b;`", "~~~&#x1b;x\n&#x202e;\n~~~", "<https://a.example/%1b>"):
        tokens = harmless_parser().parse(source)
        texts = [token.content + token.info for top in tokens for token in (top.children or [top])]
        assert not set("".join(texts)) & {"\x1b", "\x9b", "\u202e"}, source


def test_html_is_text() -> None:
    children = harmless_parser().parse("<b onclick=x>bold</b>")[1].children or []
    assert "".join(token.content for token in children) == "<b onclick=x>bold</b>"


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1023.6, 1500, 10 << 10)] == ["0 B", "999 B", "1.0 KiB", "1.5 KiB", "10 KiB"]
    assert [size(n) for n in (161e6, 3.4e9, 15 << 30, 3 << 40)] == ["154 MiB", "3.2 GiB", "15.0 GiB", "3072.0 GiB"]
    assert [duration(s) for s in (0.34, 1.24, 75.2)] == ["340 ms", "1.2 s", "75 s"]
    assert [bar(f, 4) for f in (0, 0.01, 0.5, 1, 2)] == ["▱▱▱▱", "▰▱▱▱", "▰▰▱▱", "▰▰▰▰", "▰▰▰▰"]
    assert plural(1, "block") == "1 block"


def test_progress_in_one_line() -> None:
    line = progress_line(Progress("downloading", 50_000_000, 100_000_000, "bytes"), 10e6, 100)
    for part in ("downloading", "48 MiB of 95 MiB", "9.5 MiB/s", "5.0 s left", "esc cancels"):
        assert part in line
    assert "3 of 30 layers" in progress_line(Progress("loading weights", 3, 30, "layers"), 0, 80)


def test_long_questions_are_shortened() -> None:
    assert shortened("short") == "short"
    text = "x" * 10_000
    assert shortened(text) == "x" * 4000 + "\n… 5.9 KiB more"
