"""Generate the pictures of the docs with the app itself: ``python -m minillm.ui.screenshot ui``."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from textual.drivers.headless_driver import HeadlessDriver

from minillm.ui.app import ChatApp
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.dialogs import ProbabilityScreen
from minillm.ui.settings import Settings, with_param
from minillm.weights.manifest import default_model

QUESTIONS = (("Explain the Fibonacci sequence in two sentences.", 1), ("Name a use of it, in one sentence.", 3))
SIZE = (160, 44)  # columns and rows
_PATIENCE = 120.0  # seconds for the whole conversation


async def take(directory: Path) -> None:
    """Run a short conversation and write two pictures of it to ``directory``.

    picture.svg shows the app with three answers, alternatives.svg the token probabilities of an answer.

    Raises:
        MinillmError: the model cannot be loaded.
        TimeoutError: the model does not answer in time.
    """
    sampling = {"temperature": 0.6, "seed": 4, "max_tokens": 120, "repetition_penalty": 1.1}
    settings = Settings(default_model(), {"num_blocks": 512}, sampling)
    with tempfile.TemporaryDirectory() as sessions:
        app = ChatApp(settings, SessionStore(Path(sessions)), driver_class=HeadlessDriver)
        async with app.run_test(size=SIZE) as pilot, asyncio.timeout(_PATIENCE):
            await app.until_ready()
            for number, (question, num_answers) in enumerate(QUESTIONS, 1):
                app.settings = with_param(app.settings, "n", str(num_answers))
                app.chat.talk.prompt.text = question
                await pilot.press("enter")
                while app.chat.talk.conversation.num_answers < number:
                    await pilot.pause(0.1)
            await pilot.pause(0.5)
            (directory / "picture.svg").write_text(app.export_screenshot(title="minillm chat"), encoding="utf-8")
            await pilot.press("3")
            while app.chat.talk.conversation.leaf.answer.candidates:  # type: ignore[union-attr]
                await pilot.pause(0.1)
            await pilot.press("alt+p")
            while not isinstance(app.screen, ProbabilityScreen):
                await pilot.pause(0.1)
            await pilot.press(*["right"] * 4)
            await pilot.pause(7)  # until the notifications disappear
            (directory / "alternatives.svg").write_text(app.export_screenshot(title="minillm chat"), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m minillm.ui.screenshot DIRECTORY")
    # Do not depend on this terminal: with fewer colors, every theme looks different.
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    asyncio.run(take(Path(sys.argv[1])))
