"""The app's asyncio client of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm.service.checks import EventReader
from minillm.service.messages import Command, Event, encode
from minillm.system import PYTHON, child_environment

ENGINE_COMMAND = (*PYTHON, "-m", "minillm.service")
_LINE_LIMIT = 64 << 20  # bytes per event; a report of a million blocks is smaller


@dataclass(frozen=True)
class EngineProcess:
    """A running engine process, started by `start`. It ends when `stop` is called or the app ends."""

    _process: asyncio.subprocess.Process
    log: Path  # the process's stderr
    _reader: EventReader = field(default_factory=EventReader)

    @classmethod
    async def start(cls, log: Path, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
        """Start ``command``, a program that reads commands and writes events. Its stderr goes to the file ``log``."""
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=_LINE_LIMIT,
                start_new_session=True,  # terminal signals go to the app only
            )
        return cls(process, log)

    def send(self, command: Command) -> None:
        """Queue a command for the process. The command is lost if the process has ended."""
        assert self._process.stdin is not None
        self._reader.note(command)
        if not self._process.stdin.is_closing():
            self._process.stdin.write(encode(command))

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the process ends. Raises ValueError for a line that `EventReader` rejects."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield self._reader.read(line)
        await self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """Return the process's exit code. None: the process runs. A negative code: a signal ended it."""
        return self._process.returncode

    def last_words(self) -> str:
        """Return the last line of the log, which names the cause of a crash. Return "" if there is no log."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else ""

    async def stop(self) -> None:
        """Kill the process and wait until it has ended."""
        if self._process.returncode is None:
            # asyncio's own `kill` would reap a process that has just ended and lose its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
