"""The app's asyncio client of the engine process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable

from minillm.service.checks import EventReader
from minillm.service.messages import Command, Event, encode
from minillm.service.process import ENGINE_COMMAND, EngineProcess

_LINE_LIMIT = 64 << 20  # bytes per event; a report of a million blocks is smaller


class CommandClient:
    """Sends an app's commands to an engine process, and yields the process's events."""

    def __init__(self, command: Iterable[str] = ENGINE_COMMAND) -> None:
        """Start ``command``, a program that reads commands and writes events. Raises OSError if that fails."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = EngineProcess(command, log=self._log)
        self._reader = EventReader()

    async def connect(self) -> None:
        """Connect with the process. Call this before the other methods."""
        self._lines = asyncio.StreamReader(_LINE_LIMIT)
        await self.process.connect(asyncio.StreamReaderProtocol(self._lines))

    def send(self, command: Command) -> None:
        """Queue a command for the process. The command is lost if the process has ended."""
        self._reader.note(command)
        self.process.write(encode(command))

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the process ends. Raises ValueError for a line that `EventReader` rejects."""
        async for line in self._lines:
            yield self._reader.read(line)
        await self.process.wait()

    def last_words(self) -> str:
        """Return the last line of the log, which names the cause of a crash. Return "" if the log is empty."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
