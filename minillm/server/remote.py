"""The engine of another machine as a program: ``python -m minillm.server.remote URL``.

It speaks the messages of `minillm.service` on stdin and stdout, as an engine's process does, so the chat app needs not
know where its engine is. They travel as ``/v1/session`` of a server. The key, if one is needed, is ``MINILLM_API_KEY``.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from minillm.errors import MinillmError, UsageError
from minillm.progress import Progress
from minillm.service import messages as chat
from minillm.text.safe import clean_line

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # a server says at least every 15 seconds that it is alive


class Busy(MinillmError):
    """The server has no room now; ``seconds`` later it may have."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    secure: bool
    host: str
    port: int
    path: str  # before ``/v1``

    @classmethod
    def parse(cls, url: str) -> Address:
        """The parts of ``http://host:port``, with or without ``/v1``; raises UsageError where it is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
            parts = parts._replace(netloc="")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"--server {url}: give an address like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80 if "://" in url else 8000), path)

    def __str__(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.host}:{self.port}{self.path}"

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=seconds)

    def ask(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> Any:
        """The response to a request; raises MinillmError, in one line, for one that is no success."""
        key = os.environ.get("MINILLM_API_KEY", "")
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        try:
            connection.request(method, f"{self.path}{path}", body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise MinillmError(f"no server answers at {self}: {clean_line(why)}") from None
        if response.status == 200:
            return response
        reason, again = _reason(response), response.headers.get("retry-after", "1")
        if response.status == 429:
            raise Busy(f"the server at {self} is busy: {reason}", min(60, int(again)) if again.isdecimal() else 1)
        if response.status == 400:
            raise UsageError(f"the server at {self} refuses: {reason}")
        raise MinillmError(f"the server at {self} refuses: {reason}")


def _reason(response: http.client.HTTPResponse) -> str:
    try:
        return clean_line(str(json.loads(response.read(1 << 16))["error"]["message"]), 300)
    except (ValueError, KeyError, TypeError, OSError):
        return f"{response.status} {clean_line(response.reason)}"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the app's to interpret
    out, lock = sys.stdout.buffer, threading.Lock()
    load = sys.stdin.buffer.readline()
    if not load:
        return 0

    def write(line: bytes) -> None:
        with lock:
            out.write(line)
            out.flush()

    def send(event: chat.Event) -> None:
        write(chat.encode(event))

    try:
        address = Address.parse(sys.argv[1])
        send(chat.Loading(Progress(f"connecting to {address}", 0, None, "")))
        connection = address.connect(_CONNECT_SECONDS)
        events = address.ask(connection, "GET", "/v1/session")
        if connection.sock is not None:
            connection.sock.settimeout(_SILENT_SECONDS)
        session = json.loads(events.readline())["session"]
    except (MinillmError, ValueError, KeyError, OSError) as error:
        text = str(error) if isinstance(error, MinillmError) else f"the server at {sys.argv[1]} is not minillm's"
        send(chat.LoadFailed(text, 1))
        return 1
    commands = Commands(address, session, send)
    threading.Thread(target=commands.read, args=(sys.stdin.buffer,), daemon=True).start()
    threading.Thread(target=commands.run, daemon=True).start()
    try:
        while line := events.readline():
            if line.strip():
                write(line)
    except (OSError, http.client.HTTPException, ValueError):
        pass
    sys.stderr.write(f"the server at {address} has gone\n")
    return 1


class Commands:
    """Brings the app's commands to the server. A question that finds no room there is asked again until it is taken."""

    def __init__(self, address: Address, session: str, send: Callable[[chat.Event], None]) -> None:
        self._address, self._path, self._send = address, f"/v1/session/{session}", send
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._later: dict[str, tuple[float, chat.Generate, bytes]] = {}  # questions, by request, and when they are due
        self._connection = address.connect(_CONNECT_SECONDS)

    def read(self, stream: BinaryIO) -> None:
        """Take the app's lines until there are no more."""
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def run(self) -> None:
        """Send commands; the end of the app's lines, or of the server, is the end of this process."""
        while True:
            due, _, again = min(self._later.values(), key=lambda each: each[0], default=(None, None, None))
            try:
                line = self._lines.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                line = again
            if line is None:
                os._exit(0)
            try:
                self._carry_out(line)
            except MinillmError as error:
                sys.stderr.write(f"{error}\n")
                sys.stderr.flush()
                os._exit(1)

    def _carry_out(self, line: bytes) -> None:
        command = chat.decode_command(line)
        match command:
            case chat.Abort(request_id) if self._later.pop(request_id, None) is not None:
                self._send(chat.RequestFailed(request_id, "stopped while it waited for the server"))
                return
            case chat.Drop(request_id):
                self._later.pop(request_id, None)
            case chat.Forget(conversation):
                self._later = {name: each for name, each in self._later.items() if each[1].conversation != conversation}
        question = command if isinstance(command, chat.Generate) else None
        if question is not None:
            self._later.pop(question.request_id, None)
        try:
            self._post(line)
        except Busy as busy:
            if question is not None:
                self._later[question.request_id] = (time.monotonic() + busy.seconds, question, line)
        except UsageError as error:  # this command only; a question's app must not wait for an answer
            if question is not None:
                self._send(chat.RequestFailed(question.request_id, str(error)))

    def _post(self, line: bytes) -> None:
        for attempt in (1, 2):  # the server may have closed a connection that lay idle
            try:
                self._address.ask(self._connection, "POST", self._path, line).read()
                return
            except (Busy, UsageError):
                raise
            except MinillmError:
                self._connection.close()
                if attempt == 2:
                    raise


if __name__ == "__main__":
    sys.exit(main())
