"""``ui``: measure the chat app with a real engine: first paint, keys, drawing, and how much it slows generation."""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from minillm.bench.table import NoOptions, computed, shown
from minillm.errors import MinillmError
from minillm.service.messages import CacheChanged, LogEntry, TableView
from minillm.system import resident_bytes
from minillm.ui.app import ChatApp
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.engine_app import EngineEvent
from minillm.ui.memory.pool import Pool
from minillm.ui.settings import Settings
from minillm.weights.manifest import default_model

NUM_BLOCKS = 20_000
FRAMES, _SECONDS = 10, 6.0  # drawing is measured at this many frames per second, for this many seconds
_KEYS = 40
_TURNS = 500  # turns of the long conversation
_OPENINGS = 5
# The app is paused once per cycle. One answer has only a few cycles, because its context grows.
_CYCLES, _CYCLES_EACH = 20, 4
_WATCHED, _HELD = 6.0, 3.0  # seconds per cycle in which the app draws, and in which it is paused
_CATCH_UP = 1.0  # seconds, not counted, in which the app catches up with drawing
_QUESTION = "Tell me a long story about a lighthouse."
_LAST = "lighthouse-keepers"  # a word that is only in the last answer
_ANSWER = """\
The **lamp** is lit an hour before dusk; `wick` and glass are cleaned first.

- The keeper climbs {number} steps, and counts them.
- The log has the *weather*, the ships and the hour.

```python
def turn(seconds: float) -> float:
    return 360 * seconds / {number}.5
```

By day the curtains are drawn, for the lens would burn whatever is in the sun's way. In a storm the wind is heard on
every floor, and the light is seen from the harbour all the same.
"""
_PARAMS = {"temperature": 0.8, "seed": 1, "max_tokens": 6000, "ignore_eos": True}


@dataclass(frozen=True)
class UiFigures:
    """The results of the workload ``ui``. Times are in seconds. `slowdown` and the shares are fractions."""

    first_paint: float = shown("ms to the first paint", ".0f", 1e3)
    key_median: float = shown("ms from key to screen, median", ".0f", 1e3)
    key_p95: float = shown("ms from key to screen, p95", ".0f", 1e3)
    open_seconds: float = shown(f"ms to open {_TURNS} turns", ".0f", 1e3)
    open_mb: float = shown(f"MB of the app with {_TURNS} turns", ".1f")
    drawing_share: float = shown(f"{NUM_BLOCKS:,} blocks, {FRAMES} Hz: of a core", ".1%")
    tokens_per_second_watched: float = shown("tok/s, watched", ".1f")
    tokens_per_second_held: float = shown("tok/s while the app is held", ".1f")
    # For each cycle: how much slower generation is, as a fraction of its speed while the app is paused.
    slowdowns: tuple[float, ...] = shown("slow-down of each cycle", ".1%")
    slowdown: float = shown("their mean", ".1%")

    @computed("its standard error", ".1%")
    def slowdown_error(self) -> float:
        return statistics.stdev(self.slowdowns) / len(self.slowdowns) ** 0.5


@asynccontextmanager
async def _app(engine: Mapping[str, object]) -> AsyncIterator[Pilot[None]]:
    with TemporaryDirectory() as directory:
        settings = Settings(default_model(), engine=engine, sampling=dict(_PARAMS))
        app = ChatApp(settings, SessionStore(Path(directory)), driver_class=HeadlessDriver)
        async with app.run_test(size=(160, 50)) as pilot:
            await app.until_ready()
            yield pilot


async def _until(terminal: int, text: str, typed: str = "") -> float:
    """Type ``typed`` into the terminal, and wait until the app prints ``text``. Return the seconds from the first key.

    Output that earlier calls have read does not count. Raises MinillmError after 120 seconds.
    """
    began, shown = time.monotonic(), b""
    os.write(terminal, typed.encode())
    while text.encode() not in shown:
        try:
            shown += os.read(terminal, 1 << 16)
        except BlockingIOError:
            await asyncio.sleep(0.001)
        if time.monotonic() - began > 120:
            raise MinillmError(f"the app did not show {text!r} within 120 s")
    return time.monotonic() - began


@asynccontextmanager
async def _terminal(saved: Conversation | None = None) -> AsyncIterator[tuple[int, int]]:
    """Run `minillm chat` in a process. Yield its pseudo-terminal and its process id.

    The app's list of saved conversations contains only ``saved``. Without it, the list is empty.
    """
    import pty

    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with TemporaryDirectory() as directory:
        environment = {**os.environ, "TERM": "xterm-256color", "LINES": "50", "COLUMNS": "160"}
        environment |= {"MINILLM_DATA": directory, "MINILLM_CONFIG": directory}
        if saved is not None:
            SessionStore(Path(directory) / "conversations").save(saved)
        # On users' machines, Python's modules are compiled. Compiling minillm's at each start would take a sixth of the
        # time to the first paint.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "minillm.cli.main", "chat", stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        try:
            yield master, process.pid
        finally:
            process.kill()
            await process.wait()
            os.close(master)


async def _first_paint() -> float:
    """Start the app in a process. Return the seconds until it has drawn its last line, the footer."""
    began = time.monotonic()
    async with _terminal() as (terminal, _):
        await _until(terminal, "Help")
        return time.monotonic() - began


async def _keys() -> list[float]:
    """Return for each key the seconds from pressing it until the screen shows it, while an answer is generated."""
    async with _terminal() as (terminal, _):
        await _until(terminal, "ready in")
        await _until(terminal, "tok/s", typed=f"{_QUESTION}\r")
        taken = []
        for key in map(chr, range(0x4E00, 0x4E00 + _KEYS)):  # characters that the model does not write
            taken.append(await _until(terminal, key, typed=key))
            await asyncio.sleep(0.05)
        return taken


def _long_conversation() -> Conversation:
    conversation = Conversation()
    for number in range(1, _TURNS + 1):
        answer = conversation.ask(f"What is done in a lighthouse in the evening, and why? ({number})")
        answer.text, answer.finish_reason = _ANSWER.format(number=number), "stop"
    answer.text += f"\nSo say the {_LAST}.\n"
    return conversation


async def _opening() -> tuple[float, float]:
    """Open a long conversation from the app's list of conversations.

    Returns: the seconds until its last answer is on the screen; the app's memory in MB after everything is drawn.
    """
    async with _terminal(_long_conversation()) as (terminal, process):
        await _until(terminal, "ready in")
        await _until(terminal, f"{_TURNS} turns", typed="\x0f")  # ctrl+o
        taken = await _until(terminal, _LAST, typed="\r")
        await asyncio.sleep(3 * _CATCH_UP)
        return taken, resident_bytes(process) / 1e6


async def _drawing() -> float:
    """Return the fraction of a core that the app uses to draw the blocks of a pool.

    The pool changes `FRAMES` times a second.
    """
    sequences = 64  # together, their blocks fill the pool
    async with _app({"num_blocks": 64}) as pilot:
        chat = pilot.app.chat  # type: ignore[attr-defined]
        chat.show_pool(Pool(NUM_BLOCKS, 16, 1 << 20))
        tables = [
            TableView(number, "another", 0, "running", 16 * 300, list(range(start, start + 300)))
            for number, start in enumerate(range(0, NUM_BLOCKS, NUM_BLOCKS // sequences)[:sequences])
        ]
        chat.post_message(EngineEvent(CacheChanged(tables)))
        events = []
        for frame in range(int(FRAMES * _SECONDS)):
            # 100 more blocks are shared now, and 100 others no longer are.
            shared = [(frame * 211 + number * 97) % NUM_BLOCKS for number in range(100)]
            sharer = TableView(sequences, "another", 1, "running", 16 * 100, shared)
            table = tables[frame % sequences]
            log = [LogEntry(frame / FRAMES, "allocate", table.seq_id, "another", table.blocks[:1])]
            grown = TableView(table.seq_id, "another", 0, "running", 16 * 300, table.blocks[-1:], keep=299)
            events.append(CacheChanged([grown, sharer], log=log))
        await asyncio.sleep(_CATCH_UP)
        began, used = time.monotonic(), time.process_time()
        for number, event in enumerate(events, start=1):
            chat.post_message(EngineEvent(event))
            await asyncio.sleep(max(0.0, began + number / FRAMES - time.monotonic()))
        return (time.process_time() - used) / (time.monotonic() - began)


async def _cycles() -> list[tuple[float, float]]:
    """Return (speed while the app draws, speed while it is paused) in tokens per second, for each cycle.

    An answer is generated in a pool of `NUM_BLOCKS` blocks. The machine's speed drifts by more than the two speeds
    differ. So the speed while the app draws is the mean of two intervals: just before the pause and just after it.
    """
    # Speculation is off because steps are counted: a step with draft tokens yields several tokens and takes longer.
    engine = {"num_blocks": NUM_BLOCKS, "block_size": 1, "device": "cpu", "speculate": "off"}
    async with _app(engine) as pilot:
        chat = pilot.app.chat  # type: ignore[attr-defined]
        chat.chat_pane.prompt.text = _QUESTION
        await pilot.press("enter")
        await asyncio.sleep(_CATCH_UP)
        ended: dict[int, float] = {}  # number of a step -> the time of its end
        turns: list[tuple[float, float, float]] = []  # for each cycle: start of drawing, start and end of the pause
        while not chat.chat_pane.conversation.num_answers and len(turns) <= _CYCLES_EACH:
            await asyncio.sleep(_CATCH_UP)
            began = time.monotonic()
            await asyncio.sleep(_WATCHED)
            paused = time.monotonic()
            time.sleep(_HELD)  # blocks the app's own loop: it neither draws nor reads
            turns.append((began, paused, time.monotonic()))
            ended |= {step.number: step.ended for step in chat.pool.steps}
        await asyncio.sleep(_CATCH_UP)
        ended |= {step.number: step.ended for step in chat.pool.steps}
    cycles = []
    for (began, paused, resumed), (began_again, paused_again, _) in pairwise(turns):
        if paused_again < max(ended.values()):  # the answer was still running
            watched = (_rate(ended, began, paused) + _rate(ended, began_again, paused_again)) / 2
            cycles.append((watched, _rate(ended, paused, resumed)))
    if not cycles:
        raise MinillmError("the model answers too fast here for its slow-down to be measured")
    return cycles


def _rate(ended: Mapping[int, float], begin: float, end: float) -> float:
    """Return the number of steps per second between the times ``begin`` and ``end``.

    ``ended`` maps a step's number to the time of its end. Some steps may be missing.
    """
    numbers = sorted(ended)
    first, last = np.interp((begin, end), [ended[number] for number in numbers], numbers)
    return float(last - first) / (end - begin)


def measure(options: NoOptions) -> UiFigures:
    """Measure all figures of the workload ``ui``. This takes about five minutes on a CPU."""
    paints = [asyncio.run(_first_paint()) for _ in range(6)][1:]  # the first run compiles the modules
    keys = sorted(asyncio.run(_keys()))
    openings = [asyncio.run(_opening()) for _ in range(_OPENINGS)]
    opened, memory = map(statistics.median, zip(*openings, strict=True))
    drawing = asyncio.run(_drawing())
    cycles: list[tuple[float, float]] = []
    while len(cycles) < _CYCLES:
        cycles += asyncio.run(_cycles())
    slowdowns = tuple(1 - watched / held for watched, held in cycles)
    watched, held = map(statistics.median, zip(*cycles, strict=True))
    paint, key, late_key = statistics.median(paints), statistics.median(keys), keys[int(0.95 * len(keys))]
    return UiFigures(
        paint, key, late_key, opened, memory, drawing, watched, held, slowdowns, statistics.mean(slowdowns)
    )
