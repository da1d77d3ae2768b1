"""Test keys from the user's config, and the menu that needs neither function keys nor Alt."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lib.ui import ask, chat, screen, seen, until
from minillm.errors import UsageError
from minillm.ui.chat_screen import bindings_by_name
from minillm.ui.help import HelpScreen
from minillm.ui.keymap import LETTERS, KeyMenu, checked_keymap, keys_of, shown_keys


@pytest.mark.parametrize(
    ("keymap", "words"),
    [
        ({"edti": "ctrl+e"}, "unknown.*'edti'.*edit"),
        ({"edit": 3}, "edit must be a key or a list of keys, not 3"),
        ({"edit": []}, "edit must be a key"),
        ({"edit": "Ctrl-E"}, "is not a key"),
        ({"edit": "e"}, "is needed for typing"),
        ({"edit": "question_mark"}, "is needed for typing"),
        ({"edit": "ctrl+q"}, "ctrl\\+q is the key of both"),
        ({"edit": "f20", "copy": ["alt+y", "f20"]}, "f20 is the key of both edit and copy"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(keymap: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        checked_keymap(keymap, bindings_by_name())
    assert "\n" not in str(caught.value)


def test_every_action_has_a_key_besides_function_keys_and_alt() -> None:
    for name, keys in keys_of(bindings_by_name()).items():
        if all(re.match(r"f\d|.*alt\+", key) for key in keys):
            assert name in LETTERS, name
    assert len(set(LETTERS.values())) == len(LETTERS)
    assert set(LETTERS) <= set(keys_of(bindings_by_name()))


@pytest.mark.anyio
async def test_keys_are_replaced_and_shown() -> None:
    async with chat(size=(120, 50), keymap={"edit": ["ctrl+e", "f12"], "help": "ctrl+b", "quit": "f20"}) as pilot:
        await ask(pilot, "echo one")
        await pilot.press("alt+e")
        assert screen(pilot).chat_pane.prompt.text == "", "the old key is free"
        await pilot.press("ctrl+e")
        await until(pilot, lambda: screen(pilot).chat_pane.prompt.text == "echo one")
        await pilot.press("escape", "ctrl+b")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        assert "Ctrl+E, F12" in seen(pilot)


@pytest.mark.anyio
async def test_the_menu_does_everything_by_letters() -> None:
    async with chat(size=(120, 40)) as pilot:
        await ask(pilot, "echo one")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: isinstance(pilot.app.screen, KeyMenu) and "regenerate" in seen(pilot))
        await pilot.press("r")
        pane = screen(pilot).chat_pane
        await until(pilot, lambda: len(pane.conversation.first) == 2 and pane.run is None)
        await pilot.press("ctrl+g", "1")
        await until(pilot, lambda: screen(pilot).memory_view == "pool")
        await pilot.press("ctrl+g", "escape")
        await until(pilot, lambda: pilot.app.screen is screen(pilot))


@pytest.mark.anyio
async def test_the_menu_fits_and_scrolls_on_a_small_screen() -> None:
    async with chat(size=(40, 12)) as pilot:
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "Press a letter" in seen(pilot) and "h  help" in seen(pilot))
        for words in ("f  find              Ctrl+F", "n  new               Ctrl+N"):
            assert words in seen(pilot)
        await pilot.press(*["down"] * 40)
        await until(pilot, lambda: "q  quit" in seen(pilot))


@pytest.mark.anyio
async def test_the_help_and_the_menu_show_the_keys_that_are_bound() -> None:
    keymap = {
        "stop": "f14", "select-next": "ctrl+alt+n", "expand": "f15", "scroll-home": "f16", "branch-next": "f17",
        "menu": "ctrl+y", "copy": "f18", "next": "f19",
    }  # fmt: skip
    async with chat(size=(130, 70), keymap=keymap) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen) and "the view in" in seen(pilot))
        shown = seen(pilot)
        for words in (
            r"F14 +stop the answer", r"Alt\+↑, Ctrl\+Alt\+N +select a turn", "F15 +the view in",
            r"F16, Ctrl\+End +go to", r"Alt\+←, F17 +switch between", r"Ctrl\+Y: all actions", "F18 +copy the answer",
            "F19 +go to the view",
            r"Page Up, Page Down +scroll by pages; Ctrl\+↑ ↓ by lines", "1 … 9 +accept a candidate",
        ):  # fmt: skip
            assert re.search(words, shown), (words, shown)
        assert "Alt+V" not in seen(pilot)
        await pilot.press("escape", "ctrl+y")
        await until(pilot, lambda: isinstance(pilot.app.screen, KeyMenu) and "F18" in seen(pilot))


def test_keys_are_shown_as_people_write_them() -> None:
    assert shown_keys(["alt+left"], ["alt+right"]) == "Alt+← →"
    assert shown_keys(["up"], ["down"]) == "↑ ↓"
    assert shown_keys(["pageup"], ["ctrl+home", "f2"]) == "Page Up, Ctrl+Home, F2"
