"""Test that all graphs are captured on one stream. A third or fourth stream makes every graph slower."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import minillm
from minillm.kernels import streams
from minillm.kernels.streams import capture_stream


def test_a_device_has_one_stream_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    capture_stream.cache_clear()
    try:
        first, second = torch.device("cuda", 0), torch.device("cuda", 1)
        assert capture_stream(first) is capture_stream(torch.device("cuda", 0))
        assert capture_stream(first) is not capture_stream(second)
    finally:
        capture_stream.cache_clear()


def test_nothing_else_makes_streams() -> None:
    """Exceptions: a rank stops the others on one, idle before, and weights are copied on one."""
    folders = {Path(module.__file__ or "").resolve().parent for module in (minillm, streams)}
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    made = {path.name for path in paths if re.search(r"cuda\.Stream\(|cuda\.graph\((?!.*stream=)", path.read_text())}
    assert made == {"streams.py", "collectives.py", "upload.py"}
