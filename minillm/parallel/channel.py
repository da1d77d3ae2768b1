"""Connections from rank 0 to the other ranks. They carry each step's work, and show each side if the other side dies.

Each rank has a socket to rank 0. The connection closes no matter how a process dies, while a collective would wait
forever. A message is its length and its bytes. Rank 0 sends steps and gets no reply: the other ranks send a
message only if they fail, with the reason.
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
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from minillm.errors import MinillmError
from minillm.system import exit_status

_LENGTH = struct.Struct("<I")
_GRACE = 5.0  # seconds that a process gets to end or to notice a dead one by itself


class RankDied(MinillmError):
    """A process that shares the model has died, so the model cannot be used any more."""


def send_message(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> bytes:
    """Return the next message. Raises EOFError if the other process has closed the connection or died."""
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
class RankConnections:
    """Rank 0's connections to the other ranks, and their state."""

    connections: Mapping[int, socket.socket]  # by rank
    processes: Mapping[int, subprocess.Popen]  # by rank: processes started by rank 0
    on_death: Callable[[], None]  # called in another thread when a rank has died: aborts all waits on the device
    at_work: bool = False  # whether the main thread may be waiting for another rank
    failure: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # set after a failure or `close`

    def fail(self, reason: str) -> None:
        if not self.ended.is_set():
            self.failure = reason
            self.ended.set()

    def close(self) -> None:
        """Tell the other ranks to end, and kill their processes if they do not."""
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
    """Rank 0's side of the connections."""

    def __init__(self, lines: RankConnections) -> None:
        self._lines = lines
        self.close = weakref.finalize(self, self._lines.close)  # at the latest when the interpreter exits
        threading.Thread(target=_watch, args=(self._lines,), daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send a message to every other rank. Raises RankDied if one has died."""
        try:
            for connection in self._lines.connections.values():
                send_message(connection, data)
        except OSError:
            self._raise_failure()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Guard a block of code that may wait for another rank. If a rank dies, the block or this process ends soon.

        Raises RankDied if a rank died before the block or during it.
        """
        lines = self._lines
        if lines.ended.is_set():
            self._raise_failure()
        lines.at_work = True
        try:
            yield
        except BaseException as error:
            lines.at_work = False
            is_known = isinstance(error, MinillmError)  # such as a wrong option, which the other ranks find as well
            if isinstance(error, Exception) and not is_known:
                lines.ended.wait(1)  # the error may be a consequence of a rank's death
            ours = is_known or not lines.ended.is_set()
            lines.fail("rank 0 has failed")  # the other ranks would wait for it forever
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
        raise RankDied(self._lines.failure or "the other ranks have been released; load the model again")


def _watch(lines: RankConnections) -> None:
    """Wait until a rank dies or fails. Then abort the collectives that wait for that rank. If that does not help, end
    this process.
    """
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
    """Print the reason and end the process at once. Works from any thread, even while other threads are blocked."""
    sys.stderr.write(f"minillm: error: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _exit_status(process: subprocess.Popen | None) -> str:
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(1)
            return exit_status(status)
    return ""


class Follower:
    """Another rank's side of its connection to rank 0. If rank 0 ends, this process ends.

    ``directory`` contains the ranks' shared store, and is removed if rank 0 dies.
    """

    def __init__(self, connection: socket.socket, directory: str) -> None:
        self._connection, self._directory = connection, directory
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def messages(self) -> Iterator[bytes]:
        """Yield rank 0's messages until rank 0 sends an empty one, which means the end."""
        while message := self._messages.get():
            yield message

    def fail(self, reason: str) -> None:
        """Report to rank 0 why this rank fails."""
        with contextlib.suppress(OSError):
            send_message(self._connection, reason.encode())

    def _read(self) -> None:
        try:
            while message := receive_message(self._connection):
                self._messages.put(message)
        except EOFError:
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)  # rank 0 has died, and the main thread may be waiting for it on the device
        self._messages.put(b"")
        threading.Event().wait(_GRACE)
        os._exit(0)
