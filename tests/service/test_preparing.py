"""Test that an idle engine process prepares the work that later steps would wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.models import write_tiny_model
from minillm.runner.runner import Runner
from minillm.service.__main__ import Inbox, serve
from minillm.service.messages import Load, Loaded, Message


@pytest.mark.parametrize("pieces", [1, 3])
def test_until_a_command_comes(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    events: list[Message] = []
    done = []

    def prepare_ahead(self: Runner) -> bool:
        done.append(events[-1])
        if len(done) == pieces:
            inbox.put(None)
        return True

    monkeypatch.setattr(Runner, "prepare_ahead", prepare_ahead)
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
    inbox.put(Load(str(write_tiny_model(tmp_path)), options))
    assert serve(inbox, events.append) == 0
    assert len(done) == pieces
    assert any(isinstance(event, Loaded) for event in events[: events.index(done[0])])
