"""Compare the main screens with pictures, small and large. ``UPDATE_SNAPSHOTS=1`` retakes them: look at them then."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from lib.ui import ask, chat, seen, until
from minillm.ui.app import ChatApp

pytestmark = pytest.mark.anyio
SNAPSHOTS = Path(__file__).with_name("snapshots")
SIZES = [(80, 24), (160, 50)]


def normal(svg: str) -> str:
    """Replace the ids, which differ from run to run, and from one release of Textual's exporter to the next."""
    return re.sub(r"terminal-\d+", "terminal-0", svg)


async def compare(pilot: Pilot[Any], app: ChatApp, name: str) -> None:
    app.set_focus(None)  # a cursor that blinks is there or not
    await pilot.pause(0.3)
    path = SNAPSHOTS / f"{name}-{app.size.width}x{app.size.height}.svg"
    deadline = time.monotonic() + 30
    while (taken := normal(app.export_screenshot(title="minillm", simplify=True))) and time.monotonic() < deadline:
        if os.environ.get("UPDATE_SNAPSHOTS") or not path.exists() or taken == path.read_text(encoding="utf-8"):
            break
        await pilot.pause(0.3)  # all of it is not drawn yet
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(taken, encoding="utf-8")
    assert path.exists(), f"{path} is missing: UPDATE_SNAPSHOTS=1 takes it"
    assert taken == path.read_text(encoding="utf-8"), f"{path.name} looks other than it did"


@pytest.mark.parametrize("size", SIZES)
async def test_the_main_screens_look_as_they_did(size: tuple[int, int]) -> None:
    async with chat(size=size, theme="dark") as pilot:
        app = pilot.app
        assert isinstance(app, ChatApp)
        await ask(pilot, "echo A list:\n\n- **one**\n- two\n\n```python\nprint(1)\n```")
        await until(pilot, lambda: "own" in seen(pilot) or size[0] < 100)
        await pilot.pause(0.3)
        await compare(pilot, app, "chat")
        await pilot.press("f5")
        await pilot.pause(0.3)
        await compare(pilot, app, "pool")
        await pilot.press("f1")
        await pilot.pause(0.3)
        await compare(pilot, app, "help")
        await pilot.press("escape", "f3")
        await until(pilot, lambda: "beam_width" in seen(pilot) or "temperature" in seen(pilot))
        await pilot.pause(0.3)
        await compare(pilot, app, "sampling")
