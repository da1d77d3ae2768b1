"""The engine process, as its front end sees it: start it, exchange bytes with it, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from minillm.parallel.placement import place
from minillm.system import PYTHON, start_connected

ENGINE_COMMAND = (*PYTHON, "-m", "minillm.service")


class EngineProcess(asyncio.Protocol):
    """A running engine process, started by `start_connected`. It ends with its socket, so never after this process."""

    def __init__(self, command: Iterable[str] = ENGINE_COMMAND, log: int | BinaryIO = 2) -> None:
        self._socket, self._process = start_connected(command, log=log)
        self._transport: asyncio.Transport | None = None  # None: not connected yet
        self._over = asyncio.Event()  # the socket has ended, and all bytes from it were passed on
        self._over.set()

    async def connect(self, protocol: asyncio.Protocol) -> None:
        """Pass the bytes that the process sends, and the end of the connection, to ``protocol``."""
        self._protocol = protocol
        self._over.clear()
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._protocol.data_received(data)
        except Exception as error:  # asyncio would close the socket
            asyncio.get_running_loop().call_exception_handler({"message": str(error), "exception": error})

    def connection_lost(self, exc: Exception | None) -> None:
        with contextlib.suppress(OSError):  # after a failed write, the socket may still hold the last bytes
            while data := self._socket.recv(1 << 18):
                self.data_received(data)
        self._protocol.connection_lost(None)
        self._over.set()

    def write(self, data: bytes) -> None:
        """Send bytes to the process. They are lost if the process is not connected or has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the socket, so that the process ends soon."""
        with contextlib.suppress(OSError):  # the process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int:
        """Wait until the process has ended. Return its exit code, or minus the number of the signal that ended it."""
        await self._over.wait()
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.01)
        return code

    async def stop(self, seconds: float = 0.0) -> None:
        """Close the socket, and kill the process if it has not ended after ``seconds``."""
        if seconds:
            self.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), seconds)
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # it would notice no end while a slow app pauses the reading
        await self.wait()


def start_engine(number: int, count: int, options: Mapping[str, Any]) -> EngineProcess:
    """Start the process of engine ``number`` of ``count``. Raises UsageError if ``options`` name one GPU for all."""
    words = place(number, count, options) if count > 1 else ()
    return EngineProcess((*words, *ENGINE_COMMAND, "http"))
