"""The engine process: reads calls from a socket, writes events to it, and runs engine steps in between.

Its front end is a chat app, which runs ``python -m minillm.service SOCKET``, or the HTTP process, which inserts the
argument ``http``. The process ends when the front end's socket is closed, so it never outlives its front end.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from minillm.errors import MinillmError
from minillm.progress import Progress
from minillm.service import call_messages, messages
from minillm.service.messages import Load, LoadFailed, Loading, Message, Notice, Preparing
from minillm.system import import_torch, parent_socket

if TYPE_CHECKING:
    from minillm.engine.engine import Engine

Send = Callable[[Message], None]
_PREPARATION_INTERVAL = 0.5  # seconds
_UNREAD = 4 << 20  # bytes: the engine blocks once unread events take this much memory; a small one takes 768 bytes


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
    began = time.monotonic()
    try:
        # These imports take seconds. The front end starts meanwhile.
        import_torch()
        import minillm.loading.engine  # noqa: F401
        from minillm.engine.driver import Driver
        from minillm.service.calls import CallDispatcher
        from minillm.service.engine_requests import EngineRequests
        from minillm.service.facts import loaded
        from minillm.service.sessions import Sessions

        first = inbox.first()
        if not isinstance(first, Load):
            return 0
        engine, name = _load(first, send, is_app=is_app)
    except MinillmError as error:
        send(LoadFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        send(LoadFailed(f"{type(error).__name__}: {error}", 1))
        return 1
    driver = Driver(engine)
    requests = EngineRequests(driver, send)
    sessions = Sessions(driver, requests, send)
    requests.others = sessions.owners
    calls = CallDispatcher(engine, requests, sessions, send)
    prepare = _Preparation(engine, send)
    if first.wait_warm:
        while prepare.advance(before_ready=True):
            pass
    facts = loaded(engine, name, time.monotonic() - began)
    if not is_app:
        requests.report(now=True)  # before the first request, because routers choose a server by its figures
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
            try:
                found = requests.step()
            except Exception:  # reported by `step`; nothing can be computed any more
                return 1
            sessions.take(*found)
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
        size = int.from_bytes(head, "little")
        if len(body := stream.read(size)) == size:  # otherwise, the front end was killed
            yield call_messages.decode_call(body)


def _read(calls: Iterator[Message], inbox: Inbox) -> None:
    call = None
    with contextlib.suppress(ConnectionResetError):  # the front end has ended with unread events
        for call in calls:
            inbox.put(call)
    if call is not None:
        inbox.put(None)
        time.sleep(1)  # a load or a long step must not keep the process and its memory alive for longer
    os._exit(0)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end handles ctrl-c
    is_app = sys.argv[1] != "http"
    connection = parent_socket()
    with contextlib.suppress(OSError):  # more than the system allows
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)  # a busy app must not block the engine
    encode = messages.encode if is_app else call_messages.encode
    lock = threading.Lock()

    def send(event: Message) -> None:
        data = encode(event)
        with lock:
            try:
                connection.sendall(data)
            except OSError:  # the front end has ended
                os._exit(0)

    inbox = Inbox()
    if is_app:
        send(Loading(Progress("starting", 0, None, "")))
    calls = (_lines if is_app else _frames)(connection.makefile("rb"))
    threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    code = serve(inbox, send, is_app=is_app)
    if code:
        sys.stderr.flush()
        os._exit(code)  # an orderly exit takes longer; the thread could end the process first, with exit code 0
    return code


if __name__ == "__main__":
    sys.exit(main())
