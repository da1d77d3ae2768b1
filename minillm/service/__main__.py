"""The engine process: reads calls from stdin, writes events to stdout, and runs engine steps in between.

Its front end is a chat app, which runs ``python -m minillm.service``, or the HTTP process, which adds the argument
``http``. The process ends when stdin closes, so it never outlives its front end.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from minillm.errors import MinillmError
from minillm.progress import Progress
from minillm.service import call_messages, messages
from minillm.service.messages import Load, LoadFailed, Loading, Message, Notice, Preparing

if TYPE_CHECKING:
    from minillm.engine.engine import Engine

Send = Callable[[Message], None]
_PREPARATION_INTERVAL = 0.5  # seconds
_UNREAD = 1 << 20  # size of the event pipe in bytes: the engine blocks once the front end leaves this much unread


class Inbox:
    """Receives the calls of the front end. The call None means that the front end has ended.

    Calls wait in a queue until `pass_on` is called.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._take: Callable[[Message | None], None] = self._waiting.put

    def put(self, call: Message | None) -> None:
        """Add a call. Once `pass_on` was called, this method passes the call on at once, in the caller's thread."""
        with self._lock:
            self._take(call)

    def first(self) -> Message | None:
        """Wait for the first call, and return it."""
        return self._waiting.get()

    def pass_on(self, take: Callable[[Message | None], None]) -> None:
        """Pass the waiting calls to ``take``. From now on, `put` passes each call to ``take``."""
        with self._lock:
            self._take = take
            while not self._waiting.empty():
                take(self._waiting.get())


def serve(inbox: Inbox, send: Send, *, is_app: bool = True) -> int:
    """Load the model that the first call names. Then run the engine and carry out calls until the front end ends.

    Return the exit code.

    Args:
        inbox: the calls of the front end.
        send: sends an event to the front end.
        is_app: the front end is a chat app, which sends commands and gets events for apps.
    """
    first = inbox.first()
    if not isinstance(first, Load):
        return 0
    began = time.monotonic()
    try:
        engine, name = _load(first, send, is_app=is_app)
    except MinillmError as error:
        send(LoadFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        send(LoadFailed(f"{type(error).__name__}: {error}", 1))
        return 1
    from minillm.engine.driver import Driver
    from minillm.service.calls import CallDispatcher
    from minillm.service.engine_requests import EngineRequests
    from minillm.service.facts import loaded
    from minillm.service.sessions import Sessions

    driver = Driver(engine)
    requests = EngineRequests(driver, send)
    sessions = Sessions(driver, requests, send)
    requests.others = sessions.owners
    calls = CallDispatcher(driver, requests, sessions, send)
    prepare = _Preparation(engine, send)
    if first.wait_warm:
        while prepare.advance(before_ready=True):
            pass
    facts = loaded(engine, name, time.monotonic() - began)
    send(facts)
    if is_app:
        sessions.open("")
    elif facts.chat_template:
        calls.begin_templates()
    inbox.pass_on(calls.take_command if is_app else calls.take)

    def report() -> None:
        idle = not engine.has_work
        if not is_app:
            requests.report(now=idle)
        sessions.report(now=idle)

    while True:
        while not (engine.has_work and calls.jobs.empty()):
            while calls.jobs.empty() and prepare.advance():
                pass
            job = calls.jobs.get()
            if job is None:
                return 0
            job()
            if calls.jobs.empty():
                report()
        if sessions.wait():
            sessions.take(*requests.step())
            report()


class _Preparation:
    """Prepares CUDA graphs and kernels for later steps, and reports the progress."""

    def __init__(self, engine: Engine, send: Send) -> None:
        self._engine, self._send = engine, send
        self._at = 0.0
        self._sent = (0, 0)

    def advance(self, *, before_ready: bool = False) -> bool:
        """Continue the preparation for at most 0.1 s. Return False if nothing is left to prepare.

        ``before_ready``: report the progress as part of loading.
        """
        more = self._engine.runner.prepare_ahead()
        progress, now = self._engine.runner.prepared, time.monotonic()
        if progress != self._sent and (not more or now - self._at >= _PREPARATION_INTERVAL):
            self._at, self._sent = now, progress
            done, total = progress
            loading = Loading(Progress("preparing CUDA graphs", done, total, "shapes"))
            self._send(loading if before_ready else Preparing(done, total))
        return more


def _load(load: Load, send: Send, *, is_app: bool) -> tuple[Engine, str]:
    """Load the model. Return the engine and the model's name."""
    if is_app:
        send(Loading(Progress("starting", 0, None, "")))
    from minillm.config import EngineConfig
    from minillm.loading.bandwidth import known_rate
    from minillm.loading.device import choose_device
    from minillm.loading.disk import with_chat_cache
    from minillm.loading.engine import best_form, chat_options, load_engine
    from minillm.loading.gpu_stacks import lower_stack_limit

    config = EngineConfig(**(with_chat_cache(chat_options(load.options)) if is_app else load.options))
    callbacks = (lambda done: send(Loading(done)), lambda text: send(Notice(text)))
    device = choose_device(config)
    if is_app and device.type == "cpu":
        known_rate(device)  # the model list uses this rate
    name = best_form(load.model, config, *callbacks)
    lower_stack_limit(device, config)
    return load_engine(name, config, *callbacks), name


def _lines(stream: BinaryIO) -> Iterator[Message]:
    """Yield the commands of a chat app, which are lines of JSON."""
    for line in stream:
        try:
            yield messages.decode_command(line)
        except ValueError as error:
            sys.stderr.write(f"not a command: {error}\n")


def _frames(stream: BinaryIO) -> Iterator[Message]:
    """Yield the calls of the HTTP process. Each call is sent as four bytes with its length, followed by MessagePack."""
    while len(head := stream.read(4)) == 4:
        yield call_messages.decode_call(stream.read(int.from_bytes(head, "little")))


def _read(calls: Iterator[Message], inbox: Inbox) -> None:
    for call in calls:
        inbox.put(call)
    inbox.put(None)
    # The front end has ended. A load or a long step must not keep the process and its memory alive.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end handles ctrl-c
    is_app = sys.argv[1:] != ["http"]
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the front end as an event
    _widen(events)
    encode = messages.encode if is_app else call_messages.encode
    lock = threading.Lock()

    def send(event: Message) -> None:
        data = encode(event)
        with lock:
            try:
                written = events.write(data) or 0
                while written < len(data):
                    written += events.write(data[written:]) or 0
            except BrokenPipeError:
                os._exit(0)

    inbox = Inbox()
    calls = (_lines if is_app else _frames)(sys.stdin.buffer)
    threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    code = serve(inbox, send, is_app=is_app)
    if code:
        sys.stderr.flush()
        os._exit(code)  # the thread holds the lock of stdin, so an orderly exit would abort
    return code


if __name__ == "__main__":
    sys.exit(main())
