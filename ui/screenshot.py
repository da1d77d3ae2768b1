"""Generate the pictures and the recording of the docs with the app: ``python -m minillm.ui.screenshot ui``."""

import asyncio
import os
import sys
import tempfile
from itertools import chain
from pathlib import Path

from textual.drivers.headless_driver import HeadlessDriver

from minillm.ui.app import ChatApp
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.demo import DemoApp, demo_settings
from minillm.ui.dialogs import ProbabilityScreen
from minillm.ui.recording import Frame, recording
from minillm.ui.settings import Settings, with_param
from minillm.weights.manifest import default_model

QUESTIONS = (("Explain the Fibonacci sequence in two sentences.", 1), ("Name a use of it, in one sentence.", 3))
SIZE = (160, 44)  # columns and rows
TOUR_SIZE = (100, 32)
_PATIENCE = 120.0  # time limit for the whole conversation in seconds
_TOUR_PATIENCE = 600.0  # time limit for the tour in seconds
_SETTLED = 0.5  # after this many seconds, all changes at the beginning of a stop are drawn
_LOOK = 0.1  # seconds between two screenshots of the tour
# Seconds for a stop of the tour in the recording: for all its frames, for the first, for the last, for each between.
_STOP, _FIRST, _LAST, _BETWEEN = 4.5, 1.4, 1.2, 0.15
_END = 4.0  # seconds for the tour's last screen
_STILL = 3  # readers without animations see the last frame of this stop


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
        app = ChatApp(settings, SessionStore(Path(sessions), keeps_blocks=False), driver_class=HeadlessDriver)
        async with app.run_test(size=SIZE) as pilot, asyncio.timeout(_PATIENCE):
            await app.until_ready()
            for number, (question, num_answers) in enumerate(QUESTIONS, 1):
                app.settings = with_param(app.settings, "n", str(num_answers))
                app.chat.chat_pane.prompt.text = question
                await pilot.press("enter")
                while app.chat.chat_pane.conversation.num_answers < number:
                    await pilot.pause(0.1)
            await pilot.pause(0.5)
            (directory / "picture.svg").write_text(app.export_screenshot(title="minillm chat"), encoding="utf-8")
            await pilot.press("3")
            while app.chat.chat_pane.conversation.leaf.answer.candidates:  # type: ignore[union-attr]
                await pilot.pause(0.1)
            await pilot.press("alt+p")
            while not isinstance(app.screen, ProbabilityScreen):
                await pilot.pause(0.1)
            await pilot.press(*["right"] * 4)
            await pilot.pause(7)  # notifications disappear in this time
            (directory / "alternatives.svg").write_text(app.export_screenshot(title="minillm chat"), encoding="utf-8")


async def record(directory: Path) -> None:
    """Run the tour and write a recording of it to tour.svg. In the recording, all stops have the same duration.

    Raises:
        MinillmError: the model does not load.
        TimeoutError: the tour does not end in time.
    """
    with tempfile.TemporaryDirectory() as sessions:
        settings = demo_settings(Settings(default_model()))
        app = DemoApp(settings, SessionStore(Path(sessions), keeps_blocks=False), driver_class=HeadlessDriver)
        stops: dict[int, list[str]] = {}
        async with app.run_test(size=TOUR_SIZE) as pilot, asyncio.timeout(_TOUR_PATIENCE):
            await app.until_ready()
            while not app.over:
                number = app.number
                await pilot.pause(_LOOK if number in stops else _SETTLED)
                shot = app.export_screenshot(simplify=True)
                if app.number == number and not app.over and stops.setdefault(number, [])[-1:] != [shot]:
                    stops[number].append(shot)
            await pilot.pause(_SETTLED)
            end = Frame(app.export_screenshot(simplify=True), _END)
    timelines = {number: timeline(shots) for number, shots in stops.items() if number}
    frames = [*chain.from_iterable(timelines.values()), end]
    svg = recording(frames, "minillm demo", still=frames.index(timelines[_STILL][-1]))
    (directory / "tour.svg").write_text(svg, encoding="utf-8")


def timeline(shots: list[str]) -> list[Frame]:
    """Choose screenshots of one stop of the tour. Return them as frames with durations.

    The first and the last screenshot are always chosen, and between them some at equal distances.
    """
    if len(shots) == 1:
        return [Frame(shots[0], _STOP)]
    between = shots[1:-1]
    most = round((_STOP - _FIRST - _LAST) / _BETWEEN)
    picked = between if len(between) <= most else [between[i * len(between) // most] for i in range(most)]
    seconds = (_STOP - _FIRST - _LAST) / len(picked) if picked else 0.0
    return [
        Frame(shots[0], _FIRST), *(Frame(shot, seconds) for shot in picked),
        Frame(shots[-1], _LAST if picked else _STOP - _FIRST),
    ]  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m minillm.ui.screenshot DIRECTORY")
    # The pictures must not depend on this terminal's number of colors, which changes every theme.
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    asyncio.run(take(Path(sys.argv[1])))
    asyncio.run(record(Path(sys.argv[1])))
