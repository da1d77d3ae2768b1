"""A server of a tiny model, as the command line starts it, and a scripted engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from lib.programs.warm import process_of
from lib.terminal import children
from minillm.server.client import Answer
from minillm.service.call_messages import Complete, Ended, Text

ROOT = Path(__file__).resolve().parents[2]
FORKING: list[Callable[[str], str]] = []  # the fixture of this name, set when the tests begin


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    said: list[str] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the server and its engines."""
        server = process_of(self.process.pid)
        return [server, *map(process_of, children(server))]

    def num_descriptors(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    def figure(self, name: str) -> float:
        """Return a value of /metrics."""
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": "Bearer key-of-anna"}, timeout=60).text
        found = re.search(rf"^minillm_{name} ([\d.e+-]+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def free_prefixes(self) -> None:
        """Free all that is pinned."""
        for prefix in httpx.get(f"{self.url}/v1/prefixes", timeout=60).json()["data"]:
            httpx.delete(f"{self.url}/v1/prefixes/{prefix['id']}", timeout=60)

    def wait_until_idle(self) -> None:
        """Return once nothing is computed and nothing waits; fails after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            tables = httpx.get(f"{self.url}/v1/cache", timeout=60).json()["tables"]
            busy = any(each["state"] not in ("idle", "pinned") for each in tables)
            if not busy and not self.figure("seats_taken") and not self.figure("requests_queued"):
                return
            time.sleep(0.1)
        raise AssertionError(f"still busy: {tables}")

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Return once ``holds`` is true; fails after a minute."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.1)


@contextmanager
def served(
    model: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    forked: bool = True,
) -> Iterator[Server]:
    """Run ``minillm serve``; it is stopped as by ctrl-c, and must end well.

    ``forked`` processes start quickly, see `lib.programs.warm`.
    """
    command = [FORKING[0]("minillm")] if forked else [sys.executable, "-m", "minillm"]
    command += ["serve", str(model), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    server = Server(process, "")
    address = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.said.append(line)
            if found := re.search(r" at (http://\S+)/v1", line):
                server.url = found[1]
                address.set()
        address.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        address.wait(120)
        assert server.url, "".join(server.said)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join(5)


class Engine:
    """Says a word every hundredth of a second, ten in all; notes the answers that are left."""

    def __init__(self) -> None:
        self.left: list[Answer] = []
        self.tasks: list[asyncio.Task[None]] = []

    def complete(self, call: Complete, news: asyncio.Event) -> Answer:
        answer = Answer(call.request_id, news=news)
        self.tasks.append(asyncio.create_task(self._say(answer)))
        return answer

    async def _say(self, answer: Answer) -> None:
        for _ in range(10):
            await asyncio.sleep(0.01)
            answer.texts.append(Text(answer.request_id, 0, "word ", 1))
            answer.news.set()
        answer.ended = Ended(answer.request_id, 3, 0)
        answer.news.set()

    def leave(self, answer: Answer) -> None:
        self.left.append(answer)
