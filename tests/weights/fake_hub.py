"""A fake hub that breaks on purpose: the part of huggingface.co that the client needs, with files in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE = 1 << 20  # bytes
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class FakeHub:
    """One repository. Change the fields to make it misbehave."""

    repository: str
    files: dict[str, bytes]
    status: int = 200  # of every answer
    error_code: str = ""
    html: bool = False  # a captive portal answers everything
    cut_after: int | None = None  # bytes of an answer after which the connection breaks
    dead_after_cuts: int | None = None  # how often before the server only fails
    cuts: int = 0
    wrong_sha256: bool = False
    announced: dict[str, Any] = field(
        default_factory=dict
    )  # sizes of files that the API gives instead of the right ones
    chunked: bool = False  # files come without a Content-Length
    commit: str = COMMIT
    token: str | None = None  # required as a bearer token
    info_of: Callable[[str], bool] = lambda path: True  # which paths of the API there are
    on_sent: Callable[[str, int], None] = lambda path, sent: None  # before an answer, and up to where in a file
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    tokens: list[str] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        # The server checks this often whether to end, and a test waits for it.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            size = self.announced.get(name, len(data))
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_sha1(data)}
            if name.endswith(".safetensors"):
                digest = "0" * 64 if self.wrong_sha256 else hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"_id": "x", "id": self.repository, "modelId": self.repository, "sha": self.commit, "siblings": siblings}

    def gets(self, name: str) -> list[str]:
        """The Range headers of all requests for a file."""
        return [wanted for method, path, wanted in self.requests if method == "GET" and path.endswith(f"/{name}")]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append(("GET", self.path, self.headers.get("Range", "")))
            hub.tokens.append(self.headers.get("Authorization", ""))
            path = self.path.split("?")[0]
            hub.on_sent(path, 0)
            if hub.html:
                return self._answer(200, b"<html><body>Please log in</body></html>", {"Content-Type": "text/html"})
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if hub.status != 200:
                return self._answer(hub.status, b"{}", {"X-Error-Code": hub.error_code})
            if path.startswith(f"/api/models/{hub.repository}") and hub.info_of(path):
                return self._answer(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})
            prefix = f"/{hub.repository}/resolve/{hub.commit}/"
            name = path.removeprefix(prefix)
            if not path.startswith(prefix) or name not in hub.files:
                return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            if hub.dead_after_cuts is not None and hub.cuts >= hub.dead_after_cuts:
                return self._answer(500, b"{}", {})
            return self._file(path, hub.files[name])

        def _file(self, path: str, data: bytes) -> None:
            start = 0
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").split("-")[0])
            body = data[start:]
            self.send_response(206 if start else 200)
            if hub.chunked:
                self.send_header("Connection", "close")
                self.close_connection = True
            else:
                self.send_header("Content-Length", str(len(body)))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if hub.cut_after is not None and len(body) > hub.cut_after:
                hub.cuts += 1
                self.wfile.write(body[: hub.cut_after])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            for sent in range(0, len(body), _PIECE):
                try:
                    self.wfile.write(body[sent : sent + _PIECE])
                except ConnectionError:  # a client that was killed
                    self.close_connection = True
                    return
                hub.on_sent(path, start + min(sent + _PIECE, len(body)))

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *details: Any) -> None:
            pass

    return Handler
