"""The engine of another machine as a program: ``python -m minillm.server.remote URL``.

It speaks the messages of `minillm.service` on stdin and stdout, as an engine's process does, so the chat app needs not
know where its engine is. They travel as ``/v1/session`` of a server. The key, if one is needed, is ``MINILLM_API_KEY``.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import MinillmError, UsageError
from minillm.progress import Progress
from minillm.service import messages as chat
from minillm.text.safe import clean_line

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # a server says at least every 15 seconds that it is alive


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
        if response.status != 200:
            raise MinillmError(f"the server at {self} refuses: {_reason(response)}")
        return response


def _reason(response: http.client.HTTPResponse) -> str:
    try:
        return clean_line(str(json.loads(response.read(1 << 16))["error"]["message"]), 300)
    except (ValueError, KeyError, TypeError, OSError):
        return f"{response.status} {clean_line(response.reason)}"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the app's to interpret
    out = sys.stdout.buffer
    load = sys.stdin.buffer.readline()
    if not load:
        return 0

    def send(event: chat.Event) -> None:
        out.write(chat.encode(event))
        out.flush()

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
    threading.Thread(target=_send_commands, args=(address, session), daemon=True).start()
    try:
        while line := events.readline():
            if line.strip():
                out.write(line)
                out.flush()
    except (OSError, http.client.HTTPException, ValueError):
        pass
    sys.stderr.write(f"the server at {address} has gone\n")
    return 1


def _send_commands(address: Address, session: str) -> None:
    """Bring the app's commands to the server; the end of stdin is the end of this process."""
    connection = address.connect(_CONNECT_SECONDS)
    for line in sys.stdin.buffer:
        for attempt in (1, 2):  # the server may have closed a connection that lay idle
            try:
                address.ask(connection, "POST", f"/v1/session/{session}", line).read()
                break
            except MinillmError as error:
                connection.close()
                if attempt == 2:
                    sys.stderr.write(f"{error}\n")
                    sys.stderr.flush()
                    os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
