"""Conversations on an engine with a disk cache: they go on in another process, and leave no block once deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minillm.blockstore.files import listed
from minillm.config import EngineConfig
from minillm.engine.driver import Driver
from minillm.loading.disk import with_chat_cache
from minillm.loading.engine import load_engine
from minillm.runner.block_reads import BlockReader
from minillm.service.conversations import Conversations
from minillm.service.messages import (
    CacheChanged,
    Command,
    Erase,
    Event,
    Forget,
    Generate,
    Pin,
    ReadAhead,
    Started,
    TextDelta,
    decode_event,
    encode,
)
from minillm.ui.memory.pool import Pool

PARAMS = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
QUESTION = {"role": "user", "content": "hello " * 30}

Process = Callable[..., list[Event]]


@pytest.fixture
def process(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    """Run commands in a new engine process, and return its events."""
    monkeypatch.setenv("MINILLM_DISK_CACHE", str(tmp_path))
    monkeypatch.setattr(BlockReader, "measure", lambda self, step: None)  # read whatever is on disk

    def run(*commands: Command, salt: str | None = None) -> list[Event]:
        engine = load_engine(str(tiny_model), EngineConfig(device="cpu", num_blocks=64, disk_cache=1 << 30))
        events: list[Event] = []
        conversations = Conversations(
            Driver(engine), lambda event: events.append(decode_event(encode(event))), salt=salt
        )
        for command in commands:
            conversations.handle(command)
            while engine.has_work:
                conversations.take(engine.step(), engine.take_finished())
        conversations.reporter.show_cache(now=True)
        conversations.close()
        engine.close()
        return events

    return run


def question(owner: str, *more: dict[str, str]) -> Generate:
    return Generate("a", "c", [QUESTION, *more], PARAMS, owner=owner)


def started(events: list[Event]) -> Started:
    [event] = [event for event in events if isinstance(event, Started)]
    return event


def test_a_conversation_goes_on_in_another_process(process: Process) -> None:
    events = process(question("mine"))
    assert started(events).num_disk_tokens == 0
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    turn = question("mine", {"role": "assistant", "content": text}, {"role": "user", "content": "more"})
    again = started(process(turn))
    assert again.num_disk_tokens == again.num_cached_tokens >= 64
    assert again.disk_seconds > 0
    pool = Pool(64, 16, 1024)
    for event in process(turn):
        if isinstance(event, CacheChanged):
            pool.apply(event)
    assert len(pool.from_disk) == pool.counts.num_disk_read >= 15
    assert pool.counts.disk_limit == 1 << 30
    assert "load" in {entry.kind for entry in pool.log}


def test_a_conversation_is_read_before_its_next_question(process: Process) -> None:
    """The question then reads at most the partly filled last block, and reports all that came from disk."""
    text = "".join(event.text for event in process(question("mine")) if isinstance(event, TextDelta))
    answered, more = {"role": "assistant", "content": text}, {"role": "user", "content": "more"}
    for owner in ("mine", ""):
        ahead = ReadAhead("c", [QUESTION, answered], owner=owner)
        counts = [event.counts for event in process(ahead) if isinstance(event, CacheChanged)]
        assert (counts[-1].num_disk_read >= 4) == bool(owner)
        found = started(process(ahead, question(owner, answered, more)))
        assert found.num_disk_tokens == found.num_cached_tokens
        assert (found.num_disk_tokens >= 64) == bool(owner)


def test_erasing_a_conversation_leaves_the_blocks_of_others(process: Process, tmp_path: Path) -> None:
    process(question("mine"), Forget("c"), question("yours"), Erase("mine"))
    assert started(process(question("yours"))).num_disk_tokens >= 64
    process(Erase("yours"))
    assert list(listed(tmp_path)) == []


def test_a_private_conversation_and_a_pinned_prompt_leave_no_block(process: Process, tmp_path: Path) -> None:
    process(Pin("You are " + "very " * 40 + "brief."), question(""))
    assert list(listed(tmp_path)) == []
    process(question("mine"))
    assert started(process(question(""))).num_disk_tokens == 0, "it does not read any either"


def test_a_tenant_cannot_erase_the_blocks_of_another(process: Process, tmp_path: Path) -> None:
    process(question("mine"), salt="one")
    process(Erase("mine"), salt="other")
    assert started(process(question("mine"), salt="one")).num_disk_tokens >= 64
    assert started(process(question("mine"), salt="other")).num_disk_tokens == 0
    process(Erase("mine"), salt="one")
    process(Erase("mine"), salt="other")
    assert list(listed(tmp_path)) == []


def test_a_chat_that_may_not_read_the_cache_directory_has_no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", exists)
    assert with_chat_cache({"device": "cpu"}) == {"device": "cpu", "disk_cache": 0}
