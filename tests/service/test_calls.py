"""Short calls are prepared at once. Long calls are prepared in threads, so that no other call waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.service import calls
from minillm.service.call_messages import Complete, Conversation
from minillm.service.messages import Abort

SHORT, LONG = "a word", "word " * 200
CHAT = Conversation([{"role": "user", "content": "a word"}])


@pytest.mark.parametrize(
    ("prompt", "params", "encodes_here", "at_once"),
    [
        ([1, 2, 3], {}, False, True),
        (None, {}, False, True),
        (SHORT, {}, True, True),
        (SHORT, {}, None, True),  # no tokenizer: it is refused
        (SHORT, {}, False, False),  # a process of its own encodes it, or hangs
        (SHORT, {"grammar": {"regex": "a"}}, True, False),
        (LONG, {}, True, False),
        (CHAT, {}, True, False),
    ],
)
def test_nothing_waits_behind_a_prompt_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, prompt: Any, params: dict[str, Any], encodes_here: bool | None, at_once: bool
) -> None:
    goes_on = threading.Event()
    prepared_by: list[threading.Thread] = []

    def prepare(driver: Any, call: Complete) -> Complete:
        prepared_by.append(threading.current_thread())
        assert at_once or goes_on.wait(60)
        return call

    monkeypatch.setattr(calls, "prepare", prepare)
    said: list[str] = []
    requests: Any = SimpleNamespace(
        preparing=set(), add=lambda call: said.append(f"add {call.request_id}"), abort=lambda name: said.append(name)
    )
    tokenizer = None if encodes_here is None else SimpleNamespace(encodes_here=encodes_here)
    engine: Any = SimpleNamespace(tokenizer=tokenizer)
    reader = calls.CallDispatcher(engine, requests, None, lambda event: None)  # type: ignore[arg-type]
    reader.take(Complete("x", "t", prompt, params))
    reader.take(Abort("y"))
    goes_on.set()
    for _ in range(2):
        job = reader.jobs.get(timeout=60)
        assert job is not None
        job()
    assert said == (["add x", "y"] if at_once else ["y", "add x"])
    assert requests.preparing == {"x"}
    assert (prepared_by == [threading.current_thread()]) == at_once
    for pool in (reader._pool, reader._grammars):
        pool.shutdown()
