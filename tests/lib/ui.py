"""Drive the app in tests: with Textual's Pilot, on the scripted engine or on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from minillm.ui.app import ChatApp
from minillm.ui.bars import StatusBar
from minillm.ui.chat.conversation import Turn
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.transcript import Note
from minillm.ui.chat_screen import ChatScreen
from minillm.ui.settings import Settings

FAKE: list[str] = []  # the command of the scripted engine, set when the tests begin


@asynccontextmanager
async def chat(
    model: str = "fake",
    size: tuple[int, int] = (120, 40),
    engine_command: Sequence[str] = FAKE,
    store: SessionStore | None = None,
    **settings: Any,
) -> AsyncIterator[Pilot[None]]:
    """Run the app. Its engine is ready, unless the script is asked for a model other than ``fake``."""
    with TemporaryDirectory() as directory:
        store = store or SessionStore(Path(directory))
        app = ChatApp(
            Settings(model, **settings), store, engine_command=engine_command, driver_class=HeadlessDriver
        )  # fmt: skip
        async with app.run_test(size=size) as pilot:
            if model == "fake" or engine_command is not FAKE:
                await until(pilot, lambda: app.chat.query_one(StatusBar).status.activity == "ready", 60)
            yield pilot


async def until(pilot: Pilot[Any], condition: Callable[[], object], seconds: float = 30) -> None:
    pause = 0.02
    with anyio.fail_after(seconds):
        while not condition():
            await pilot.pause(pause)
            pause = min(1.5 * pause, 0.1)


def screen(pilot: Pilot[Any]) -> ChatScreen:
    chat_screen = pilot.app.screen_stack[0]
    assert isinstance(chat_screen, ChatScreen)
    return chat_screen


def is_told(pilot: Pilot[Any], words: str) -> bool:
    """Return whether a notification contains ``words``."""
    return any(words in each.message for each in pilot.app._notifications)


async def say(pilot: Pilot[Any], text: str) -> None:
    """Type something and send it."""
    screen(pilot).query_one(PromptInput).text = text
    await pilot.press("enter")
    await settled(pilot)


async def settled(pilot: Pilot[Any]) -> None:
    """Wait until all messages, and the messages that they cause, are handled and drawn."""
    for _ in range(3):
        for each in (screen(pilot).chat_pane, screen(pilot), pilot.app):
            handled = asyncio.Event()
            if each.is_running and each.call_later(handled.set):
                with anyio.move_on_after(3):  # it may be closed meanwhile
                    await handled.wait()
    await pilot.pause()


async def ask(pilot: Pilot[Any], text: str, seconds: float = 60) -> Turn:
    """Ask, and wait until the answer has ended."""
    before = screen(pilot).chat_pane.conversation.leaf
    await say(pilot, text)
    return await answered(pilot, before, seconds)


async def answered(pilot: Pilot[Any], before: Turn | None, seconds: float = 60) -> Turn:
    """Wait for the end of the answer of a turn other than ``before``."""
    pane = screen(pilot).chat_pane
    await until(pilot, lambda: pane.conversation.leaf is not before and pane.run is None, seconds)
    await until(pilot, lambda: pane._text._timer is None)  # no text waits to be drawn
    await settled(pilot)
    leaf = pane.conversation.leaf
    assert leaf is not None
    return leaf


def seen(pilot: Pilot[Any]) -> str:
    """Return all text on the screen."""
    lines = pilot.app.screen._compositor.render_strips(pilot.app.size)
    return "\n".join("".join(segment.text for segment in strip) for strip in lines)


def notes(pilot: Pilot[Any]) -> list[str]:
    return [str(note.render()) for note in screen(pilot).query(Note)]
