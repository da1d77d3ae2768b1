"""The app's side of the engine's process, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm.service.checks import EventReader
from minillm.service.messages import Command, Event, encode

# -P: a module of the current directory must not stand in for one of the standard library.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "minillm.service")
_LINE_LIMIT = 64 << 20  # bytes of one event; a picture of a million blocks stays below


@dataclass(frozen=True)
class EngineProcess:
    """A running engine process. Made by `start`; ended by `stop`, or with the app's own end."""

    _process: asyncio.subprocess.Process
    log: Path  # the process's stderr
    _reader: EventReader = field(default_factory=EventReader)

    @classmethod
    async def start(cls, log: Path, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
        """Start a program that speaks the messages. Its stderr goes to ``log``, not to the app's screen."""
        # The process looks for minillm where this one has it, then in the user's PYTHONPATH.
        places = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=_LINE_LIMIT,
                start_new_session=True,  # signals from the terminal are for the app
            )
        return cls(process, log)

    def send(self, command: Command) -> None:
        """Queue a command; one for a process that has ended is dropped."""
        assert self._process.stdin is not None
        self._reader.note(command)
        if not self._process.stdin.is_closing():
            self._process.stdin.write(encode(command))

    async def events(self) -> AsyncIterator[Event]:
        """Every event until the process ends. Raises ValueError for a line that `EventReader` rejects."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield self._reader.read(line)
        await self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode

    def last_words(self) -> str:
        """The last line of the process's log: why it ended, if it crashed."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else ""

    async def stop(self) -> None:
        """End the process at once, and wait until it is gone."""
        if self._process.returncode is None:
            # asyncio's own `kill` would reap a process that has just ended, and its exit code would be lost.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
