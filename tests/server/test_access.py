"""Who may come in, and how much they may bring."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from running_server import ROOT, Server, served

JSON = {"content-type": "application/json"}
SMALL = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]"])
def test_names_that_are_not_the_servers_are_refused(server: Server, host: str) -> None:
    """A page of another site that has its name point here must not get in (DNS rebinding)."""
    answer = httpx.post(f"{server.url}/v1/completions", content=SMALL, headers={**JSON, "host": host})
    assert answer.status_code in (400, 403), answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1"])
def test_its_own_names_are_not(server: Server, host: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


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
        (["--api-key-file", "nowhere"], "nowhere"),
        (["--port", "99999"], "--port must be from 0 to 65535"),
        (["--allow-origin", "*"], "name each origin"),
        (["--api-key", "short"], "8 ASCII characters"),
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


def test_a_key_of_the_command_line_is_not_among_the_arguments(tiny: Path) -> None:
    with served(tiny, "--num-blocks", "64", "--api-key", "key-of-anna") as server:
        for pid in server.pids:
            assert b"key-of-anna" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"key-of-anna" not in Path(f"/proc/{server.pids[1]}/environ").read_bytes(), "the engine needs none"
        refused = httpx.get(f"{server.url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        good = {"authorization": "Bearer key-of-anna"}
        assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200


def test_a_port_in_use_is_one_line(server: Server, tiny: Path) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "minillm", "serve", str(tiny), "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
