"""Test completions above the prompt, files in a question, and help for the focused widget."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from textual import events
from textual.drivers.headless_driver import HeadlessDriver
from textual.geometry import Region

from lib.ui import FAKE, ask, chat, is_told, notes, say, screen, seen, settled, until
from minillm.errors import UsageError
from minillm.ui.chat.candidates import CandidateCard
from minillm.ui.chat.files import (
    LONGEST_FILE,
    best_matches,
    dropped_files,
    files_below,
    folded_files,
    holds_file,
    is_path,
    matching_paths,
    with_files,
)
from minillm.ui.chat.popup import Popup
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.turn_view import Question
from minillm.ui.demo import DemoApp
from minillm.ui.dialogs import Palette
from minillm.ui.help import HelpScreen, key_lines
from minillm.ui.settings import Settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("notes.md", "src/heron_map.py", "src/deep/heron.txt", "my file.txt", ".hidden", "node_modules/x.js"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_found_by_some_of_their_letters(folder: Path) -> None:
    names = files_below(folder)
    assert names == ["my file.txt", "notes.md", "src/heron_map.py", "src/deep/heron.txt"]
    assert best_matches(names, "heron", 9) == ["src/heron_map.py", "src/deep/heron.txt"]
    assert best_matches(names, "srcmap", 9) == ["src/heron_map.py"]
    assert best_matches(names, "NOTES", 9) == ["notes.md"]
    assert best_matches(names, "xyz", 9) == []
    assert best_matches(names, "", 2) == ["notes.md", "my file.txt"]
    assert best_matches(["map/x", "other/folder/map"], "map", 9) == ["other/folder/map", "map/x"], "a file's own name"
    assert best_matches(["s____map", "xs_map"], "smap", 9) == ["xs_map", "s____map"], "fewer letters between"


def test_a_files_text_follows_the_question_in_a_fence(folder: Path) -> None:
    asked = with_files('Compare @notes.md, and @"my file.txt". Mail a@b.c or @nobody.', folder)
    assert asked == (
        'Compare @notes.md, and @"my file.txt". Mail a@b.c or @nobody.\n\n'
        "```notes.md\ntext of notes.md\n```\n\n```my file.txt\ntext of my file.txt\n```"
    )
    assert holds_file(asked)
    assert not holds_file("Compare @notes.md, and\n\n```py\nx\n```"), "a fence of no file that is named"
    assert with_files(asked, folder) == asked, "an edited question has it already"
    folded, marks = folded_files(f"{asked}\n\n```py\nx\n```")
    assert folded.endswith("\n\n[notes.md: 16 B, 1 line]\n\n[my file.txt: 19 B, 1 line]\n\n```py\nx\n```")
    assert marks["[notes.md: 16 B, 1 line]"] == "```notes.md\ntext of notes.md\n```"
    (folder / "fence.md").write_text("```py\nx\n```\n")
    assert with_files("@fence.md", folder).endswith("\n\n````fence.md\n```py\nx\n```\n````")


def test_what_is_no_text_is_refused_in_one_line(folder: Path) -> None:
    (folder / "picture").write_bytes(b"\x89PNG\0\0")
    (folder / "latin").write_bytes(b"caf\xe9")
    (folder / "large").write_text("x" * (LONGEST_FILE + 1))
    os.mkfifo(folder / "pipe")
    for name, words in (
        ("picture", "not UTF-8 text"), ("latin", "not UTF-8 text"), ("large", "send a part of it"),
        ("src", "is not a file"), ("pipe", "is not a file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words) as caught:
            with_files(f"see @{name}", folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Summarize @missing.txt", "missing.txt"),
        ("@work/long, please", "work/long"), ('see @"no such.md"', "no such.md"),
        ("see @/none", "/none"), ("@~/none.txt", "~/none.txt"),
        (r"@no\ such.md", "no such.md"), ("(see) @src/x.", "src/x"),
    ],
)  # fmt: skip
def test_a_name_of_no_file_is_an_error(question: str, name: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"@{re.escape(name)}: no such file"):
        with_files(question, folder)


@pytest.mark.parametrize(
    "question",
    [
        "tell @nobody", "a@b.c", "@ missing.txt", "at @3.5 GHz or @3/4", "```py\n@app.get\ndef f(): ...\n```",
        "explain\n@pytest.mark.anyio\nasync def test(): ...", "@x.setter\n@y\ndef f(): ...", "see @...",
        "about @gone.md\n\n```gone.md\nits text\n```",
    ],
)  # fmt: skip
def test_other_words_with_an_at_sign_are_words(question: str, folder: Path) -> None:
    assert with_files(question, folder) == question


def test_files_that_are_dropped_on_the_terminal_are_named(folder: Path) -> None:
    (folder / "it's.txt").write_text("its text\n")
    mine, its = f'@"{folder}/my file.txt"', f'@"{folder}/it\'s.txt"'
    for text, named in (
        (f"'{folder}/my file.txt'", mine),
        (f"{folder}/my\\ file.txt ", mine),
        (f"file://{folder}/my%20file.txt\n", mine),
        (f"'{folder}/it'\\''s.txt' \"{folder}/my file.txt\"", f"{its} {mine}"),
        (f"{folder}/notes.md", f"@{folder}/notes.md"),
    ):
        assert dropped_files(text) == named + " ", text
        assert with_files(named, folder) != named, "its text is added"
    for text in ("", "/none/at all", f"see {folder}/notes.md", f"'{folder}/notes.md", str(folder), "/", "'/a\0b'"):
        assert dropped_files(text) == "", text
    for question in (f"'{folder}/my file.txt' says?", f"What says file://{folder}/my%20file.txt", "see @my\\ file.txt"):
        assert with_files(question, folder).endswith("my file.txt\ntext of my file.txt\n```"), question
        assert folded_files(with_files(question, folder))[0].endswith("my file.txt: 19 B, 1 line]"), question
    assert with_files("'/none/x' and \"/b\"", folder) == "'/none/x' and \"/b\""


@pytest.mark.anyio
async def test_a_dropped_file_is_named_in_the_prompt(folder: Path) -> None:
    async with chat() as pilot:
        await pilot.press(*"about ")
        pilot.app.post_message(events.Paste(f"'{folder}/my file.txt'"))
        await until(pilot, lambda: screen(pilot).chat_pane.prompt.text == f'about @"{folder}/my file.txt" ')


@pytest.mark.anyio
async def test_a_file_is_chosen_in_the_popup_and_sent(folder: Path) -> None:
    async with chat(size=(100, 30)) as pilot:
        prompt, popup = screen(pilot).chat_pane.prompt, screen(pilot).query_one(Popup)
        await pilot.press(*"echo @her")
        await until(pilot, lambda: popup.display and "src/deep/heron.txt" in seen(pilot))
        await pilot.press("down", "enter")
        assert prompt.text == "echo @src/deep/heron.txt "
        await until(pilot, lambda: not popup.display)
        await pilot.press("enter")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.num_answers == 1)
        assert "text of src/deep/heron.txt" in screen(pilot).chat_pane.conversation.turns[0].answer.text
        (folder / "large").write_text("x" * (LONGEST_FILE + 1))
        await say(pilot, "see @large")
        await until(pilot, lambda: prompt.text == "see @large")
        assert len(screen(pilot).chat_pane.conversation.turns) == 1


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("{}/s", ["{}/src/"]),
        ("{}/src/", ["{}/src/deep/", "{}/src/heron_map.py"]),
        ("{}/.h", ["{}/.hidden"]),
        ("{}/none/", []),
        ("./src/h", ["./src/heron_map.py"]),
        ("../{name}/n", ["../{name}/node_modules/", "../{name}/notes.md"]),
        ("~/my", ["~/my file.txt"]),
        ("~nobody/", []),
    ],
)
def test_paths_out_of_the_folder_are_found_by_their_beginning(
    letters: str, expected: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    given, *names = (each.format(folder, name=folder.name) for each in (letters, *expected))
    assert is_path(given)
    assert matching_paths(given, folder) == names


@pytest.mark.anyio
async def test_a_path_is_chosen_part_by_part_and_its_text_stays_folded(folder: Path) -> None:
    (folder / "a place").mkdir()
    text = "".join(f"line {number} of many\n" for number in range(400))
    (folder / "a place" / "long.txt").write_text(text)
    async with chat(size=(120, 30)) as pilot:
        pane, popup = screen(pilot).chat_pane, screen(pilot).query_one(Popup)
        await pilot.press(*"think @./a")
        await until(pilot, lambda: popup.display and "./a place/" in seen(pilot))
        await pilot.press("tab")
        await until(pilot, lambda: popup.display and "long.txt" in seen(pilot))
        await pilot.press("tab")
        assert pane.prompt.text == 'think @"./a place/long.txt" '
        await pilot.press("enter")
        await until(pilot, lambda: pane.conversation.num_answers == 1)
        question = pane.conversation.turns[0].question
        assert text.strip() in question, "the model reads all of it"
        await until(pilot, lambda: "[./a place/long.txt: 6.5 KiB, 400 lines]" in seen(pilot))
        assert "line 7 of many" not in str(screen(pilot).query_one(Question).render())
        await until(pilot, lambda: pane.run is None)
        await pilot.press("alt+e")
        assert pane.prompt.text == 'think @"./a place/long.txt"\n\n[./a place/long.txt: 6.5 KiB, 400 lines]'
        assert pane.prompt.full_text == question


@pytest.mark.anyio
async def test_commands_are_chosen_with_arrows_and_run_with_enter() -> None:
    async with chat(size=(100, 30)) as pilot:
        pane, popup = screen(pilot).chat_pane, screen(pilot).query_one(Popup)
        await until(pilot, lambda: any("served" in note for note in notes(pilot)))
        await pilot.pause(0.3)  # what the engine's first words change is drawn
        before = pane.transcript.region
        await pilot.press("slash", "s")
        await until(pilot, lambda: popup.display)
        assert "/sessions [words]" in seen(pilot)
        assert pane.transcript.region == before, "the popup lies above it, and moves nothing"
        assert popup.region.bottom == pane.prompt.region.y
        await pilot.press("down", "down", "tab")
        assert pane.prompt.text == "/set "
        pane.prompt.text = ""
        await pilot.press("slash", "h", "e", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        await pilot.press("escape")
        await pilot.press("slash", "n")
        await until(pilot, lambda: popup.display)
        await pilot.press("escape")
        assert not popup.display
        assert pane.prompt.text == "/n", "only the popup closes"


@pytest.mark.anyio
async def test_a_whole_name_is_the_command_that_enter_runs() -> None:
    async with chat() as pilot:
        await ask(pilot, "echo hello")
        await pilot.press(*"/n", "enter")
        told = "/n needs an argument"
        await until(pilot, lambda: is_told(pilot, told))
        assert screen(pilot).chat_pane.conversation.turns, "/new was run"


@pytest.mark.anyio
async def test_the_popup_fits_above_any_prompt() -> None:
    async with chat(size=(40, 10)) as pilot:
        await pilot.press("slash")
        popup = screen(pilot).query_one(Popup)
        await until(pilot, lambda: popup.display)
        assert Region(0, 0, 40, 10).contains_region(popup.region)


@pytest.mark.anyio
async def test_help_begins_with_the_place_that_has_the_keyboard() -> None:
    async with chat(size=(120, 40), sampling={"n": 2}) as pilot:
        await ask(pilot, "echo one")
        screen(pilot).query(CandidateCard).first().focus()
        await pilot.press("question_mark")
        await until(pilot, lambda: "Here: a candidate" in seen(pilot))
        assert "accept it; the others become branches" in seen(pilot)
        await pilot.press("escape")
        await pilot.press("f3")
        await until(pilot, lambda: "repetition_penalty" in seen(pilot))
        await pilot.press("f1")
        await until(pilot, lambda: "Here: a line of text" in seen(pilot))
        assert "Save" in seen(pilot)


def test_a_meaning_that_is_broken_stays_in_its_column() -> None:
    parts = {
        "Part": {"Alt+E": "edit the question and ask again, as a branch", "/preset [save|delete] [NAME]": "sampling"}
    }
    wide = key_lines(parts, 70).plain.splitlines()
    assert wide[1] == "  Alt+E                     edit the question and ask again, as a"
    assert wide[2] == " " * 28 + "branch"
    assert wide[3:5] == ["  /preset [save|delete] [NAME] ", " " * 28 + "sampling"], "a long key has a line of its own"
    narrow = key_lines(parts, 30).plain.splitlines()
    assert narrow[1:4] == ["  Alt+E ", "    edit the question and ask", "    again, as a branch"]


@pytest.mark.anyio
async def test_the_help_opens_in_the_guided_tour(tmp_path: Path) -> None:
    app = DemoApp(Settings("fake"), SessionStore(tmp_path), engine_command=FAKE, driver_class=HeadlessDriver)
    async with app.run_test() as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


@pytest.mark.anyio
async def test_the_palette_below_the_help_is_not_opened_a_second_time() -> None:
    async with chat() as pilot:
        for key in ("ctrl+p", "f1", "ctrl+p"):
            await pilot.press(key)
            await pilot.pause()
        await until(pilot, lambda: len(pilot.app.screen_stack) == 3)
        for _ in range(2):
            await pilot.press("escape")
            await pilot.pause()
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)


@pytest.mark.anyio
async def test_undo_takes_the_lines_of_a_prompt_away_that_has_a_scrollbar() -> None:
    async with chat() as pilot:
        prompt = screen(pilot).query_one(PromptInput)
        prompt.insert("\n".join(f"line {number}" for number in range(30)))
        await until(pilot, lambda: prompt.show_vertical_scrollbar)
        await pilot.press("ctrl+underscore")
        await pilot.pause()
        assert prompt.text == ""
        await pilot.press("ctrl+y", "alt+z", *"on")
        assert prompt.text == "on"


@pytest.mark.anyio
async def test_without_space_next_to_the_chat_pane_a_view_takes_the_screen() -> None:
    async with chat(size=(40, 12)) as pilot:
        await pilot.press("f7")
        await until(pilot, lambda: "no text is in memory" in seen(pilot))
        await pilot.press("f7")
        await until(pilot, lambda: "Ask something" in seen(pilot))
        await pilot.press("f5")
        await until(pilot, lambda: "Ask something" not in seen(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: "Ask something" in seen(pilot))


@pytest.mark.anyio
async def test_a_terminal_becomes_narrow_while_the_prompt_is_disabled() -> None:
    """As during the guided tour. For one layout, the prompt has no width."""
    async with chat(size=(120, 36)) as pilot:
        screen(pilot).chat_pane.prompt.disabled = True
        await pilot.resize_terminal(40, 12)
        await settled(pilot)


@pytest.mark.anyio
async def test_two_clicks_beside_the_palette_close_it_alone() -> None:
    async with chat() as pilot:
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(pilot.app.screen, Palette))
        palette = pilot.app.screen
        assert isinstance(palette, Palette)
        await palette.dismiss()
        palette.dismiss()
        await pilot.pause()
        assert pilot.app.screen is screen(pilot)
        assert await ask(pilot, "echo on")
