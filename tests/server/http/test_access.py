"""Test access to the server: API keys, hosts, and the sizes of requests."""

from __future__ import annotations

import asyncio
import gzip
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lib.server import ROOT, Server, served
from minillm.cli.serve import _keys as api_keys
from minillm.server.app import make_app
from minillm.server.http.access import Access, BodyMemory
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.server.http.rules import AccessRules

JSON = {"content-type": "application/json"}
SMALL = b'{"prompt": "a", "max_tokens": 1}'


async def enter(
    rules: AccessRules, *headers: tuple[str, str], method: str = "GET", pieces: tuple[bytes, ...] = ()
) -> tuple[int, str]:
    """Send a request through the access layer; return the status and the tenant that the application is told."""
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.append(scope["state"]["tenant"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    left = list(pieces)

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0) if left else b"", "more_body": bool(left)}

    async def send(message: Any) -> None:
        told.append(message.get("status"))

    scope = {"type": "http", "method": method, "path": "/v1/x", "client": ("10.0.0.1", 1)}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (("host", "localhost"), *headers)]
    await Access(app, rules, Metrics(FairQueue(1, 1), list))({**scope, "headers": raw}, receive, send)
    tenants = [each for each in told if isinstance(each, str)]
    return next(each for each in told if isinstance(each, int)), tenants[0] if tenants else ""


KEYS = AccessRules({"key-of-anna": "anna", "key-of-ben": "ben"})


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "bEaReR   ", "Bearer \t "])
@pytest.mark.parametrize("end", ["", "  "])
async def test_the_tenant_is_the_owner_of_the_key_however_the_scheme_is_spelled(scheme: str, end: str) -> None:
    for name in ("anna", "ben"):
        assert await enter(KEYS, ("authorization", f"{scheme}key-of-{name}{end}")) == (200, name)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (401, [("authorization", "key-of-anna")]),
        (401, [("authorization", "Basic key-of-anna")]),
        (401, [("authorization", "Bearer key-of-anna key-of-ben")]),
        (401, [("authorization", "Bearer key-of-carl")]),
        (401, [("authorization", "Bearer anna")]),
        (401, [("x-api-key", "key-of-anna")]),
        (401, []),
        (400, [("authorization", "Bearer key-of-anna"), ("authorization", "Bearer key-of-ben")]),
        (400, [("authorization", "Bearer key-of-carl"), ("authorization", "Bearer key-of-ben")]),
        (400, [("authorization", "Bearer key-of-anna"), ("host", "localhost")]),
        (403, [("authorization", "Bearer key-of-anna"), ("host", "")]),
    ],
)
async def test_nobody_else_gets_in(status: int, headers: list[tuple[str, str]]) -> None:
    if ("host", "") in headers:
        headers = headers[:1]
        assert await enter(AccessRules(KEYS.keys, ("example.org",)), *headers) == (status, "")
        return
    assert await enter(KEYS, *headers) == (status, "")


@pytest.mark.anyio
async def test_each_route_but_two_needs_a_key() -> None:
    service: Any = SimpleNamespace(metrics=Metrics(FairQueue(1, 1), list))
    app: Any = make_app(service, KEYS)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for route in app.app.routes:
            for method in (*route.methods, "TRACE"):
                answer = await client.request(method, route.path.replace("{name:path}", "x").replace("{name}", "x"))
                is_open = route.path in ("/health", "/version")
                assert (answer.status_code == 401) != is_open, f"{method} {route.path}"
                assert "minillm_" not in answer.text


@pytest.mark.anyio
async def test_without_keys_the_tenant_is_the_address_whatever_the_client_says() -> None:
    for given in ("Bearer anna", "bearer key-of-anna", ""):
        assert await enter(AccessRules(), ("authorization", given)) == (200, "10.0.0.1")


@pytest.mark.anyio
@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity", "chunked, chunked", "xchunked"])
async def test_bodies_come_uncompressed(coding: str) -> None:
    status, _ = await enter(AccessRules(), ("transfer-encoding", coding), method="POST", pieces=(b"{}",))
    assert status == 501
    status, _ = await enter(AccessRules(), ("transfer-encoding", "Chunked"), method="POST", pieces=(b"{", b"}"))
    assert status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("pieces", [(b"x" * 1001,), (b"x" * 1000, b"x")])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_a_body_without_a_length_is_bounded(pieces: tuple[bytes, ...], method: str) -> None:
    assert await enter(AccessRules(max_body=1000), method=method, pieces=pieces) == (413, "")
    assert (await enter(AccessRules(max_body=1001), method=method, pieces=pieces))[0] == 200


@pytest.mark.anyio
async def test_large_bodies_of_a_tenant_share_its_memory_in_their_order() -> None:
    memory, log = BodyMemory(10), []
    ends = {name: asyncio.Event() for name in "abcdx"}

    async def read(tenant: str, name: str, size: int) -> None:
        async with memory.take(tenant, size):
            log.append(name)
            await ends[name].wait()

    async def settle() -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return log

    tasks = {
        name: asyncio.create_task(read("anna", name, size)) for name, size in zip("abcd", (6, 4, 9, 1), strict=True)
    }
    assert await settle() == ["a", "b"], "d would fit no sooner: it has come later than c"
    tasks["x"] = asyncio.create_task(read("ben", "x", 99))
    assert await settle() == ["a", "b", "x"], "one tenant's bodies are in nobody else's way, and none is too large"
    tasks["c"].cancel()
    ends["b"].set()
    assert await settle() == ["a", "b", "x", "d"]
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert memory._used == Counter()
    assert memory._waiting == {}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "",
        "[::2]",
        "localhost:80@evil.example",
        "localhost:x",
        "localhost, evil.example",
        "user@localhost",
        "localhost/evil.example",
    ],
)
def test_names_that_are_not_the_servers_are_refused(server: Server, host: str) -> None:
    """A page of another site that has its name point here must not get in (DNS rebinding)."""
    answer = httpx.post(f"{server.url}/v1/completions", content=SMALL, headers={**JSON, "host": host})
    assert answer.status_code in (400, 403), answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1"])
def test_its_own_names_are_not(server: Server, host: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("Identity", 200)])
def test_a_compressed_body_is_named(server: Server, encoding: str, status: int) -> None:
    content = gzip.compress(SMALL) if encoding == "gzip" else SMALL
    headers = {**JSON, "content-encoding": encoding}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == status
    assert status == 200 or "content-encoding must be identity" in answer.json()["error"]["message"]


def test_a_body_may_begin_with_a_byte_order_mark(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=b"\xef\xbb\xbf" + SMALL, headers=JSON, timeout=60)
    assert answer.status_code == 200, answer.text


def test_no_web_page_may_read_an_answer(server: Server) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    answer = httpx.post(f"{server.url}/v1/completions", content=SMALL, headers={"content-type": "text/plain"})
    assert answer.status_code == 415, "a form of a web page gets here without being asked"


def test_a_page_that_is_named_may(tiny: Path) -> None:
    with served(tiny, "--num-blocks", "64", "--allow-origin", "https://good.example") as server:
        wanted = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,openai-organization"
        for origin, allowed in (("https://good.example", "https://good.example"), ("https://evil.example", None)):
            headers = {**JSON, "origin": origin}
            asked = {**headers, "access-control-request-method": "POST", "access-control-request-headers": wanted}
            preflight = httpx.options(f"{server.url}/v1/completions", headers=asked)
            assert preflight.headers.get("access-control-allow-origin") == allowed
            assert preflight.headers.get("access-control-allow-headers") == (wanted if allowed else None)
            answer = httpx.post(f"{server.url}/v1/completions", content=SMALL, headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert ("retry-after" in answer.headers.get("access-control-expose-headers", "")) == (allowed is not None)


def test_bodies_are_bounded(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=b"x" * (9 << 20), headers=JSON)
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]["message"]

    def pieces():
        for _ in range(20):
            yield b" " * (1 << 20)

    try:
        answer = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=JSON)
        assert answer.status_code == 413
    except httpx.HTTPError:
        pass  # the connection was closed before the rest was sent


def test_headers_are_bounded(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        ended = False
        for number in range(100_000):
            try:
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
            except OSError:
                ended = True
                break
            time.sleep(0.0005)
        assert ended
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "give a key as well"),
        (["--host", "::"], "give a key as well"),
        (["--host", "256.1.1.1", "--api-key-file", "KEYS"], "cannot serve at 256.1.1.1"),
        (["--host", "a..b", "--api-key-file", "KEYS"], "cannot serve at a..b: this is no host name"),
        (["--api-key-file", "nowhere"], "nowhere"),
        (["--port", "99999"], "--port must be from 0 to 65535"),
        (["--allow-origin", "*"], "name each origin"),
        (["--served-model-name", "local", "--served-model-name", ""], "--served-model-name is empty"),
        (["--api-key", "short"], "8 ASCII characters"),
        (["--api-key", ""], "8 ASCII characters"),
        (["--prot", "1"], "unknown option '--prot', did you mean --port"),
    ],
)
def test_wrong_options_are_one_line(tiny: Path, tmp_path: Path, options: list[str], words: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-anna\n")
    words_of = [str(keys) if word == "KEYS" else word for word in options]
    command = [sys.executable, "-m", "minillm", "serve", str(tiny), *words_of]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("mode", "is_said"), [(0o600, False), (0o644, False), (0o660, True), (0o666, True)])
def test_a_key_file_that_others_can_change_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, is_said: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna: key-of-anna\n")
    keys.chmod(mode)
    assert api_keys("", str(keys)) == {"key-of-anna": "anna"}
    assert ("other users can change the keys" in capsys.readouterr().err) == is_said


def test_a_key_of_the_command_line_is_not_among_the_arguments(tiny: Path) -> None:
    with served(tiny, "--num-blocks", "64", "--api-key", "key-of-anna", forked=False) as server:
        for pid in server.pids:
            assert b"key-of-anna" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"key-of-anna" not in Path(f"/proc/{server.pids[1]}/environ").read_bytes(), "the engine needs none"
        refused = httpx.get(f"{server.url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        good = {"authorization": "Bearer key-of-anna"}
        assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200


def test_a_port_in_use_is_one_line(minillm_command: tuple[str, ...], server: Server, tiny: Path) -> None:
    port = server.url.rpartition(":")[2]
    command = [*minillm_command, "serve", str(tiny), "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
