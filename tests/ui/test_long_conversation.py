"""Test a conversation of hundreds of turns: only turns near the screen are widgets, which users cannot notice."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.events import MouseDown
from textual.pilot import Pilot

from lib.ui import ask, chat, say, screen, seen, until
from minillm.ui.chat import window
from minillm.ui.chat.conversation import Candidate, Conversation
from minillm.ui.chat.transcript import Remark, Transcript
from minillm.ui.chat.turn_view import Question

pytestmark = pytest.mark.anyio

_heights = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def long_conversation(num_turns: int) -> Conversation:
    conversation = Conversation()
    for number in range(num_turns):
        answer = conversation.ask(f"question {number}.")
        lines = "\n\n".join(f"line {each} of answer {number}." for each in range(1 + number % 7))
        answer.text, answer.finish_reason = lines, "stop"
    return conversation


async def opened(pilot: Pilot[None], num_turns: int = 300) -> Transcript:
    pane = screen(pilot).chat_pane
    await pane.open_conversation(long_conversation(num_turns))
    await pilot.pause()
    await until(pilot, lambda: pane.transcript.is_settled and f"answer {num_turns - 1}." in seen(pilot))
    return pane.transcript


def check(transcript: Transcript) -> None:
    """Check that the mounted views are a part of the list without a gap, and cover the screen."""
    turns = transcript.turns
    mounted = [view.turn for view in transcript.turn_views]
    first = turns.index(mounted[0])
    assert mounted == turns[first : first + len(mounted)]
    assert len(mounted) < 60
    top, end = transcript.scroll_y, transcript.scroll_y + transcript.size.height
    assert transcript.turn_views[0].virtual_region.y <= top + 1 or first == 0
    assert transcript.turn_views[-1].virtual_region.bottom >= end - 2 or mounted[-1] is turns[-1]


@given(_heights, st.integers(-20, 300), st.integers(1, 50))
def test_the_mounted_part_is_where_the_lines_are(heights: list[int], first: int, num_lines: int) -> None:
    owners = [index for index, height in enumerate(heights) for _ in range(height)]  # of each line, one after another
    in_sight = [owner for line, owner in enumerate(owners) if first <= line < first + num_lines]
    assert list(window.around(heights, first, first + num_lines)) == sorted(set(in_sight))
    assert set(window.ending(heights, num_lines)) == set(owners[-num_lines:])
    if 0 <= first < len(owners):
        index, line = window.at(heights, first)
        assert index == owners[first]
        assert sum(heights[:index]) + line == first


def test_a_list_that_grows_mounts_all_of_five_screens_and_then_only_what_is_near_its_end() -> None:
    assert window.grown(range(10, 19), [10] * 20, 20) == range(10, 20)
    assert window.grown(range(10, 20), [10] * 21, 20) == range(16, 21), "one screen, and one and a half above it"


async def test_the_end_is_shown_and_little_is_mounted() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot)
        await until(pilot, lambda: "answer 299." in seen(pilot))
        assert len(transcript.turns) == 300
        check(transcript)
        assert transcript.scroll_y == transcript.max_scroll_y > 1000


async def test_a_change_whose_caller_is_cancelled_goes_on() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot, 30)
        for number in range(1, 9):
            note = Remark(f"note {number}.", "info")
            change = asyncio.create_task(transcript.replace_items(28, [note], into_sight=True))
            for _ in range(number):
                await asyncio.sleep(0)
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change
            await until(pilot, lambda: transcript.is_settled and f"note {number}." in seen(pilot))  # noqa: B023
            assert len(transcript.views) == len(transcript.shown) == len(transcript.query("TurnView, Note"))
        check(transcript)


async def test_page_by_page_to_the_top_every_turn_comes_by() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot, 50)
        assert len(transcript.turn_views) < 25
        come: set[int] = set()
        for _ in range(200):
            shown = seen(pilot)
            come |= {number for number in range(50) if f"question {number}." in shown}
            if not transcript.scroll_y:
                break
            await pilot.press("pageup")
            await until(pilot, lambda: transcript.is_settled)
            check(transcript)
        assert come == set(range(50))


async def test_ctrl_home_and_ctrl_end_go_all_the_way() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: "question 0." in seen(pilot))
        check(transcript)
        last = transcript.turns[-1].answer
        last.candidates = [Candidate("best"), Candidate("other")]
        await pilot.press("alt+y")
        await until(pilot, lambda: pilot.app.clipboard == "best")
        last.candidates = []
        await pilot.press("ctrl+end")
        await until(pilot, lambda: "answer 299." in seen(pilot))
        check(transcript)
        assert transcript.scroll_y == transcript.max_scroll_y


async def test_the_end_is_mounted_where_a_layout_scrolls_there_first() -> None:
    """While the list is held at its end, a layout scrolls it without calling its watchers."""
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: transcript.is_settled and "question 0." in seen(pilot))
        transcript.refresh(layout=True)
        transcript.scroll_end(animate=False)
        await until(pilot, lambda: "answer 299." in seen(pilot))
        check(transcript)


async def test_what_is_in_sight_stays_where_it_is_when_more_is_mounted_above() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot)
        for _ in range(40):
            before, shown = seen(pilot).splitlines(), transcript.shown
            await pilot.press("ctrl+up")
            await until(pilot, lambda: transcript.is_settled)
            after = seen(pilot).splitlines()
            rows = slice(transcript.region.y, transcript.region.bottom - 1)
            width = transcript.region.width - 2
            above, below = [row[:width] for row in before[rows]], [row[:width] for row in after[rows]]
            assert above[:-1] == below[1:], (shown, transcript.shown)


async def test_an_answer_after_the_reader_went_far_up() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: "question 0." in seen(pilot))
        await ask(pilot, "echo the end")
        await until(pilot, lambda: "the end" in seen(pilot))
        check(transcript)
        assert transcript.turn_views[-1].turn.answer.text == "the end"


async def test_a_growing_conversation_mounts_no_more_than_a_few_screens() -> None:
    async with chat(size=(100, 20)) as pilot:
        for number in range(25):
            await ask(pilot, f"echo number {number}")
        await pilot.pause()
        transcript = screen(pilot).chat_pane.transcript
        assert len(transcript.turns) == 25 > len(transcript.turn_views)
        check(transcript)


async def test_selecting_upwards_brings_turns_in_and_a_branch_begins_at_the_selected_one() -> None:
    async with chat(size=(100, 30)) as pilot:
        transcript = await opened(pilot, 44)
        assert transcript.turns[15] not in [view.turn for view in transcript.turn_views]
        for _ in range(29):
            await pilot.press("alt+up")
        await until(pilot, lambda: "question 15." in seen(pilot))
        assert transcript.selected is transcript.turns[15]
        await say(pilot, "/regenerate")
        pane = screen(pilot).chat_pane
        await until(pilot, lambda: pane.run is None and len(transcript.turns) == 16)
        await until(pilot, lambda: "2/2" in seen(pilot))
        await pilot.press("alt+left")  # the other branch, with its 28 turns more
        await until(pilot, lambda: len(transcript.turns) == 44)
        await until(pilot, lambda: "1/2" in seen(pilot) and "question 15." in seen(pilot))
        check(transcript)


async def test_notes_stay_between_the_turns_where_they_were_made() -> None:
    async with chat(size=(100, 20)) as pilot:
        transcript = await opened(pilot, 30)
        await transcript.add_note("a note of now")
        for number in range(12):
            await ask(pilot, f"echo number {number}")
        await pilot.press("ctrl+home")
        await until(pilot, lambda: "question 0." in seen(pilot))
        assert "a note of now" not in seen(pilot)
        await transcript.bring(transcript.turns[30])
        await until(pilot, lambda: "a note of now" in seen(pilot) and "number 0" in seen(pilot))


async def test_a_note_is_mounted_at_once_where_the_end_is_mounted() -> None:
    async with chat(size=(100, 20)) as pilot:
        transcript = await opened(pilot, 30)
        first = transcript.shown.start
        await transcript.add_note("a note at the end")
        assert transcript.shown == range(first, len(transcript.items))
        await transcript.bring(transcript.turns[2])
        await until(pilot, lambda: transcript.is_settled)
        shown = transcript.shown
        await transcript.add_note("a note below what is mounted")
        assert transcript.shown == shown


async def test_a_turn_that_is_brought_stays_where_the_reader_scrolls_meanwhile() -> None:
    """More is due for the lines in sight; it waits until the turn is mounted, and those lines are left by then."""
    async with chat(size=(100, 30)) as pilot:
        transcript = await opened(pilot)
        for number in (77, 200, 20):
            transcript.scroll_to(y=transcript.scroll_y - 40, animate=False)
            transcript.release_anchor()
            assert await transcript.bring(transcript.turns[number]) is not None
            await until(pilot, lambda: transcript.is_settled)
            await pilot.pause(0.1)
            assert f"question {number}." in seen(pilot), number
            check(transcript)


async def test_a_turn_that_is_brought_is_in_sight_where_its_layout_comes_late() -> None:
    """Textual calls back "after a refresh" without one, while a batch of updates is under way or messages wait."""
    async with chat(size=(100, 30)) as pilot:
        transcript = await opened(pilot)
        with pilot.app.batch_update():
            await transcript.bring(transcript.turns[77])
            await anyio.sleep(0.1)
            assert not transcript.is_settled
        await until(pilot, lambda: transcript.is_settled)
        assert "question 77." in seen(pilot)
        check(transcript)


async def test_another_width_of_the_window_in_the_midst_of_a_long_conversation() -> None:
    async with chat(size=(160, 40)) as pilot:
        transcript = await opened(pilot)
        await transcript.bring(transcript.turns[100])
        await until(pilot, lambda: "question 100." in seen(pilot))
        for width in (60, 130):
            await pilot.resize_terminal(width, 40)
            await until(pilot, lambda: transcript.is_settled)
            check(transcript)
        await pilot.press("ctrl+end")
        await until(pilot, lambda: "answer 299." in seen(pilot))


async def test_a_click_on_what_has_just_been_removed_does_nothing() -> None:
    async with chat(size=(100, 40)) as pilot:
        transcript = await opened(pilot, 30)
        view = transcript.turn_views[-1]
        x, y = view.query_one(Question).region.offset
        with pilot.app.batch_update():  # so that it is still drawn
            await view.remove_children()
            down = MouseDown(None, x, y, 0, 0, 1, False, False, False, screen_x=x, screen_y=y)
            pilot.app.screen._forward_event(down)
        await pilot.pause()
        assert screen(pilot).is_running
