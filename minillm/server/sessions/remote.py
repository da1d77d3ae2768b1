"""Connect a chat app to an engine on another machine: ``python -m minillm.server.sessions.remote URL NUMBER``.

The chat app starts this program instead of a local engine process. Both exchange the same messages (`minillm.service`)
over the socket NUMBER, so the app need not know where its engine is. This program passes the messages on through the
server's route ``/v1/session``. If the server requires an API key, it is read from ``MINILLM_API_KEY``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, NoReturn
from urllib.parse import urlsplit

from minillm.checks import shown
from minillm.errors import MinillmError, UsageError
from minillm.progress import Progress, size
from minillm.service import messages as chat
from minillm.system import parent_socket
from minillm.text.safe import clean_line, parse_json

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # time without data after which the server counts as gone; it sends a ping every 15 seconds
_LONGEST_LINE = 96 << 20  # maximum bytes of an event; the app's own limit is lower
_LONGEST_REPLY = 1 << 16  # maximum bytes of a reply to a command
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a session name that is safe as part of a path


class Busy(MinillmError):
    """The server is busy. Send the request again after ``seconds``."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    secure: bool
    host: str
    port: int
    path: str  # the part of the path before ``/v1``

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse an address such as ``http://host:port``, with or without ``/v1``.

        Raises UsageError for anything else.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname or "", parts.port
            if not host.encode("idna") or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
                raise ValueError
        except ValueError:  # also for a port above 65,535, or a host such as a..b or [::1
            raise UsageError(f"--server {shown(url)}: give an address like http://127.0.0.1:8000") from None
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, host, port or (443 if secure else 80 if "://" in url else 8000), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.path}"

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=seconds)

    def ask(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> Any:
        """Send a request and return the response if its status is 200.

        Raises:
            Busy: the status is 429.
            UsageError: the status is 400.
            MinillmError: no server answers, or the response has any other status, such as 401 for a missing key.
        """
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
            raise Busy(f"the server at {self} is busy: {reason}", _pause(again))
        if response.status == 401:
            raise MinillmError(
                f"the server at {self} requires an API key: set MINILLM_API_KEY, and start the chat again"
            )
        if response.status == 400:
            raise UsageError(f"the server at {self} rejects this: {reason}")
        raise MinillmError(f"the server at {self} rejects this: {reason}")


def _pause(retry_after: str) -> int:
    """Return the seconds to wait before the next request to a busy server, from 1 to 60."""
    return max(1, min(60, int(retry_after[:9]))) if retry_after.isdecimal() else 1


def _reason(response: http.client.HTTPResponse) -> str:
    try:
        return clean_line(str(parse_json(response.read(_LONGEST_REPLY))["error"]["message"]), 300)
    except (ValueError, KeyError, TypeError, http.client.HTTPException, OSError):
        return f"{response.status} {clean_line(response.reason)}"


def main() -> None:
    """Connect to the server, then pass on commands and events until either side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the app handles ctrl-c
    stream = parent_socket().makefile("rwb")
    if not stream.readline():  # the first command, which is `Load`
        return
    app = App(stream)
    try:
        address = Address.parse(sys.argv[1])
        app.send(chat.Loading(Progress(f"connecting to {address}", 0, None, "")))
        connection = address.connect(_CONNECT_SECONDS)
        events = address.ask(connection, "GET", "/v1/session")
        if connection.sock is not None:
            connection.sock.settimeout(_SILENT_SECONDS)
        session = _session(events.readline(_LONGEST_LINE))
    except (MinillmError, ValueError, http.client.HTTPException, OSError) as error:
        app.leave(str(error) if isinstance(error, MinillmError) else f"the server at {sys.argv[1]} runs no minillm")
    commands = Commands(address, session, app)
    threading.Thread(target=commands.read, args=(stream,), daemon=True).start()
    threading.Thread(target=commands.run, daemon=True).start()
    try:
        while (line := events.readline(_LONGEST_LINE)).endswith(b"\n"):
            if line.strip():
                app.write(line)
        if len(line) == _LONGEST_LINE:
            app.leave(f"the server at {address} sent a line of more than {size(_LONGEST_LINE)}")
    except (OSError, http.client.HTTPException, ValueError):
        pass
    app.leave(f"the server at {address} has ended")


def _session(line: bytes) -> str:
    """Return the session's name from the server's first line.

    Raises:
        ValueError: the line has no valid session name.
    """
    first = parse_json(line)
    name = first.get("session") if isinstance(first, dict) else None
    if not isinstance(name, str) or not _SESSION.fullmatch(name):
        raise ValueError("no session")
    return name


class App:
    """The app that started this process. Events for the app are written to ``stream``. Any thread may write."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def write(self, line: bytes) -> None:
        with self._lock:
            self._stream.write(line)
            self._stream.flush()

    def send(self, event: chat.Event) -> None:
        self.write(chat.encode(event))

    def leave(self, reason: str) -> NoReturn:
        """Tell the app why the session ends, and end this process at once.

        Other threads may be blocked in a read.
        """
        with contextlib.suppress(OSError):
            self.send(chat.LoadFailed(reason, 1))
        os._exit(1)


class Commands:
    """Sends the app's commands to the server. If the server is too busy for a question, the question is sent again."""

    def __init__(self, address: Address, session: str, app: App) -> None:
        self._address, self._path, self._app = address, f"/v1/session/{session}", app
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Questions to send again, by request: the time of the next attempt, the command, and its encoded line.
        self._later: dict[str, tuple[float, chat.Generate, bytes]] = {}
        self._connection = address.connect(_CONNECT_SECONDS)

    def read(self, stream: BufferedIOBase) -> None:
        """Queue each line of ``stream``, an encoded command of the app, until the stream ends."""
        with contextlib.suppress(ConnectionResetError):  # the app has ended with unread events
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def run(self) -> None:
        """Send the queued commands. End the process when the app sends no more commands or the server is gone."""
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
                self._app.leave(str(error))

    def _carry_out(self, line: bytes) -> None:
        command = chat.decode_command(line)
        match command:
            case chat.Abort(request_id) if self._later.pop(request_id, None) is not None:
                self._app.send(chat.RequestFailed(request_id, "stopped while it waited for the server"))
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
        except UsageError as error:  # only this command is wrong; the app must not wait for an answer
            if question is not None:
                self._app.send(chat.RequestFailed(question.request_id, str(error)))

    def _post(self, line: bytes) -> None:
        for attempt in (1, 2):  # the server may have closed an idle connection
            try:
                reply = self._address.ask(self._connection, "POST", self._path, line)
                reply.read(_LONGEST_REPLY)
                if not reply.isclosed():  # unread bytes must not be mistaken for the next reply
                    self._connection.close()
                return
            except (Busy, UsageError):
                raise
            except (MinillmError, http.client.HTTPException, OSError) as error:
                self._connection.close()
                if attempt == 2:
                    silent = MinillmError(f"the server at {self._address} does not respond")
                    raise error if isinstance(error, MinillmError) else silent from error


if __name__ == "__main__":
    main()
