"""Test `chat --server`: the app's messages about its server, and the requests of others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from textual.drivers.headless_driver import HeadlessDriver

from lib.programs.fake_engine import LOADED
from lib.ui import FAKE, ask, notes, say, seen, until
from minillm.service.messages import CacheChanged, Preparing, TableView
from minillm.ui.app import ChatApp
from minillm.ui.bars import StatusBar, TitleBar
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.engine_status import status_of
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.engine_app import EngineState
from minillm.ui.memory.pool import Pool
from minillm.ui.settings import Settings

ADDRESS = "http://127.0.0.1:9"


@pytest.mark.anyio
async def test_the_header_names_the_server(tmp_path: Path) -> None:
    app = ChatApp(
        Settings("fake"), SessionStore(tmp_path), engine_command=FAKE, server=ADDRESS, driver_class=HeadlessDriver
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.chat.query_one(StatusBar).status.activity == "ready", 60)
        title = app.chat.query_one(TitleBar)
        assert str(title.render()).startswith(f"fake · at {ADDRESS} · cpu")
        app.engine_state = replace(app.engine_state, preparing=Preparing(1, 4))
        await until(pilot, lambda: "· warming up 25% " in str(title.render()))


@pytest.mark.anyio
async def test_the_model_is_the_servers(tmp_path: Path) -> None:
    app = ChatApp(
        Settings("fake"), SessionStore(tmp_path), engine_command=FAKE, server=ADDRESS, driver_class=HeadlessDriver
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.engine_state.phase == "ready", 60)
        app.settings = replace(app.settings, model="other")
        await ask(pilot, "echo one")
        assert app.chat.chat_pane.conversation.model == "fake", "the name that is saved and exported"
        for text in ("/model third", "/model"):
            await say(pilot, text)
            assert [each.message for each in app._notifications][-1].startswith("the server chooses the model")
        assert app.settings.model == "other"
        app.stop_engine()
        await until(pilot, lambda: app.chat.chat_pane.engine.phase == "off")
        title = app.chat.query_one(TitleBar)
        await until(pilot, lambda: str(title.render()).startswith(f"{ADDRESS} · no model loaded "))
        await say(pilot, "echo two")
        assert [each.message for each in app._notifications] == [
            f"the server at {ADDRESS} is not connected: /reload connects again"
        ]


@pytest.mark.anyio
async def test_a_server_that_cannot_be_reached_is_named_with_the_way_back(tmp_path: Path) -> None:
    bridge = (sys.executable, "-P", "-m", "minillm.server.sessions.remote", ADDRESS)
    app = ChatApp(
        Settings(""), SessionStore(tmp_path), engine_command=bridge, server=ADDRESS, driver_class=HeadlessDriver
    )
    async with app.run_test(size=(160, 40)) as pilot:
        await until(pilot, lambda: any("no server answers" in note for note in notes(pilot)), 60)
        [note] = [note for note in notes(pilot) if "no server answers" in note]
        assert note.endswith("(/reload connects again; the conversation is kept)")
        assert "F2" not in note, "it would load a model here"


def test_the_status_tells_that_others_run() -> None:
    """Requests of the demo, or of other apps on a server, change the view while no answer runs."""
    pool = Pool(8, 16, 100)
    state = EngineState("ready", "fake", loaded=LOADED)

    def activity() -> str:
        return status_of(state, None, Conversation(), pool, sums_up=False).activity

    pool.apply(CacheChanged([TableView(1, "system prompt", 0, "pinned", 16, [1])]))
    assert activity() == "ready"
    pool.apply(CacheChanged([TableView(2, "request-1", 0, "running", 16, [2])]))
    assert activity() == "others running"
    pool.apply(CacheChanged([TableView(2, "request-1", 0, "idle", 16, [], keep=1)]))
    assert activity() == "ready"


@pytest.mark.anyio
async def test_a_notification_covers_neither_the_tabs_nor_the_memory(tmp_path: Path) -> None:
    app = ChatApp(Settings("fake"), SessionStore(tmp_path), engine_command=FAKE, driver_class=HeadlessDriver)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        words = "answer 2 accepted · Alt+← → shows the others · Alt+U undoes"
        app.notify(words)
        await until(pilot, lambda: words in seen(pilot))
        [line] = [line for line in seen(pilot).splitlines() if words in line]
        assert line.index(words) + len(words) < app.chat.panel.region.x, "all of it on one line, over the chat pane"
        assert "F5 pool" in seen(pilot)
        assert "─ strands ─" in seen(pilot)
