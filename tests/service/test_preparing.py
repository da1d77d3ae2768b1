"""Test that an idle engine process prepares the work that later steps would wait for."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from lib.models import write_tiny_model
from minillm.runner.runner import Runner
from minillm.service.__main__ import serve
from minillm.service.messages import Command, Event, Load, Loaded


@pytest.mark.parametrize("pieces", [1, 3])
def test_until_a_command_comes(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: queue.Queue[Command | None] = queue.Queue()
    events: list[Event] = []
    done = []

    def prepare_ahead(self: Runner) -> bool:
        done.append(events[-1])
        if len(done) == pieces:
            commands.put(None)
        return True

    monkeypatch.setattr(Runner, "prepare_ahead", prepare_ahead)
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
    commands.put(Load(str(write_tiny_model(tmp_path)), options))
    assert serve(commands, events.append) == 0
    assert len(done) == pieces
    assert any(isinstance(event, Loaded) for event in events[: events.index(done[0])])
