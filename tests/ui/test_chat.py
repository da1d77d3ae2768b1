"""The chat app, driven by Textual's Pilot on the scripted engine: the user's actions, and the screen."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from textual import events
from textual._compositor import Compositor, ReflowResult
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static, TextArea

from lib.terminal import PROGRAMS
from lib.ui import ask, chat, notes, say, screen, seen, until
from minillm.service.messages import Finished, Forget, TextDelta
from minillm.service.process import EngineProcess
from minillm.ui.bars import KeyBar, StatusBar
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.transcript import Transcript
from minillm.ui.chat.turn_view import Question
from minillm.ui.chat_screen import ChatScreen
from minillm.ui.dialogs import ModelScreen, SamplingScreen, SystemScreen
from minillm.ui.drawing import Drawing
from minillm.ui.engine_app import EngineCommand, EngineEvent
from minillm.ui.help import HelpScreen
from minillm.ui.memory.line_view import LineView
from minillm.ui.memory.panel import MemoryPanel
from minillm.ui.memory.pool_map import PoolMap
from minillm.ui.settings import Settings

pytestmark = pytest.mark.anyio


async def test_an_answer_streams_into_the_transcript() -> None:
    async with chat(size=(140, 40)) as pilot:
        view = await ask(pilot, "echo hello **world**")
        assert view.answer.text == "hello **world**"
        assert "hello world" in seen(pilot)
        assert "echo hello" in str(screen(pilot).query_one(Question).render())
        for fact in ("50.0 tok/s", "first token 50 ms", "prompt 20, 4 cached", "context", "35/1,000"):
            assert fact in seen(pilot), fact
        assert screen(pilot).query_one(PromptInput).text == ""


async def test_escape_stops_an_answer_and_keeps_what_was_said() -> None:
    async with chat() as pilot:
        await say(pilot, "endless")
        await until(pilot, lambda: "word word" in seen(pilot))
        await pilot.press("escape")
        view = screen(pilot).query_one(AnswerView)
        await until(pilot, lambda: view.answer.finish_reason == "abort")
        assert view.answer.text.startswith("word ")
        await until(pilot, lambda: "stopped" in seen(pilot))
        assert (await ask(pilot, "messages")).answer.text.count("user=") == 2


async def test_an_answer_stopped_before_its_first_word_gives_the_question_back() -> None:
    async with chat() as pilot:
        status = screen(pilot).query_one(StatusBar)
        assert status.status.activity == "ready"
        await say(pilot, "never mind")
        await until(pilot, lambda: screen(pilot).query(AnswerView))
        await until(pilot, lambda: status.status.activity == "reading")
        await pilot.press("escape")
        await until(pilot, lambda: status.status.activity == "ready")
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text == "never mind")
        assert not screen(pilot).query(AnswerView)
        assert screen(pilot).chat_pane.conversation.turns == []


async def test_a_new_conversation_forgets_the_old_one_and_frees_its_blocks() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        await until(pilot, lambda: screen(pilot).pool.used_blocks == 3)  # type: ignore[union-attr]
        await pilot.press("ctrl+n")
        await until(pilot, lambda: screen(pilot).pool.used_blocks == 0)  # type: ignore[union-attr]
        assert not screen(pilot).query(AnswerView)
        assert (await ask(pilot, "messages")).answer.text == "user=messages;"
        await say(pilot, "endless")
        await until(pilot, lambda: "word" in seen(pilot))
        await pilot.press("ctrl+n")
        await pilot.pause(0.3)
        assert "word" not in seen(pilot), "nothing of an answer is shown that goes on"
        assert (await ask(pilot, "echo two")).answer.text == "two"


async def test_hostile_text_meets_no_markup_and_no_control_character() -> None:
    async with chat(size=(190, 60)) as pilot:
        await ask(pilot, "hostile")
        shown = seen(pilot)
        assert "[/INST] [b [bold]markup[/bold] [@click=app.quit]x[/]" in shown
        assert not set(shown) & {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x200B)} - {"\n"}
        assert any("served ␛[31mby a script" in note for note in notes(pilot))


async def test_a_crash_of_the_engine_is_said_and_the_conversation_goes_on() -> None:
    async with chat(engine_command=(sys.executable, str(PROGRAMS / "fake_engine.py"))) as pilot:
        await ask(pilot, "echo one")
        await say(pilot, "crash")
        await until(pilot, lambda: "exit code 3" in "".join(notes(pilot)))
        assert "out of luck" in notes(pilot)[-1]
        await say(pilot, "echo lost?")
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text.startswith("echo lost?"))
        screen(pilot).query_one(PromptInput).text = ""
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen(pilot).chat_pane.engine.phase == "ready")
        assert "user=echo one;assistant=one;" in (await ask(pilot, "messages")).answer.text


async def test_a_full_context_a_failed_request_and_nonsense_from_the_engine_are_explained() -> None:
    async with chat() as pilot:
        await say(pilot, "full")
        await until(pilot, lambda: notes(pilot) and "1,200 tokens" in notes(pilot)[-1])
        assert "longer context" in notes(pilot)[-1]
        await say(pilot, "fail")
        await until(pilot, lambda: "the request ␛[31mbroke" in "".join(notes(pilot)))
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text == "fail")
        assert (await ask(pilot, "echo on")).answer.text
        await say(pilot, "garbage")
        await until(pilot, lambda: "sent an invalid message" in "".join(notes(pilot)))


async def test_a_reader_who_has_scrolled_up_is_told_that_the_text_goes_on() -> None:
    async with chat(size=(80, 24)) as pilot:
        await say(pilot, "endless")
        await until(pilot, lambda: screen(pilot).chat_pane.transcript.max_scroll_y > 12)
        await until(pilot, lambda: "more below" not in seen(pilot))
        await pilot.press("pageup")
        await until(pilot, lambda: "more below ↓ Ctrl+End" in seen(pilot))
        await pilot.press("ctrl+end")
        await until(pilot, lambda: "more below" not in seen(pilot))
        await pilot.press("escape")


async def test_a_question_waits_for_the_answer_before_it() -> None:
    async with chat() as pilot:
        await say(pilot, "slow")
        await until(pilot, lambda: "word" in seen(pilot))
        await say(pilot, "echo two")
        await until(pilot, lambda: "1 question queued" in seen(pilot))
        pane = screen(pilot).chat_pane
        await until(pilot, lambda: len(pane.conversation.turns) == 2 and not pane.conversation.turns[1].answer.is_open)
        assert [turn.question for turn in pane.conversation.turns] == ["slow", "echo two"]
        assert "queued" not in seen(pilot)


async def test_escape_leaves_the_whole_screen_and_takes_waiting_questions_back_before_it_stops_the_answer() -> None:
    async with chat() as pilot:
        pane = screen(pilot).chat_pane
        await say(pilot, "endless")
        await until(pilot, lambda: "word" in seen(pilot))
        await pilot.press("alt+v", "escape")
        assert not screen(pilot).has_class("-expanded")
        assert pane.run is not None
        assert not pane.run.is_stopping
        assert pane.prompt.has_focus
        await say(pilot, "echo two")
        await say(pilot, "echo three")
        await until(pilot, lambda: "2 questions" in seen(pilot))
        assert len(screen(pilot).query(AnswerView)) == 1
        await pilot.press("escape")
        assert pane.prompt.text == "echo two\necho three"
        assert pane.run is not None
        assert not pane.run.is_stopping
        pane.prompt.text = ""
        await say(pilot, "echo four")
        await until(pilot, lambda: "1 question" in seen(pilot))
        pane.run.stop()
        await until(pilot, lambda: pane.run is None)
        await until(pilot, lambda: pane.prompt.text == "echo four")
        assert len(pane.conversation.turns) == 1, "an answer that was stopped is no reason to ask the next"


async def test_a_question_waits_for_the_model() -> None:
    async with chat() as pilot:
        pane = screen(pilot).chat_pane
        pane.prompt.text = "echo one"
        await pilot.press("ctrl+r", "enter")
        await until(pilot, lambda: pane.conversation.turns and not pane.conversation.turns[0].answer.is_open)
        assert pane.conversation.turns[0].answer.text == "one"


async def test_keys_behind_enter_are_the_next_question() -> None:
    async with chat() as pilot:
        await pilot.press(*"echo one", "enter", *"abc")
        prompt = screen(pilot).query_one(PromptInput)
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.num_answers == 1)
        assert prompt.text == "abc"


async def test_editing_is_shown_until_it_ends_and_letters_reach_the_prompt_from_anywhere() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        await pilot.press("alt+e")
        await until(pilot, lambda: "editing" in seen(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: "editing" not in seen(pilot))
        prompt = screen(pilot).query_one(PromptInput)
        await pilot.click("Transcript")
        assert not prompt.has_focus
        await pilot.press("h", "i")
        assert (prompt.text, prompt.has_focus) == ("hi", True)
        await pilot.press("alt+v")
        await until(pilot, lambda: screen(pilot).has_class("-expanded"))
        await pilot.press("!")
        assert (prompt.text, screen(pilot).has_class("-expanded")) == ("hi!", False)


@pytest.mark.parametrize(("model", "words"), [("missing", "no such model"), ("base", "no chat template")])
async def test_a_model_that_cannot_chat_is_explained(model: str, words: str) -> None:
    async with chat(model) as pilot:
        await until(pilot, lambda: words in "".join(notes(pilot)))
        assert "\x1b" not in "".join(notes(pilot))


async def test_loading_shows_progress_and_can_be_cancelled() -> None:
    async with chat("forever") as pilot:
        await until(pilot, lambda: "1 of 3 layers" in seen(pilot))
        await pilot.press("a", "b")
        assert screen(pilot).query_one(PromptInput).text == "ab"
        await pilot.press("escape")
        await until(pilot, lambda: "canceled" in seen(pilot))
        assert pilot.app.engine_state.phase == "off"  # type: ignore[attr-defined]


async def test_sampling_is_checked_and_taken_over() -> None:
    async with chat() as pilot:
        await pilot.press("f3")
        dialog = pilot.app.screen
        assert isinstance(dialog, SamplingScreen)
        dialog.query_one("#temperature", Input).value = "-1"
        await pilot.press("enter")
        assert pilot.app.screen is dialog
        assert "temperature must be at least 0" in str(dialog.query_one(".problem", Static).render())
        dialog.query_one("#temperature", Input).value = "0"
        dialog.query_one("#seed", Input).value = "7"
        await pilot.press("enter")
        await until(pilot, lambda: "greedy · seed 7" in seen(pilot))
        params = (await ask(pilot, "params")).answer.text
        assert "('temperature', 0.0)" in params
        assert "('seed', 7)" in params
        await pilot.press("f3")
        pilot.app.screen.query_one("#seed", Input).value = ""
        await pilot.press("escape")
        assert "('seed', 7)" in (await ask(pilot, "params")).answer.text


async def test_every_turn_brings_the_whole_history_and_the_system_prompt_which_can_be_changed() -> None:
    async with chat(system="be brief") as pilot:
        await ask(pilot, "echo one")
        view = await ask(pilot, "messages please")
        assert view.answer.text == "system=be brief;user=echo one;assistant=one;user=messages please;"
        await pilot.press("f4")
        assert isinstance(pilot.app.screen, SystemScreen)
        pilot.app.screen.query_one(TextArea).text = "you are a pirate"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
        assert (await ask(pilot, "messages")).answer.text.startswith("system=you are a pirate;")
        assert "system prompt" in seen(pilot)


async def test_another_model_takes_another_engine_and_keeps_the_conversation() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        await pilot.press("f2")
        assert isinstance(pilot.app.screen, ModelScreen)
        assert pilot.app.screen.query_one(OptionList).option_count >= 9
        pilot.app.screen.query_one(Input).focus()
        await pilot.press(*"other", "enter")
        state = lambda: pilot.app.engine_state  # type: ignore[attr-defined]  # noqa: E731
        await until(pilot, lambda: state().phase == "ready" and state().model == "other")
        assert "assistant=one" in (await ask(pilot, "messages")).answer.text


async def test_a_key_changes_the_theme_and_help_opens_with_a_question_mark_and_closes() -> None:
    async with chat() as pilot:
        dark = pilot.app.theme
        await pilot.press("ctrl+t")
        assert pilot.app.theme != dark
        await pilot.press("?")
        assert isinstance(pilot.app.screen, HelpScreen)
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, ChatScreen)
        await pilot.press("w", "h", "y", "?")
        assert screen(pilot).query_one(PromptInput).text == "why?"


async def test_the_welcome_stays_until_the_first_question_and_the_panel_shows_its_blocks() -> None:
    async with chat() as pilot:
        assert notes(pilot), "the model is ready"
        assert "Ask something" in seen(pilot)
        await ask(pilot, "echo one")
        assert "Ask something and" not in seen(pilot)
        await pilot.press("f5")
        await until(pilot, lambda: "idle" in seen(pilot))
        shown = seen(pilot)
        assert "3 of 64 blocks" in shown
        assert "0 → 3" in shown
        assert "2 → 5" in shown
        assert " 8/16" in shown
        assert "···oo▅" in shown
        assert "1 contiguous run" in shown


async def test_the_panel_is_out_of_the_way_in_a_small_terminal_until_asked_for() -> None:
    async with chat(size=(80, 24)) as pilot:
        await ask(pilot, "echo one")
        assert screen(pilot).query_one(MemoryPanel).size.height == 0
        await pilot.press("f5")
        await pilot.pause()
        assert screen(pilot).query_one(MemoryPanel).size.height > 0
        assert screen(pilot).query_one(Transcript).size.height >= 4
        assert "0 → 3" in seen(pilot)
        await pilot.press("f5")
        await pilot.pause()
        assert screen(pilot).query_one(MemoryPanel).size.height == 0


async def test_keys_behind_one_whose_command_has_yet_to_run_wait_for_it() -> None:
    async with chat() as pilot:
        prompt, pane = screen(pilot).chat_pane.prompt, screen(pilot).chat_pane
        pane.num_waiting += 1
        pilot.app.post_message(events.Key("a", "a"))
        await pilot.pause(0.2)
        assert prompt.text == ""
        pane.num_waiting -= 1
        await until(pilot, lambda: prompt.text == "a")
        screen(pilot).action_command("model")
        assert pane.num_waiting == 1
        await until(pilot, lambda: isinstance(pilot.app.screen, ModelScreen))
        assert pane.num_waiting == 0


async def test_a_megabyte_can_be_pasted_and_sent() -> None:
    text = "echo " + "lorem ipsum\n" * 90_000
    async with chat() as pilot:
        pilot.app.post_message(events.Paste(text))
        prompt = screen(pilot).query_one(PromptInput)
        await until(pilot, lambda: "90,001 lines" in prompt.text)
        assert prompt.full_text == text
        await pilot.press("enter")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.turns)
        assert screen(pilot).chat_pane.conversation.turns[0].question == text.strip()


async def test_the_transcript_follows_unless_the_reader_scrolled_up() -> None:
    async with chat(size=(80, 24)) as pilot:
        transcript = screen(pilot).query_one(Transcript)
        await ask(pilot, "long")
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 50)
        await pilot.press("pageup", "pageup")
        await pilot.pause()
        above = transcript.scroll_y
        assert above < transcript.max_scroll_y
        await pilot.press("ctrl+end")
        await pilot.pause()
        await say(pilot, "endless")
        await until(pilot, lambda: "word" in seen(pilot))
        await pilot.press("pageup")
        await pilot.wait_for_animation()
        await pilot.pause()
        held = transcript.scroll_y
        await pilot.pause(0.5)
        assert transcript.scroll_y == held


@pytest.mark.parametrize(("lines_ahead", "fewest"), [(0, 3), (6, 1)])
async def test_a_paragraph_costs_a_layout_per_line_or_one(
    lines_ahead: int, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[str, int] = {"layouts": 0, "scrollbars": 0}
    reflow, scroll_update = Compositor.reflow, LineView._scroll_update

    def count_layout(compositor: Compositor, parent: Widget, size: Size) -> ReflowResult:
        counted["layouts"] += 1
        return reflow(compositor, parent, size)

    def count_scrollbar(view: LineView, size: Size) -> None:
        counted["scrollbars"] += 1
        scroll_update(view, size)

    async with chat(size=(120, 40)) as pilot:
        await say(pilot, "never")
        await until(pilot, lambda: screen(pilot).chat_pane.run)
        view = screen(pilot).query_one(AnswerView)

        async def add(text: str) -> None:
            view.add(text)
            with pilot.app.batch_update():
                await view.flush(lines_ahead)
                await asyncio.sleep(0.005)
            await pilot.pause(0.1)

        await add("The first paragraph.\n\n")
        monkeypatch.setattr(Compositor, "reflow", count_layout)
        monkeypatch.setattr(LineView, "_scroll_update", count_scrollbar)
        for number in (2, 3, 4):
            await add(f"The line of number {number} is as wide as the answer, or nearly, for the next to begin. ")
        assert fewest <= counted["layouts"] <= fewest + 1, "the second if the widget is mounted late"
        assert counted["scrollbars"] == 0, "of the memory view, which stays as it is"


async def test_a_large_pool_is_drawn_by_the_line() -> None:
    async with chat(size=(200, 50)) as pilot:
        from minillm.ui.memory.pool import Pool

        screen(pilot).show_pool(Pool(20_000, 16, 1024))
        await pilot.press("f5")
        await pilot.pause()
        pool_map = screen(pilot).query_one(PoolMap)
        pool_map.focus()  # else empty rows are folded
        await pilot.pause()
        assert pool_map.virtual_size.height == 625
        assert len(list(pool_map.walk_children())) == 0


async def test_a_click_on_a_key_in_the_last_line_presses_it() -> None:
    async with chat(size=(140, 40)) as pilot:
        bar = screen(pilot).query_one(KeyBar)
        shown = bar.render().plain
        assert " f2 Model " in shown
        await pilot.click(KeyBar, offset=(shown.index("Help"), 0))
        assert isinstance(pilot.app.screen, HelpScreen)


async def test_the_last_line_shows_as_many_keys_as_fit() -> None:
    async with chat(size=(40, 24)) as pilot:
        shown = screen(pilot).query_one(KeyBar).render().plain
        assert 0 < len(shown) <= 40
        assert "Help" in shown
        assert "Quit" in shown


async def test_beside_a_model_the_screen_is_drawn_no_more_often_than_its_share_allows() -> None:
    drawn = []

    async def draw() -> None:
        drawn.append(time.monotonic())
        busy = time.process_time() + 0.02
        while time.process_time() < busy:
            pass

    async with chat() as pilot:
        drawing = Drawing(screen(pilot), draw, share=0.02, longest=0.5)
        drawing.soon()
        drawing.soon()
        await until(pilot, lambda: drawing.interval == 0.1 and len(drawn) == 1)
        await pilot.pause(0.3)
        assert len(drawn) == 1, "once for all the news"
        drawing.pace(True)
        for _ in range(3):
            before = len(drawn)
            drawing.soon()
            while len(drawn) == before:
                await pilot.pause(0.02)
        await pilot.pause(0.1)
        assert 0.4 < drawing.interval <= 0.5  # 20 ms are its share of a second: more than the longest pause
        drawing.soon()
        drawing.pace(False)  # waiting text need not wait longer
        assert drawing.interval == 0.1
        await until(pilot, lambda: len(drawn) == 5)


@pytest.mark.parametrize("name", ["", "system", "palette"])
async def test_sizes_that_come_late_do_not_keep_the_app_busy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in a screen's queue, with something between them: each would bring back the other, for ever."""
    resized, sizes = Screen._screen_resized, []

    def counted(of: Screen, size: Size) -> None:
        sizes.append(size)
        assert len(sizes) < 100, sizes
        resized(of, size)

    monkeypatch.setattr(Screen, "_screen_resized", counted)
    async with chat(size=(130, 40)) as pilot:
        if name == "palette":
            await pilot.press("ctrl+p")
        elif name:
            await say(pilot, f"/{name}")
        top, now = pilot.app.screen, pilot.app.size
        assert (top is screen(pilot)) == (not name)
        with pilot.app.batch_update():  # as while parts of a conversation are mounted
            for size in (Size(40, 10), now):
                top.post_message(events.Resize(size, size))
                top.call_later(lambda: None)
            await asyncio.sleep(0.1)
        await pilot.pause()
        assert [each.size for each in pilot.app.screen_stack] == [now] * len(pilot.app.screen_stack)
        assert screen(pilot).has_class("-wide")


async def test_the_app_ends_after_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app waits even for a slow engine."""
    stop, codes = EngineProcess.stop, []

    async def slow_stop(process: EngineProcess) -> None:
        await asyncio.sleep(0.3)
        await stop(process)
        codes.append(await process.wait())

    monkeypatch.setattr(EngineProcess, "stop", slow_stop)
    async with chat() as pilot:
        pilot.app.exit()
    assert -signal.SIGKILL in codes


async def test_the_app_ends_while_its_engine_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is sent meanwhile is lost."""
    connect, processes = EngineProcess.connect, []

    async def slow_connect(process: EngineProcess, protocol: asyncio.Protocol) -> None:
        processes.append(process)
        await asyncio.sleep(0.3)
        await connect(process, protocol)

    async with chat() as pilot:
        monkeypatch.setattr(EngineProcess, "connect", slow_connect)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: processes)
        pilot.app.post_message(EngineCommand(Forget("a")))
        await pilot.pause()
        pilot.app.exit()
    assert pilot.app.return_code == 0
    assert await processes[0].wait() == -signal.SIGKILL


@pytest.mark.parametrize("what", ["answer", "dialog", "conversation"])
async def test_what_is_still_to_come_when_the_app_is_left_is_no_defect(what: str, tmp_path: Path) -> None:
    """The screen takes no widget any more. The last words are on disk."""
    store = SessionStore(tmp_path)
    async with chat(store=store) as pilot:
        await ask(pilot, "hello")
        await say(pilot, "never")
        pane = screen(pilot).chat_pane
        await until(pilot, lambda: pane.run is not None)
        request = pane.conversation.turns[-1].answer.request_id
        if what == "answer":
            pane.post_message(EngineEvent(TextDelta(request, 0, "the last words", 3)))
            pane.post_message(EngineEvent(Finished(request, 0, "stop", 3, 50.0, 23)))
        elif what == "conversation":
            pane.call_command("new", "")
        pilot.app.exit()
        if what == "dialog":
            pilot.app.push_screen(SamplingScreen(Settings("fake")))
        await asyncio.sleep(0.1)  # all that was asked for is done by the tasks of the app
    assert pilot.app.return_code == 0
    if what == "answer":
        [saved] = store.list()
        assert store.load(saved.path).turns[-1].answer.text == "the last words"
