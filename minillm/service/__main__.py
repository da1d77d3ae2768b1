"""The engine process: reads commands from stdin, writes events to stdout, and runs engine steps in between.

Run it as ``python -m minillm.service``. The process ends when stdin closes, so it never outlives the app.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from minillm.errors import MinillmError
from minillm.progress import Progress
from minillm.service.messages import Command, Event, Load, LoadFailed, Loading, Notice, decode_command, encode

if TYPE_CHECKING:
    from minillm.service.conversations import Conversations

_UNREAD = 1 << 20  # size of the event pipe in bytes: the engine blocks once the app leaves this much unread


def serve(commands: queue.Queue[Command | None], send: Callable[[Event], None]) -> int:
    """Load the model that the first command names. Then run the engine and handle commands. Return the exit code.

    Args:
        commands: the app's commands; None means that the app has ended.
        send: sends an event to the app.
    """
    first = commands.get()
    if not isinstance(first, Load):
        return 0
    try:
        conversations = _load(first, send)
    except MinillmError as error:
        send(LoadFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        send(LoadFailed(f"{type(error).__name__}: {error}", 1))
        return 1
    conversations.reporter.show_cache(now=True)
    while True:
        if not (conversations.engine.has_work and commands.empty()):
            while commands.empty() and conversations.engine.runner.prepare_ahead():
                pass
            command = commands.get()
            if command is None:
                return 0
            conversations.handle(command)
            if not commands.empty():
                continue
        conversations.step()
        conversations.reporter.show_cache(now=not conversations.engine.has_work)


def _load(command: Load, send: Callable[[Event], None]) -> Conversations:
    began = time.monotonic()
    send(Loading(Progress("starting", 0, None, "")))
    from minillm.config import EngineConfig
    from minillm.loading.bandwidth import known_rate
    from minillm.loading.device import choose_device
    from minillm.loading.engine import best_form, chat_options, load_engine
    from minillm.loading.gpu_stacks import keep_small
    from minillm.service.conversations import Conversations
    from minillm.service.facts import loaded

    config = EngineConfig(**chat_options(command.options))
    tell = (lambda done: send(Loading(done)), lambda text: send(Notice(text)))
    if (device := choose_device(config)).type == "cpu":
        known_rate(device)  # the model list uses this rate
    model_name = best_form(command.model, config, *tell)
    keep_small(device, config)
    engine = load_engine(model_name, config, *tell)
    send(loaded(engine, model_name, time.monotonic() - began))
    return Conversations(engine, send)


def _read_commands(commands: queue.Queue[Command | None]) -> None:
    for line in sys.stdin.buffer:
        try:
            commands.put(decode_command(line))
        except ValueError as error:
            sys.stderr.write(f"not a command: {error}\n")
    commands.put(None)
    # The app has ended. A load or a long step must not keep the process and its memory alive.
    time.sleep(1)
    os._exit(0)


def _widen(events: BinaryIO) -> None:
    """Enlarge the event pipe where the system supports it, so that a busy app does not block the engine for seconds.

    With the usual 64 KiB, two seconds of unread cache updates from a large pool would fill the pipe.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _UNREAD)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the app handles ctrl-c
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the app as an event
    _widen(events)

    def send(event: Event) -> None:
        try:
            events.write(encode(event))
        except BrokenPipeError:
            os._exit(0)

    commands: queue.Queue[Command | None] = queue.Queue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    code = serve(commands, send)
    if code:
        sys.stderr.flush()
        os._exit(code)  # the thread holds the lock of stdin, so an orderly exit would abort
    return code


if __name__ == "__main__":
    sys.exit(main())
