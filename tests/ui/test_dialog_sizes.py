"""Dialogs in small terminals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lib.ui import chat, seen, until
from minillm.service.messages import TokenChoice
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.dialogs import Dialog, ModelScreen, ProbabilityScreen, SamplingScreen, SessionsScreen, SystemScreen
from minillm.ui.settings import Settings

pytestmark = pytest.mark.anyio


def stored(directory: Path) -> SessionStore:
    """Return a store of twenty conversations."""
    store = SessionStore(directory)
    for number in range(20):
        conversation = Conversation()
        answer = conversation.ask(f"question {number}")
        answer.text, answer.finish_reason = "answer", "stop"
        store.save(conversation)
    return store


DIALOGS: dict[str, Callable[[SessionStore], Dialog]] = {
    "system": lambda store: SystemScreen(""),
    "sampling": lambda store: SamplingScreen(Settings("")),
    "model": lambda store: ModelScreen(Settings("")),
    "conversations": lambda store: SessionsScreen(store, "", lambda path: None),
    "probabilities": lambda store: ProbabilityScreen(
        [TokenChoice(" word", -0.1, [" word", "a", "b", "c", "d"], [-0.1, -2.0, -3.0, -4.0, -5.0])] * 500
    ),
}


@pytest.mark.parametrize("size", [(40, 12), (80, 21), (80, 24), (120, 40)])
@pytest.mark.parametrize("name", DIALOGS)
async def test_hints_and_problems_are_in_sight(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    async with chat(size=size) as pilot:
        dialog = DIALOGS[name](stored(tmp_path))
        pilot.app.push_screen(dialog)
        await until(pilot, lambda: pilot.app.screen is dialog and dialog.query(".dialog > .hint"))
        if dialog.query(".problem"):
            dialog.say("wrong")
            await until(pilot, lambda: "wrong" in seen(pilot))
        hint, box = dialog.query(".dialog > .hint").last(), dialog.query_one(".dialog")
        if (name, size) != ("probabilities", (40, 12)):  # all alternatives are in sight instead
            await until(pilot, lambda: 0 <= box.content_region.bottom - hint.region.bottom <= 1 and hint.region)
