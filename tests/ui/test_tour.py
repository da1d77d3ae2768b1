"""The welcome, and the tour inside the chat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from lib.ui import FAKE, ask, chat, notes, say, screen, seen, until
from minillm.service.messages import Command, Pace
from minillm.ui import demo
from minillm.ui.chat import tour
from minillm.ui.chat.conversation import Conversation, Turn
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.chat.transcript import Remark, Transcript
from minillm.ui.settings import Settings

pytestmark = pytest.mark.anyio


async def test_the_welcome_stays_until_the_first_question() -> None:
    async with chat(size=(120, 40)) as pilot:
        await say(pilot, "/set temperature 0.5")
        await screen(pilot).chat_pane.transcript.add_note("something")
        await until(pilot, lambda: "something" in notes(pilot)[-1])
        await until(pilot, lambda: "Ask something and press Enter." in seen(pilot))
        assert "/tour" in seen(pilot)
        await ask(pilot, "echo one")
        assert not screen(pilot).query("#welcome")


async def test_the_tour_forks_copies_frees_and_gives_the_settings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "QUESTION", "echo three")
    show_path = Transcript.show_path

    async def show_slowly(self: Transcript, conversation: Conversation) -> None:
        """Delay the drawing, as on a slow machine, so that the tour looks in between."""
        await asyncio.sleep(0.2)
        await show_path(self, conversation)

    monkeypatch.setattr(Transcript, "show_path", show_slowly)
    async with chat(size=(140, 40)) as pilot:
        before, pane = screen(pilot).app.settings, screen(pilot).chat_pane
        sent: list[Command] = []
        send = pane.send

        def record(command: Command) -> None:
            sent.append(command)
            send(command)

        monkeypatch.setattr(pane, "send", record)
        slowed: list[bool] = []  # whether drawing leaves the cores to the model, after each change
        pane.watch(pane, "beside_model", lambda slow: slowed.append(slow), init=False)
        await ask(pilot, "echo old")
        await until(pilot, lambda: slowed == [True, False])
        monkeypatch.setattr(tour, "_READING", 0.05)
        await say(pilot, "/tour")
        await until(pilot, lambda: any("tour · free" in note for note in notes(pilot)))
        assert "more below" not in seen(pilot), "all of it is in sight"
        said = [note for note in notes(pilot) if "tour ·" in note]
        assert [note.split()[3].strip(":") for note in said] == ["text", "fork", "copy", "each", "free"]
        turn = pane.conversation.turns[0]
        below = pane.transcript.items[pane.transcript.items.index(turn) + 1 :]
        told = [item.text.split()[2].strip(":") for item in below if isinstance(item, Remark)]
        assert told == ["fork", "copy", "each", "free"], "what is told of the question stands below it"
        await until(pilot, lambda: len(pane.conversation.siblings(turn)) == 3)  # one of them accepted
        await until(pilot, lambda: screen(pilot).app.settings is before)
        assert slowed == [True, False], "the tour is drawn at once"
        assert [each.steps_per_second for each in sent if isinstance(each, Pace)][-1] == 0, "full speed again"
        assert len(pane.store.list()) == 1, "the conversation of before is kept, and the tour's is the tour's"
        await ask(pilot, "echo my own")
        assert len(pane.store.list()) == 2


async def test_the_notes_of_the_tour_are_there_again_in_a_resumed_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "QUESTION", "echo three")
    monkeypatch.setattr(tour, "_READING", 0.05)
    store = SessionStore(tmp_path)

    def shown(pilot: Pilot[None]) -> list[str]:
        items = screen(pilot).chat_pane.transcript.items
        return [item.question if isinstance(item, Turn) else item.text for item in items if _is_kept(item)]

    async with chat(size=(140, 40), store=store) as pilot:
        await say(pilot, "/tour")
        await until(pilot, lambda: any("tour · free" in note for note in notes(pilot)))
        await ask(pilot, "echo my own")
        before = shown(pilot)
        assert [text.split()[-1] if "echo" in text else text.split()[2] for text in before] == [
            "text", "three", "fork:", "copy", "each", "free:", "own"
        ]  # fmt: skip
    async with chat(size=(140, 40), store=store) as pilot:
        pane = screen(pilot).chat_pane
        pane.call_later(pane.open_conversation, store.load(store.latest()))
        await until(pilot, lambda: shown(pilot) == before)


def _is_kept(item: Turn | Remark) -> bool:
    return isinstance(item, Turn) or item.kind == "tour"


@pytest.mark.parametrize("size", [(40, 12), (80, 24)])
async def test_a_memory_view_that_hides_the_chat_pane_tells_it(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "QUESTION", "echo three")
    async with chat(size=size) as pilot:
        await say(pilot, "/tour")
        await until(pilot, lambda: screen(pilot).memory_view == "strands")
        if not screen(pilot).has_class("-expanded"):
            await pilot.press("alt+v")
        await until(pilot, lambda: "read stays in memory" in " ".join(seen(pilot).split()))
        screen(pilot).chat_pane.workers.cancel_group(screen(pilot).chat_pane, "tour")
        await until(pilot, lambda: not screen(pilot).query(".caption"))


async def test_a_stopped_tour_gives_the_settings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "QUESTION", "never")
    async with chat(size=(140, 40)) as pilot:
        before = screen(pilot).app.settings
        await say(pilot, "/tour")
        await until(pilot, lambda: screen(pilot).memory_view == "strands" and bool(notes(pilot)))
        await pilot.press("ctrl+n")
        screen(pilot).chat_pane.workers.cancel_group(screen(pilot).chat_pane, "tour")
        await until(pilot, lambda: screen(pilot).app.settings is before)


async def test_the_guided_tour_goes_on_after_another_conversation_or_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reload(app: demo.DemoApp) -> bool:
        app.stop_engine()
        while app.chat.pool is not None:
            await asyncio.sleep(0.01)
        app.load_model()
        return app.pool.counts.num_copies > 0

    free = next(stop for stop in demo.STOPS if stop.name == "free")
    stops = (free, demo.Stop("reload", "", "pool", reload))
    monkeypatch.setattr(demo, "STOPS", stops)  # without the stops before them, as after Ctrl+N
    app = demo.DemoApp(
        Settings("fake"), SessionStore(tmp_path), 100.0, engine_command=FAKE, driver_class=HeadlessDriver
    )
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.over)
        assert app.missed == ["free", "reload"]
