"""Test that an idle engine process prepares the work that later steps would wait for, and reports its progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.models import write_tiny_model
from minillm.loading import bandwidth
from minillm.runner.runner import Runner
from minillm.service.__main__ import Inbox, serve
from minillm.service.messages import Load, Loaded, Loading, Message, Preparing


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
    rated: list[str] = []
    monkeypatch.setattr(bandwidth, "known_rate", lambda device: rated.append(device.type))
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
    inbox.put(Load(str(write_tiny_model(tmp_path)), options))
    assert serve(inbox, events.append) == 0
    assert len(done) == pieces
    assert rated == ["cpu"], "the app's model list uses the rate"
    assert any(isinstance(event, Loaded) for event in events[: events.index(done[0])])
    assert not any(isinstance(event, Preparing) for event in events), "there is nothing to report"


@pytest.mark.parametrize("wait_warm", [False, True])
def test_progress_is_reported(wait_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    events: list[Message] = []
    done = 0

    def prepare_ahead(self: Runner) -> bool:
        nonlocal done
        done += 1
        if done >= 5:
            inbox.put(None)
        return done < 5

    monkeypatch.setattr(Runner, "prepare_ahead", prepare_ahead)
    monkeypatch.setattr(Runner, "prepared", property(lambda self: (min(done, 5), 5)))
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
    inbox.put(Load(str(write_tiny_model(tmp_path)), options, wait_warm=wait_warm))
    assert serve(inbox, events.append) == 0
    (ready,) = (place for place, event in enumerate(events) if isinstance(event, Loaded))
    found = [event for event in events if isinstance(event, Preparing)]
    loading = [event.progress for event in events[:ready] if isinstance(event, Loading)]
    if wait_warm:
        assert not found
        assert (loading[-1].done, loading[-1].total, loading[-1].label) == (5, 5, "preparing CUDA graphs")
    else:
        assert not [each for each in loading if each.label == "preparing CUDA graphs"]
        assert (found[0].done, found[-1].done, found[-1].total) == (1, 5, 5)
        assert all(event not in events[:ready] for event in found)
