"""Branches, candidates, commands and saved conversations, driven on the scripted engine."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from textual import events
from textual.containers import Grid
from textual.geometry import Size
from textual.widgets import Collapsible, Input, OptionList, Static

from lib.ui import answered, ask, chat, is_told, notes, say, screen, seen, until
from minillm import system
from minillm.service.messages import CacheChanged, LogEntry, MemoryUse, TokenChoice
from minillm.ui.chat.answer_view import AnswerView
from minillm.ui.chat.candidates import CandidateCard, CandidatesView, candidate_facts
from minillm.ui.chat.conversation import Answer, Candidate
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.transcript import Transcript
from minillm.ui.dialogs import ProbabilityScreen, SamplingScreen, SessionsScreen
from minillm.ui.engine_app import EngineEvent

pytestmark = pytest.mark.anyio


async def test_editing_a_question_begins_a_branch_and_keys_switch_back() -> None:
    async with chat() as pilot:
        first = await ask(pilot, "echo one")
        await ask(pilot, "echo two")
        await pilot.press("alt+up", "alt+up")
        assert screen(pilot).query_one(Transcript).selected is first
        await pilot.press("alt+e")
        prompt = screen(pilot).query_one(PromptInput)
        assert prompt.text == "echo one"
        edited = await ask(pilot, "messages other")
        assert edited.answer.text == "user=messages other;", "what came after the old question is not told"
        assert "‹ 2/2 ›" in seen(pilot)
        assert "echo two" not in seen(pilot)
        await pilot.press("alt+left")
        await until(pilot, lambda: "echo two" in seen(pilot))
        assert "‹ 1/2 ›" in seen(pilot)
        again = await ask(pilot, "messages now")
        assert again.answer.text == "user=echo one;assistant=one;user=echo two;assistant=two;user=messages now;"


async def test_regenerating_is_a_branch_beside_the_first_answer() -> None:
    async with chat() as pilot:
        before = await ask(pilot, "echo one")
        await pilot.press("alt+r")
        again = await answered(pilot, before)
        assert again.question == "echo one"
        assert screen(pilot).chat_pane.conversation.siblings(again) == [before, again]
        lines = seen(pilot).splitlines()
        [marked] = [number for number, line in enumerate(lines) if "2/2" in line]
        assert "echo one" in lines[marked + 1], "where branches begin is said right above the question"


async def test_escape_leaves_the_question_as_it_was_and_continuing_adds_to_the_same_answer() -> None:
    async with chat() as pilot:
        turn = await ask(pilot, "echo one")
        await pilot.press("alt+e", "escape")
        assert screen(pilot).query_one(PromptInput).text == ""
        await pilot.press("alt+c")
        # The script answers the last message, from either side.
        await until(pilot, lambda: turn.answer.text == "oneone" and not turn.answer.is_open)
        await until(pilot, lambda: "oneone" in seen(pilot))
        await ask(pilot, "echo two")
        assert len(screen(pilot).chat_pane.conversation.turns) == 2


@pytest.mark.parametrize("key", ["escape", "enter"])
async def test_the_unsent_text_comes_back_after_editing(key: str) -> None:
    async with chat() as pilot:
        turn = await ask(pilot, "echo one")
        await pilot.press(*"new")
        await pilot.press("alt+e", "alt+e")
        prompt, waiting = screen(pilot).query_one(PromptInput), screen(pilot).chat_pane.waiting
        assert prompt.text == "echo one"
        assert waiting.unsent == "new"
        await pilot.press(key)
        if key == "enter":
            await answered(pilot, turn)
        await until(pilot, lambda: prompt.text == "new")
        assert waiting.unsent == "new"


async def test_questions_that_wait_come_back_in_a_new_conversation() -> None:
    async with chat() as pilot:
        await say(pilot, "endless")
        await until(pilot, lambda: screen(pilot).chat_pane.run is not None)
        for question in ("echo two", "echo three"):
            await say(pilot, question)
        await until(pilot, lambda: "2 questions queued" in seen(pilot))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text == "echo two\necho three")
        assert not screen(pilot).chat_pane.conversation.turns


async def test_an_answer_that_fills_the_context_cannot_be_continued_and_stays() -> None:
    async with chat(beams={"beam_width": 2}) as pilot:
        await say(pilot, "/beams 1")
        turn = await ask(pilot, "echo fit more")
        await pilot.press("alt+c")
        await until(pilot, lambda: any("cannot continue" in note for note in notes(pilot)))
        assert turn.answer.text == "fit more"
        assert screen(pilot).chat_pane.conversation.turns == [turn]
        assert screen(pilot).chat_pane.run is None


async def test_one_of_the_candidates_is_accepted_the_others_become_branches_and_that_can_be_undone() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        turn = await ask(pilot, "choose")
        assert [card.index for card in screen(pilot).query(CandidateCard)] == [0, 1, 2]
        assert "sample3 sample3 sample3" in seen(pilot)
        await pilot.press("2")
        await until(pilot, lambda: not turn.answer.candidates)
        assert turn.answer.text == "sample2 sample2 "
        await until(pilot, lambda: not screen(pilot).query(CandidatesView) and "sample2 sample2" in seen(pilot))
        assert "sample3" not in seen(pilot)
        await until(pilot, lambda: "‹ 2/3 ›" in seen(pilot))
        await pilot.press("alt+u")
        await until(pilot, lambda: len(screen(pilot).query(CandidateCard)) == 3)
        assert "‹" not in seen(pilot)
        await pilot.press("3")
        await until(pilot, lambda: "‹ 3/3 ›" in seen(pilot))
        assert turn.answer.text == "sample3 sample3 sample3 "
        await pilot.press("alt+left")
        await until(pilot, lambda: "‹ 2/3 ›" in seen(pilot) and "sample2 sample2" in seen(pilot))
        await ask(pilot, "echo on it goes")
        await pilot.press("alt+u")
        assert len(screen(pilot).chat_pane.conversation.siblings(turn)) == 3, "it was asked on since"


async def test_a_click_focuses_a_card_and_two_accept_it() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        turn = await ask(pilot, "choose")
        card = list(screen(pilot).query(CandidateCard))[1]
        await pilot.click(card)
        await pilot.pause()
        assert turn.answer.candidates
        assert card.has_focus
        await pilot.press("alt+y")
        await until(pilot, lambda: pilot.app.clipboard == "sample2 sample2 ")
        await pilot.click(card, times=2)
        await until(pilot, lambda: turn.answer.text == "sample2 sample2 ")


async def test_tab_goes_to_the_first_card_and_space_shows_it_on_the_whole_screen() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        turn = await ask(pilot, "choose")
        await pilot.press("tab")
        card = screen(pilot).query(CandidateCard).first()
        assert card.has_focus
        await pilot.press("space")
        await until(pilot, lambda: card.size.width > 100)
        await pilot.press("escape")
        await until(pilot, lambda: card.size.width < 100)
        assert turn.answer.candidates, "nothing was accepted"
        await pilot.press("tab", "enter")
        await until(pilot, lambda: turn.answer.text == "sample2 sample2 ")


async def test_on_the_whole_screen_a_card_has_all_of_its_text_and_says_how_to_leave() -> None:
    async with chat(beams={"beam_width": 2}, size=(100, 30)) as pilot:
        turn = await ask(pilot, "search")
        for number, candidate in enumerate(turn.answer.candidates):
            candidate.text = f"These are words that both begin with, and {number}"
        view = screen(pilot).query_one(CandidatesView)
        await view.flush()
        await until(pilot, lambda: "all begin with: These are words" in seen(pilot))
        await pilot.press("tab", "space")
        await until(pilot, lambda: "Esc goes back" in seen(pilot))
        assert "These are words that both begin with, and 0" in seen(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: "all begin" in seen(pilot) and "Esc goes back" not in seen(pilot))
        view.on_resize(events.Resize(Size(20, 30), Size(20, 30)))
        assert view.query_one(Grid).styles.grid_size_columns == 1, "narrower than a card"


def test_of_a_cards_facts_those_are_shown_that_have_room() -> None:
    beam = Candidate("x", 1234, "stop", -0.5417, -66.1)
    assert candidate_facts(beam, 80) == "score -0.542 · 1,234 tokens · ✓ · log p -66.1"
    assert candidate_facts(beam, 33) == "score -0.542 · 1,234 tokens · ✓"
    assert candidate_facts(beam, 20) == "score -0.542"
    assert candidate_facts(beam, 3) == "score -0.542"


async def test_the_first_copy_of_an_answer_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat() as pilot:
        drawn: list[str] = []
        monkeypatch.setattr(screen(pilot).memory.drawing, "at_once", lambda: drawn.append("at once"))
        for owner in ("a", "a", "b"):
            log = [LogEntry(1.0, "allocate", 1, owner, [3]), LogEntry(1.0, "copy", 1, owner, [3, 4])]
            screen(pilot).post_message(EngineEvent(CacheChanged(log=log)))
        await until(pilot, lambda: drawn == ["at once"] * 2)


async def test_a_sequence_is_called_as_its_card_and_once_it_is_accepted_as_its_turn() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        turn = await ask(pilot, "choose")
        owner = turn.answer.request_id
        assert screen(pilot).memory.name_of(owner, 2) == "turn 1 · answer 3"
        assert screen(pilot).memory.name_of(owner, -1) == "turn 1"
        await say(pilot, "/accept 3")
        await until(pilot, lambda: not turn.answer.candidates)
        assert screen(pilot).memory.name_of(owner, 2) == "turn 1 · answer 3"


async def test_a_question_that_waits_comes_back_where_one_has_to_choose_first() -> None:
    async with chat(sampling={"n": 5}) as pilot:
        await say(pilot, "choose")
        await until(pilot, lambda: "sample4 sample4" in seen(pilot))
        await say(pilot, "echo next")
        await until(pilot, lambda: "1 question queued" in seen(pilot))
        screen(pilot).chat_pane.run.stop()  # type: ignore[union-attr]
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text == "echo next")
        await until(pilot, lambda: is_told(pilot, "choose an answer first"))


async def test_dialogs_are_not_covered_by_what_was_said_before_and_have_no_commands() -> None:
    async with chat() as pilot:
        await say(pilot, "/modle")
        await until(pilot, lambda: len(pilot.app._notifications) == 1)
        await pilot.press("f3")
        await until(pilot, lambda: "repetition_penalty" in seen(pilot) and not pilot.app._notifications)
        await pilot.press("ctrl+p")
        await pilot.pause()
        assert isinstance(pilot.app.screen, SamplingScreen)


async def test_models_say_whether_they_fit_on_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory", lambda: (8 << 30, 8 << 30))
    monkeypatch.setattr("minillm.loading.bandwidth.kept_rate", lambda device: 20e9)
    async with chat(size=(80, 24)) as pilot:
        pool = screen(pilot).chat_pane.pool
        assert pool is not None
        pool.use = MemoryUse(64 << 30, 32 << 30, 1 << 30, 1 << 30, 0)  # of the machine
        await pilot.press("f2")
        await until(pilot, lambda: "smollm2-360m" in seen(pilot))
        [line] = [line for line in seen(pilot).splitlines() if "smollm2-135m " in line and "257 MiB" in line]
        assert re.search(r"257 MiB  CPU +[\d,]+ tok/s ", line)
        await pilot.press("end")
        await until(pilot, lambda: "llama-3.1-8b" in seen(pilot))
        [line] = [line for line in seen(pilot).splitlines() if "llama-3.1-8b " in line]
        assert re.search(r"15\.0 GiB  CPU q4_k_m +\d\.\d tok/s ", line), "in the quantization that Enter loads"


async def test_at_80_columns_the_probabilities_leave_room_for_their_keys() -> None:
    async with chat(size=(80, 24)) as pilot:
        await ask(pilot, "echo " + "many words\n" * 60)
        await pilot.press("alt+p")
        await until(pilot, lambda: "continue from there" in seen(pilot) and "▸" in seen(pilot))


async def test_candidates_are_there_again_when_the_conversation_is_opened(tmp_path: Path) -> None:
    async with chat(sampling={"n": 3}, store=SessionStore(tmp_path)) as pilot:
        await ask(pilot, "choose")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not screen(pilot).query(CandidateCard))
        await say(pilot, "/sessions")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        await until(pilot, lambda: pilot.app.screen.query_one(OptionList).highlighted == 0)
        await pilot.press("enter")
        await until(pilot, lambda: len(screen(pilot).query(CandidateCard)) == 3)
        assert "sample3 sample3 sample3" in seen(pilot)
        await pilot.press("1")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.turns[0].answer.text == "sample1 ")


@pytest.mark.parametrize("number", ["²", 5000 * "1", "0", "3"])
async def test_a_candidate_that_does_not_exist_is_not_accepted(number: str) -> None:
    async with chat(sampling={"n": 2}) as pilot:
        turn = await ask(pilot, "echo hello")
        await say(pilot, f"/accept {number}")
        told = "give a candidate's number from 1 to 2"
        await until(pilot, lambda: is_told(pilot, told))
        assert len(turn.answer.candidates) == 2


async def test_accept_without_candidates_is_told() -> None:
    async with chat() as pilot:
        await say(pilot, "/accept 1")
        told = "there are no answers to choose from; /n 3 asks for three"
        await until(pilot, lambda: is_told(pilot, told))


async def test_accepting_early_stops_the_others() -> None:
    async with chat(sampling={"n": 5}) as pilot:
        await say(pilot, "choose")
        await until(pilot, lambda: "sample4 sample4" in seen(pilot))
        await say(pilot, "/accept 4")
        turn = screen(pilot).chat_pane.conversation.turns[0]
        await until(pilot, lambda: turn.answer.text.startswith("sample4"))
        assert screen(pilot).chat_pane.run is None


async def test_who_goes_on_without_choosing_takes_the_first() -> None:
    async with chat(sampling={"n": 2}) as pilot:
        turn = await ask(pilot, "choose")
        await say(pilot, "/n 1")
        await ask(pilot, "messages")
        assert turn.answer.text == "sample1 "
        last = screen(pilot).chat_pane.conversation.turns[-1]
        assert last.answer.text == "user=choose;assistant=sample1 ;user=messages;"


async def test_beams_show_their_log_probability_and_change_places() -> None:
    async with chat(beams={"beam_width": 3}) as pilot:
        await say(pilot, "search")
        await until(pilot, lambda: "beam 1" in seen(pilot))
        turn = await answered(pilot, None)
        assert [candidate.text for candidate in turn.answer.candidates] == ["beam 3 ends", "beam 2 ends", "beam 1 ends"]
        assert "score -" in seen(pilot)
        await pilot.press("1", "left")
        await until(pilot, lambda: turn.answer.text == "beam 3 ends")


async def test_reasoning_is_folded() -> None:
    async with chat() as pilot:
        turn = await ask(pilot, "think")
        assert turn.answer.text == "<think>let me see</think>\n\nfour"
        assert "four" in seen(pilot)
        assert "let me see" not in seen(pilot)
        await until(pilot, lambda: "reasoning · about 3 words" in seen(pilot))
        screen(pilot).query_one(Collapsible).collapsed = False
        await until(pilot, lambda: "let me see" in seen(pilot))


async def test_wrong_commands_are_explained_and_others_completed_while_typed() -> None:
    async with chat() as pilot:
        wrong = {
            "/modle": "did you mean /model",
            "/set heat 3": "unknown parameter",
            "/copy": "there is no question yet",
            "/copy foo": "use /copy or /copy code",
            "/compact foo": "use /compact or /compact undo",
            "/branch foo": "use /branch next",
            "/think " + 5000 * "9": "use /think on",
            "/depths 1," + 5000 * "9": "use /depths 256,512,1024",
        }
        for text, words in wrong.items():
            await say(pilot, text)
            await until(pilot, partial(is_told, pilot, words))
            assert len(pilot.app._notifications) == 1, "in place of the one before"
        assert screen(pilot).query_one(PromptInput).text == ""
        await say(pilot, "/set temperature 0.25")
        assert screen(pilot).app.settings.sampling["temperature"] == 0.25
        for question in ("// a comment", "/* another */", "/usr/bin/env is what?", " /help is what?"):
            assert (await ask(pilot, question)).question == question.strip(), "no command"
        await pilot.press("slash", "b", "e")
        await until(pilot, lambda: "/beams N" in seen(pilot))
        await pilot.press("tab")
        assert screen(pilot).query_one(PromptInput).text == "/beams "
        await pilot.press("4", "enter")
        await until(pilot, lambda: screen(pilot).app.settings.num_candidates == 4)


async def test_what_was_sent_comes_back_with_the_arrow_keys_and_the_oldest_turns_go_from_a_full_context() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        await ask(pilot, "echo two")
        prompt = screen(pilot).query_one(PromptInput)
        prompt.text = "draft"
        await pilot.press("up")
        assert prompt.text == "echo two"
        await pilot.press("up")
        assert prompt.text == "echo one"
        await pilot.press("down", "down")
        assert prompt.text == "draft"
        turn = await ask(pilot, "fit into it")
        assert turn.answer.text == "fit into it"
        assert any("no longer sees the oldest 2 turns" in note for note in notes(pilot))
        assert len(screen(pilot).chat_pane.conversation.turns) == 3, "they stay on the screen"


async def test_of_the_alternatives_shown_one_is_picked_and_the_answer_goes_on_from_it_in_a_branch() -> None:
    async with chat() as pilot:
        first = await ask(pilot, "echo xyz")
        await pilot.press("alt+p")
        await until(pilot, lambda: isinstance(pilot.app.screen, ProbabilityScreen))
        await pilot.pause()
        text = seen(pilot)
        assert "token 1 of 3" in text
        assert "95.1%" in text
        assert "\x1b" not in text
        assert "␛[31m" in text
        await pilot.press("right", "right", "right")
        assert "token 3 of 3" in str(pilot.app.screen.query_one("#alternatives", Static).render())
        await pilot.press("left", "down")  # to the token that was said
        assert "▸  a␛[31m" in str(pilot.app.screen.query_one("#alternatives", Static).render())
        await pilot.press("up", "enter")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.leaf is not first)
        turn = await answered(pilot, first)
        assert screen(pilot).chat_pane.conversation.siblings(turn) == [first, turn]
        assert turn.question == first.question
        assert turn.answer.text.startswith("a\x1b[31mb")
        assert [token.text for token in turn.answer.tokens[:2]] == ["a\x1b[31m", "b"]
        assert turn.answer.finish_reason == "stop"
        assert first.answer.text == "xyz"
        assert "2/2" in seen(pilot)


async def test_a_token_without_a_text_and_a_part_of_a_character_are_no_forks() -> None:
    def choice(text: str, other: str) -> TokenChoice:
        return TokenChoice(text, -0.1, [text, other], [-0.1, -2.0])

    async with chat() as pilot:
        pilot.app.push_screen(ProbabilityScreen([choice("a", ""), choice("b", "\ufffd")]))
        await until(pilot, lambda: isinstance(pilot.app.screen, ProbabilityScreen))
        for key, words in (("", "would end here"), ("right", "part of a character")):
            await pilot.press(*([key] if key else []), "enter")
            assert words in str(pilot.app.screen.query_one(".problem", Static).render())


async def test_all_alternatives_of_a_token_are_seen_in_a_short_terminal() -> None:
    words = [f"word{number}" for number in range(30)]
    tops = (["first", "second", "third", "fourth", "fifth"], [-1.0, -1.1, -2.0, -3.0, -4.0])
    async with chat(size=(40, 12)) as pilot:
        pilot.app.push_screen(ProbabilityScreen([TokenChoice(word, -5.0, *tops) for word in words]))
        await until(pilot, lambda: isinstance(pilot.app.screen, ProbabilityScreen))
        await pilot.press(*["right"] * 15)
        await until(pilot, lambda: "token 16 of 30" in seen(pilot))
        text = seen(pilot)
        assert all(each in text for each in [*tops[0], "word15"]), text
        assert "36.8%" in text


async def test_a_conversation_is_saved_as_it_grows_and_resumed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    async with chat(store=store) as pilot:
        first = await ask(pilot, "echo one")
        await pilot.press("alt+r")
        await answered(pilot, first)
        await say(pilot, "slow")
        await until(pilot, lambda: "word word" in seen(pilot))
        [path] = tmp_path.glob("*.json")
        assert [turn["question"] for turn in json.loads(path.read_text())["turns"]] == ["echo one", "echo one", "slow"]
        await pilot.press("escape")
        await until(pilot, lambda: screen(pilot).chat_pane.run is None)
    async with chat(store=store) as pilot:
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        pilot.app.screen.query_one(Input).value = "nowhere"
        await until(pilot, lambda: not pilot.app.screen.query_one(OptionList).option_count)
        pilot.app.screen.query_one(Input).value = "ECHO"
        await until(pilot, lambda: pilot.app.screen.query_one(OptionList).option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: len(screen(pilot).chat_pane.conversation.turns) == 2)
        await until(pilot, lambda: "echo one" in seen(pilot) and "stopped" in seen(pilot))
        turn = await ask(pilot, "messages")
        assert turn.answer.text.startswith("user=echo one;assistant=one;user=slow;assistant=word ")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        await pilot.press("delete")
        assert len(list(tmp_path.glob("*.json"))) == 1
        await pilot.press("delete")
        assert not list(tmp_path.glob("*.json"))


async def test_a_conversation_is_exported_and_copied_named_and_found_by_its_name(tmp_path: Path) -> None:
    async with chat() as pilot:
        await ask(pilot, "echo Here:\n```python\nprint(1)\n```\nand\n~~~\nlast\n~~~\n")
        await say(pilot, f"/export {tmp_path}/conversation.md")
        await until(pilot, lambda: (tmp_path / "conversation.md").exists())
        assert "print(1)" in (tmp_path / "conversation.md").read_text()
        await say(pilot, "/copy code")
        await until(pilot, lambda: pilot.app.clipboard == "last\n")
        await pilot.press("alt+y")
        await until(pilot, lambda: "print(1)" in pilot.app.clipboard)
        await say(pilot, "/title Herons of the\tNile")
        await ask(pilot, "echo two")
        await pilot.press("ctrl+n", "ctrl+o")
        await until(pilot, lambda: "2 turns  Herons of the Nile" in seen(pilot))
        await pilot.press(*"nile", "enter")
        await until(pilot, lambda: len(screen(pilot).chat_pane.conversation.turns) == 2)
        assert screen(pilot).chat_pane.conversation.shown_title == "Herons of the Nile"


async def test_every_view_opens_with_its_key_and_closes_with_it() -> None:
    async with chat(size=(150, 44)) as pilot:
        await ask(pilot, "echo one")
        for key, view in (("f6", "tables"), ("f7", "strands"), ("f8", "events"), ("f9", "memory"), ("f10", "steps")):
            await pilot.press(key)
            assert screen(pilot).memory_view == view
        await pilot.press("f10")
        assert screen(pilot).memory_view == ""
        await pilot.press("alt+v")
        assert screen(pilot).memory_view == "steps"
        assert not screen(pilot).query_one("#chat-pane").display
        await pilot.press("alt+v")
        assert screen(pilot).query_one("#chat-pane").display


async def test_a_text_that_begins_with_a_digit_takes_no_candidate() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        turn = await ask(pilot, "echo one")
        await pilot.press("2", "space", *"more")
        prompt = screen(pilot).query_one(PromptInput)
        await until(pilot, lambda: prompt.text == "2 more")
        await until(pilot, lambda: len(turn.answer.candidates) == 3)
        prompt.text = ""
        await pilot.press("2", "0", "space", *"more")
        await until(pilot, lambda: prompt.text == "20 more")
        await until(pilot, lambda: len(turn.answer.candidates) == 3)
        prompt.text = ""
        await pilot.press("2", *"why")
        await until(pilot, lambda: not turn.answer.candidates)
        assert prompt.text == "why", "a question that is typed at once is no text behind the digit"


async def test_a_text_that_begins_with_a_digit_stops_no_candidate_that_is_running() -> None:
    async with chat(sampling={"n": 5}) as pilot:
        await say(pilot, "echo one")
        prompt = screen(pilot).query_one(PromptInput)
        await until(pilot, lambda: prompt.num_picks == 5)
        for character in "20 more":
            pilot.app.post_message(events.Key("space" if character == " " else character, character))
        await until(pilot, lambda: prompt.text == "20 more")
        assert screen(pilot).chat_pane.run is not None, "the candidates go on"
        await pilot.press("escape")
        await until(pilot, lambda: screen(pilot).chat_pane.run is None)


async def test_a_line_that_comes_at_once_is_a_question_wherever_the_keyboard_is() -> None:
    async with chat(sampling={"n": 3}) as pilot:
        first = await ask(pilot, "echo one")
        screen(pilot).query(CandidateCard)[1].focus()
        await pilot.pause()
        names = {" ": "space", "\r": "enter"}
        for character in "echo two words\r":  # as a slow connection brings it: no key waits for the one before
            pilot.app.post_message(events.Key(names.get(character, character), character))
        leaf = await answered(pilot, first)
        assert (leaf.question, screen(pilot).query_one(PromptInput).text) == ("echo two words", "")
        assert first.answer.text == "sample1 ", "the first is taken: Enter was not the card's, nor a space"
        assert screen(pilot).maximized is None


async def test_an_answer_that_is_removed_while_it_appears_fails_nothing() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo one")
        for text in ("one\n\ntwo", "<think>some</think>two"):
            view = AnswerView(Answer("x"))
            view.add(text)
            await screen(pilot).query_one(Transcript).mount(view)
            await pilot.pause()
            showing = AnswerView(Answer("y"))
            showing.add(text)
            mounting = screen(pilot).query_one(Transcript).mount(showing)
            removing = showing.remove()
            await mounting
            await removing
            view.remove()
            view.add(text)
            await view.flush()


@pytest.mark.anyio
async def test_cards_leave_no_hole_and_their_hint_takes_one_line() -> None:
    async with chat(size=(120, 40), sampling={"n": 3}) as pilot:
        await ask(pilot, "several")
        await until(pilot, lambda: "double click" in seen(pilot))
        cards = list(screen(pilot).query(CandidateCard))
        assert cards[0].region.y == cards[1].region.y < cards[2].region.y
        assert cards[2].region.x == cards[0].region.x
        assert cards[2].region.right == cards[1].region.right
        hints = [line for line in seen(pilot).splitlines() if "double click" in line]
        assert "Space: full screen" in hints[0]
        for card in cards:
            widths = {card.scrollable_content_region.width}
            card.show_vertical_scrollbar = True
            await pilot.pause()
            widths.add(card.scrollable_content_region.width)
            assert len(widths) == 1, "its scrollbar takes no column of the text"
