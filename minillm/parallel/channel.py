"""The line between rank 0 and the others: each step's work goes down it, and each end sees at once when the other dies.

Each rank has a plain TCP connection, which closes however the process dies: a collective would wait for ever. A message
is its length and so many bytes. A step gets no answer: the others send only the reason why they give up.

torchrun learns nothing of another node's end. So each process adds to a count of its own, in the store that all see,
and those that wait for it look whether the count still grows (`beat`, `Listener`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from minillm.errors import MinillmError

if TYPE_CHECKING:
    from torch.distributed import Store

_LENGTH = struct.Struct("<I")
_BEATS = "beats/{}"  # of the rank
_GRACE = 5.0  # seconds that a process which waits for a dead one is given to notice
EVERY = 2.0  # seconds from one beat to the next
SILENCE = 60.0  # seconds without one after which a process is taken for dead: loading may hold up a thread for some


class RankDied(MinillmError):
    """One of the processes that share the model has ended; the model is gone with it."""


def set_up(connection: socket.socket) -> None:
    """Send small messages at once, and notice a host that is cut off within half a minute, as a dead process is."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}  # s, s, times, ms
    for name, value in {"TCP_NODELAY": 1, **limits}.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_message(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> bytes:
    """The next message. Raises EOFError where the other end has closed the connection, or died."""
    return _receive(connection, _LENGTH.unpack(_receive(connection, _LENGTH.size))[0])


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except OSError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)


@dataclass
class Lines:
    """Rank 0's connections, and their fate."""

    connections: Mapping[int, socket.socket]  # by rank
    processes: Mapping[int, subprocess.Popen]  # those of them that we have started
    on_death: Callable[[], None]  # called, in another thread, when a rank has died: ends all waiting on the device
    at_work: bool = False  # the main thread may be waiting for another rank
    failure: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # there is a failure, or it is closed

    def fail(self, reason: str) -> None:
        if not self.ended.is_set():
            self.failure = reason
            self.ended.set()

    def close(self) -> None:
        """Let the other ranks go; those that do not end by themselves are killed."""
        orderly = not self.ended.is_set()
        self.ended.set()
        for connection in self.connections.values():
            if orderly:
                with contextlib.suppress(OSError):
                    send_message(connection, b"")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for process in self.processes.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Leader:
    """Rank 0's end; it closes the lines."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.close = weakref.finalize(self, self._lines.close)  # at the latest when the interpreter ends
        threading.Thread(target=_watch, args=(self._lines,), daemon=True).start()

    def send(self, data: bytes) -> None:
        """Give every other rank the same message. Raises RankDied where one of them is gone."""
        try:
            for connection in self._lines.connections.values():
                send_message(connection, data)
        except OSError:
            self._raise_failure()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around all that may wait for another rank. If one dies, the block ends within seconds, or the process does.

        Raises RankDied where a rank has died, inside the block or before it.
        """
        lines = self._lines
        if lines.ended.is_set():
            self._raise_failure()
        lines.at_work = True
        try:
            yield
        except BaseException as error:
            lines.at_work = False
            if isinstance(error, Exception):
                lines.ended.wait(1)  # it may be the consequence of a death
            ours = not lines.ended.is_set()
            lines.fail("rank 0 has failed")  # and the other ranks would now wait for it in vain
            self.close()
            if ours or lines.failure is None:
                raise
            raise RankDied(lines.failure) from None
        finally:
            lines.at_work = False
        if lines.ended.is_set():
            self._raise_failure()

    def _raise_failure(self) -> None:
        self._lines.ended.wait(1)
        self.close()
        raise RankDied(self._lines.failure or "the other ranks have been let go; load the model anew")


def _watch(lines: Lines) -> None:
    """Wait for a rank to die, and see to it that this process does not wait for it."""
    ranks = {connection: rank for rank, connection in lines.connections.items()}
    try:
        ready, _, _ = select.select(list(ranks), [], [])
    except (OSError, ValueError):  # closed
        return
    if lines.ended.is_set():
        return
    rank = ranks[ready[0]]
    try:
        reason = receive_message(ready[0]).decode()
    except EOFError:
        reason = "it died" + _exit_status(lines.processes.get(rank))
    lines.fail(f"rank {rank} of {len(ranks) + 1} is gone: {reason}")
    threading.Thread(target=lines.on_death, daemon=True).start()
    threading.Event().wait(_GRACE)
    if lines.at_work:
        end_process(str(lines.failure))


def end_process(reason: str) -> NoReturn:
    """Say why and end, from any thread, though the others may be waiting."""
    sys.stderr.write(f"minillm: error: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _exit_status(process: subprocess.Popen | None) -> str:
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(1)
            return f" of signal {-status}" if status < 0 else f" with exit code {status}"
    return ""


class Follower:
    """The end of any other rank. The process ends when rank 0 does; ``directory`` is then removed, if there is one."""

    def __init__(self, connection: socket.socket, directory: str = "") -> None:
        self._connection, self._directory = connection, directory
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def messages(self) -> Iterator[bytes]:
        """Rank 0's messages, until it says that there will be no more."""
        while message := self._messages.get():
            yield message

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this rank gives up."""
        with contextlib.suppress(OSError):
            send_message(self._connection, reason.encode())

    def _read(self) -> None:
        try:
            while message := receive_message(self._connection):
                self._messages.put(message)
        except EOFError:
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)  # rank 0 is gone, and the main thread may be waiting for it on the device
        self._messages.put(b"")
        threading.Event().wait(_GRACE)
        os._exit(0)


def beat(store: Store, rank: int, every: float = EVERY, silence: float = SILENCE) -> None:
    """Say that this process is there, from now on until it ends, on a connection to the store of its own.

    If the store does not answer for ``silence`` seconds, this is the node that is cut off, and the process ends: it may
    be waiting for the store itself.
    """
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()  # beats so far; 0 where there is no store any more

    def go_on() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, as those that need it will see
            while True:
                answers.put(store.add(_BEATS.format(rank), 1))
                time.sleep(every)
        answers.put(0)

    def watch() -> None:
        try:
            while answers.get(timeout=silence):
                pass
        except queue.Empty:
            end_process(f"the first node has not answered for {silence:.0f} s: it or the network is gone")

    for each in (go_on, watch):
        threading.Thread(target=each, name="beats", daemon=True).start()


class Listener:
    """Tells a process that waits for other ranks when one of them is gone. They have begun to `beat`, or will soon."""

    def __init__(self, store: Store, every: float = EVERY, silence: float = SILENCE) -> None:
        self._store, self._every, self._silence = store, every, silence
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: how many beats, and when that last changed
        self._looked_at = time.monotonic()

    def check(self, ranks: Iterable[int]) -> None:
        """Raise RankDied where one of ``ranks`` is silent for too long. Cheap: looks no more often than they beat."""
        now = time.monotonic()
        if now - self._looked_at < self._every:
            return
        self._looked_at = now
        for rank in ranks:
            beats = self._store.add(_BEATS.format(rank), 0)
            if rank not in self._heard or self._heard[rank][0] != beats:
                self._heard[rank] = beats, now
            if (silent := now - self._heard[rank][1]) >= self._silence:
                gone = "it, its node or the network is gone"
                raise RankDied(f"rank {rank} has not been heard of for {silent:.0f} s: {gone}")
