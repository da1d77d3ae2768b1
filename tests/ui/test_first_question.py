"""``minillm chat "question"``: the app opens, and the question is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.drivers.headless_driver import HeadlessDriver

from lib.ui import FAKE, answered, notes, screen, until
from minillm.ui.app import ChatApp
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.settings import Settings

pytestmark = pytest.mark.anyio
OPTIONS: dict[str, Any] = {"engine_command": FAKE, "driver_class": HeadlessDriver}


async def test_it_is_sent_when_the_model_is_ready(tmp_path: Path) -> None:
    app = ChatApp(Settings("fake"), SessionStore(tmp_path), question="echo at once", **OPTIONS)
    async with app.run_test() as pilot:
        assert (await answered(pilot, None)).answer.text == "at once"
        assert screen(pilot).query_one(PromptInput).text == ""


async def test_a_tour_begins_when_the_model_is_ready(tmp_path: Path) -> None:
    app = ChatApp(Settings("fake"), SessionStore(tmp_path), question="/tour", **OPTIONS)
    async with app.run_test() as pilot:
        await until(pilot, lambda: any("tour ·" in note for note in notes(pilot)))
        screen(pilot).chat_pane.workers.cancel_group(screen(pilot).chat_pane, "tour")


async def test_it_is_not_lost_where_the_model_does_not_load(tmp_path: Path) -> None:
    app = ChatApp(Settings("missing"), SessionStore(tmp_path), question="echo later", **OPTIONS)
    async with app.run_test() as pilot:
        # It comes back with the message behind the phase's change.
        await until(pilot, lambda: screen(pilot).query_one(PromptInput).text == "echo later")
        assert screen(pilot).chat_pane.engine.phase == "failed"
