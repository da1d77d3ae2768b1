"""Run ``minillm`` with a chat app that prints its state on SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType
from typing import Any

from minillm.cli.main import main
from minillm.ui import app as chat_app
from minillm.ui.app import ChatApp

_run = chat_app.run


def run(app: ChatApp, typed: bytes = b"") -> int:
    """Run the app, see `minillm.ui.app.run`. It writes to the terminal, past the driver, which may be what hangs."""

    def tell(number: int, frame: FrameType | None) -> None:
        os.write(2, "\r\n".join(["", *state(app), ""]).encode("utf-8", "replace"))

    signal.signal(signal.SIGUSR1, tell)
    return _run(app, typed)


def state(app: ChatApp) -> list[str]:
    """Return the app's state, and the place of each task that does not wait for its next message."""
    pane = app.chat.chat_pane
    run, leaf = pane.run, pane.conversation.leaf
    return [
        f"is left: {app._exit}; screens: {app.screen_stack}; keys that wait: {len(app._typed_early)}",
        f"engine: {app.engine_state.phase}, heard by the chat pane as {pane.engine.phase}; {app.engine_state.error}",
        f"answer: {run and run.answer.request_id}, {'is stopping' if run and run.is_stopping else 'goes on'}; "
        f"summing up: {pane.compaction is not None}; last: {leaf and leaf.answer.finish_reason}",
        f"questions that wait: {pane.waiting._texts}; commands that wait: {pane.num_waiting}",
        *filter(None, map(_place, asyncio.all_tasks())),
    ]


def _place(task: asyncio.Task[Any]) -> str:
    """Return the place where a task waits; empty if it waits for its queue."""
    places: list[str] = []
    step: Any = task.get_coro()
    while (frame := getattr(step, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        step = step.cr_await
    return "" if any(place.startswith("_get_message:") for place in places) else f"{task.get_name()}: {places}"


if __name__ == "__main__":
    chat_app.run = run
    sys.exit(main(sys.argv[1:]))
