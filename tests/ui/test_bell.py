"""The bell and the window's title at the end of a long answer."""

from __future__ import annotations

import sys

import pytest

from lib.terminal import PROGRAMS, session
from lib.ui import ask, chat
from minillm.errors import UsageError
from minillm.ui.app import ChatApp
from minillm.ui.chat import chat_pane
from minillm.user_config import UserConfig

CALLS_AT_ONCE = (
    sys.executable,
    "-c",
    "import sys, runpy; import minillm.ui.chat.chat_pane; minillm.ui.chat.chat_pane.LONG_ANSWER = 0.0; "
    "sys.argv = ['chat', 'fake']; "
    f"runpy.run_path('{PROGRAMS}/chat_with_fake.py', run_name='__main__')",
)


@pytest.mark.anyio
@pytest.mark.parametrize(("seconds", "bell", "calls"), [(0.0, True, 1), (60.0, True, 0), (0.0, False, 0)])
async def test_only_a_long_answer_calls(
    seconds: float, bell: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    monkeypatch.setattr(chat_pane, "LONG_ANSWER", seconds)
    monkeypatch.setattr(ChatApp, "bell", lambda app: rung.append("bell"))
    monkeypatch.setattr(ChatApp, "set_window_title", lambda app, title: rung.append(title))
    async with chat(bell=bell) as pilot:
        await ask(pilot, "echo \x1b]0;owned\x07 heron")
        assert rung == ["bell", "✓ echo ␛]0;owned␇ heron · minillm"] * calls


def test_on_a_terminal_the_title_comes_and_goes() -> None:
    with session(CALLS_AT_ONCE) as running:
        running.wait_for("ready in")
        running.type("echo heron\r")
        running.wait_for("\x07\x1b[22;2t\x1b]2;✓ echo heron · minillm\x07")
        running.type("echo two\r")
        running.wait_for("\x1b[23;2t")
        running.wait_for("\x1b]2;✓ echo heron · minillm\x07")
        running.type("\x11")
        running.wait_for("\x1b[23;2t")
        assert running.end() == 0


def test_the_key_is_checked() -> None:
    assert UserConfig(bell=False).bell is False
    with pytest.raises(UsageError, match="bell must be true or false, not 1"):
        UserConfig(bell=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"\[sampling\] must be a table, not"):
        UserConfig(sampling="x")  # type: ignore[arg-type]
