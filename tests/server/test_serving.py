"""Test the server's process: file descriptors and log."""

from __future__ import annotations

import asyncio
import errno
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minillm.server import serving
from minillm.server.serving import FewDescriptors, allow_descriptors

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_missing_descriptors_are_one_line_a_minute(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """asyncio retries for each of these errors: `BaseSelectorEventLoop._accept_connection`."""
    loop, handle = asyncio.get_running_loop(), FewDescriptors()
    for now in (1000.0, 1030.0, 1061.0):
        monkeypatch.setattr(loop, "time", partial(float, now))
        for _ in range(1000):
            handle(loop, {"message": "socket.accept() out of system resource", "exception": OSError(number, "few")})
    assert capsys.readouterr().err == "minillm: connections wait: few; allow more with 'ulimit -n'\n" * 2


async def test_other_exceptions_are_told_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    monkeypatch.setattr(loop, "default_exception_handler", told.append)
    contexts: list[Any] = [{"message": "x", "exception": OSError(errno.EPIPE, "x")}, {"message": "y"}]
    for context in contexts:
        FewDescriptors()(loop, context)
    assert told == contexts


async def test_a_model_goes_by_its_short_name_and_its_whole(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny.gguf").touch()
    assert serving._names(str(tmp_path / "tiny")) == ("tiny", str(tmp_path / "tiny"))
    assert serving._names(str(tmp_path / "tiny.gguf")) == ("tiny", str(tmp_path / "tiny.gguf"))
    assert serving._names("owner/model") == ("owner/model",)


@pytest.mark.parametrize(
    ("limits", "count", "expected"),
    [
        ((1024, 4096), 2760, (2760, 4096)),
        ((1024, 2000), 2760, (2000, 2000)),
        ((1024, resource.RLIM_INFINITY), 2760, (2760, resource.RLIM_INFINITY)),
        ((65536, 65536), 2760, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2760, None),
    ],
)
async def test_the_server_may_open_as_many_descriptors_as_connections(
    limits: tuple[int, int], count: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(serving.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(serving.resource, "setrlimit", lambda _, value: chosen.append(value))
    allow_descriptors(count)
    assert chosen == ([] if expected is None else [expected])
