"""Test the gutter next to answers, which shows the blocks of an answer's tokens."""

import pytest

from lib.ui import answered, ask, chat, screen, until
from minillm.service.messages import CacheChanged, TableView
from minillm.ui.chat.conversation import Answer
from minillm.ui.chat.gutter import Gutter, gutter
from minillm.ui.memory.pool import Pool


def answer(is_open: bool = False) -> Answer:
    """A prompt of two and a half blocks of four tokens, and seven tokens of text."""
    made = Answer("r", "text", None if is_open else "stop", num_prompt_tokens=10, num_output_tokens=7)
    made.time_to_first_token = 0.1
    return made


def pool(*others: TableView) -> Pool:
    made = Pool(16, 4, 1024)
    made.apply(CacheChanged(tables=[TableView(1, "r", 0, "idle", 17, [0, 1, 2, 3, 4]), *others]))
    return made


def test_each_block_from_the_first_token_on_has_its_rows() -> None:
    assert gutter(pool(), answer(), 6).plain == "├\n│\n├\n│\n├\n│"


def test_shared_blocks_are_thick_and_one_that_is_being_filled_is_dashed() -> None:
    other = TableView(2, "s", 0, "running", 14, [0, 1, 2, 3, 7])
    assert gutter(pool(other), answer(is_open=True), 6).plain == "┣\n┃\n┣\n┃\n├\n╎"


def test_the_colors_are_those_of_the_strands() -> None:
    third = Pool(16, 4, 1024)
    third.apply(
        CacheChanged([TableView(1, "r", 2, "idle", 17, [0, 1, 2, 3, 4]), TableView(2, "s", 0, "idle", 12, [0, 1, 2])])
    )
    drawn = gutter(third, answer(), 3)
    assert [span.style for span in drawn.spans] == ["$secondary", "$strand-2", "$strand-2"]


def test_lines_that_an_answer_has_taken_ahead_belong_to_no_block() -> None:
    shown = Gutter(answer())
    shown.pool, shown.num_blank = pool(), 3
    assert shown._make(1, 9).plain == "├\n│\n├\n│\n├\n│"


def test_more_blocks_than_rows_and_rows_than_blocks() -> None:
    assert gutter(pool(), answer(), 1).plain == "├"
    assert gutter(pool(), answer(), 7).plain.count("├") == 3


def test_blocks_that_are_gone_or_on_the_host_leave_it_empty() -> None:
    without = Pool(16, 4, 1024)
    on_host = Pool(16, 4, 1024)
    on_host.apply(CacheChanged(tables=[TableView(1, "r", 0, "swapped", 17, [0, 1, 2, 3, 4])]))
    for each in (None, without, on_host):
        assert gutter(each, answer(), 4).plain == "\n\n\n"


@pytest.mark.anyio
async def test_it_follows_the_pool_and_the_branch() -> None:
    async with chat() as pilot:
        first = await ask(pilot, "echo one")
        shown = screen(pilot).query_one(Gutter)
        await until(pilot, lambda: "├" in shown.render().plain)
        await pilot.press("alt+r")
        turn = await answered(pilot, first)
        assert turn is not first
        await until(pilot, lambda: "├" in screen(pilot).query_one(Gutter).render().plain)
        screen(pilot).show_pool(None)
        await until(pilot, lambda: not screen(pilot).query_one(Gutter).render().plain.strip())
