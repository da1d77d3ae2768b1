"""The limits of stored responses."""

from __future__ import annotations

import pytest

from minillm.server.responses import store as response_store
from minillm.server.responses.store import ResponseStore, Stored


def entry(num_tokens: int = 0) -> Stored:
    return Stored.of({"output": []}, [], b"", range(num_tokens))


def test_each_tenant_has_its_own_number_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MOST_RESPONSES", 2)
    store = ResponseStore()
    store.put("ben", "x", entry())
    for name in "abc":
        store.put("anna", name, entry())
        assert store.get("anna", "a") is not None, "it is in use"
    assert [store.get("anna", name) is not None for name in "abc"] == [True, False, True]
    assert store.get("ben", "x") is not None
    assert store.get("ben", "a") is None
    assert not store.delete("ben", "a")


def test_bytes_are_bounded_for_each_tenant_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MOST_BYTES", 1_000)
    monkeypatch.setattr(response_store, "MOST_TOTAL_BYTES", 1_600)
    store = ResponseStore()
    for name in "abc":
        store.put("anna", name, entry(100))
    assert [store.get("anna", name) is not None for name in "abc"] == [False, True, True]
    store.put("ben", "x", entry(100))
    store.put("carl", "x", entry(100))
    assert [store.get("anna", name) is not None for name in "bc"] == [False, True], "the largest tenant gives way"
    store.put("anna", "large", entry(1_000))
    assert all(store.get("anna", name) is None for name in ("c", "large"))
    assert store.get("ben", "x") is not None
    assert store.delete("ben", "x")
    assert store.delete("carl", "x")
    assert not store._own
    assert not store._sizes


def test_responses_expire_after_their_last_use() -> None:
    now = 0.0
    store = ResponseStore(lambda: now)
    store.put("anna", "a", entry())
    store.put("anna", "b", entry())
    now = response_store.MOST_SECONDS - 1
    assert store.get("anna", "a") is not None
    now += 2
    assert [store.get("anna", name) is not None for name in "ab"] == [True, False]
