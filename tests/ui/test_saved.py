"""Test files of conversations: every earlier version opens, broken files give an error, and two chats lose nothing."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lib.ui import ask, chat, notes, seen, until
from minillm.errors import MinillmError
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.saved import from_data, to_data
from minillm.ui.chat.sessions import SessionStore

SAVED = Path(__file__).with_name("saved")  # a file of each version that was ever written, by the code of that time


def asked(conversation: Conversation, question: str) -> Conversation:
    answer = conversation.ask(question)
    answer.text, answer.finish_reason = f"answer to {question}", "stop"
    return conversation


def questions(store: SessionStore) -> list[list[str]]:
    return sorted([turn.question for turn in store.load(each.path).turns] for each in store.list())


@pytest.mark.parametrize("name", ["1-first", "2-candidates", "3-title", "4-summary", "5-drafts", "6-notes"])
def test_files_of_every_earlier_version_open(name: str) -> None:
    path = SAVED / f"{name}.json"
    conversation = SessionStore(SAVED).load(path)
    version = int(name[0])
    turns = list(conversation.all_turns())
    first, second, *_ = turns
    assert (first.question, first.answer.text, first.answer.finish_reason) == (
        "What is paging?", "Pages of memory.", "stop"
    )  # fmt: skip
    assert (first.answer.num_prompt_tokens, first.answer.time_to_first_token) == (12, 0.25)
    assert second.answer.num_guessed_tokens == (3 if version >= 5 else 0)
    assert (turns[-1].answer.text, turns[-1].answer.finish_reason) == ("half an ans", "lost")
    assert conversation.title == ("Memory" if version >= 3 else "")
    assert second.summary == ("We spoke of paging." if version >= 4 else "")
    assert (conversation.notes, first.notes) == (
        (["tour · before"], ["tour · a", "tour · b"]) if version >= 6 else ([], [])
    )
    candidates = [(each.text, each.finish_reason) for turn in turns for each in turn.answer.candidates]
    assert candidates == ([("one", "stop"), ("two", "lost")] if version >= 2 else [])
    assert to_data(from_data(to_data(conversation))) == to_data(conversation)
    assert name in [each.path.stem for each in SessionStore(SAVED).list()]


def changed(path: str, value: Any) -> Any:
    """A saved conversation with another value in the place ``turns.0.answer.text``."""
    data: Any = json.loads((SAVED / "6-notes.json").read_text())
    *above, last = path.split(".")
    place = data
    for key in above:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "../../x"), ("id", "a/b"), ("id", ".."), ("id", "x\0"), ("id", ""), ("id", 5), ("id", ["x"]),
        ("id", KeyError), ("system", None), ("system", ["be"]), ("model", {}), ("title", 7), ("began", "soon"),
        ("began", float("nan")), ("began", True), ("began", 1e308), ("leaf", -1), ("leaf", 99), ("leaf", "0"),
        ("leaf", True), ("turns", {}), ("turns", "xy"), ("turns", [5]), ("turns.1.parent", -1),
        ("turns.1.parent", 1), ("turns.1.parent", 0.5), ("turns.0.question", ["q"]), ("turns.0.answer", []),
        ("turns.0.answer.text", None), ("turns.0.answer.text", KeyError), ("turns.0.summary", 1),
        ("turns.0.answer.request_id", "a b"), ("turns.0.answer.request_id", KeyError),
        ("turns.0.answer.request_id", None), ("turns.0.answer.finish_reason", "boom"),
        ("turns.0.answer.finish_reason", []), ("turns.0.answer.num_prompt_tokens", "12"),
        ("turns.0.answer.num_output_tokens", [1]), ("turns.0.answer.num_cached_tokens", -1),
        ("turns.0.answer.num_guessed_tokens", 10**400), ("turns.0.answer.tokens_per_second", float("inf")),
        ("turns.0.answer.time_to_first_token", "now"), ("turns.0.answer.in_reasoning", "no"),
        ("turns.0.answer.candidates", 3), ("turns.2.answer.candidates.0.score", "x"),
        ("turns.2.answer.candidates.0.num_tokens", None), ("shortened", []), ("shortened", {"a": "b"}),
        ("shortened", {"/": 1}), ("shortened", {"a": 1.5}), ("shortened", {"a": True}), ("shortened", {"a": 10**400}),
        ("notes", "text"), ("notes", [1]), ("turns.0.notes", None), ("turns.1.notes", [["x"]]),
    ],
)  # fmt: skip
def test_every_field_is_checked(path: str, value: Any, tmp_path: Path) -> None:
    data = changed(path, value)
    with pytest.raises(ValueError, match="not a conversation"):
        from_data(data)
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(MinillmError, match=r"^a\.json cannot be opened: not a conversation: [^\0]*$"):
        SessionStore(tmp_path).load(tmp_path / "a.json")


def test_a_file_with_fields_of_a_later_version_opens() -> None:
    """Versions without notes, for example, open a file with notes."""
    known = changed("title", "Memory")
    later = changed("later", [1])
    later["turns"][0] |= {"later": {"a": 1}}
    assert to_data(from_data(later)) == to_data(from_data(known))


def test_what_two_chats_say_in_one_conversation_is_all_kept(tmp_path: Path) -> None:
    SessionStore(tmp_path).save(asked(Conversation(), "first"))
    a, b = SessionStore(tmp_path), SessionStore(tmp_path)
    in_a, in_b = a.load(a.latest()), b.load(b.latest())
    assert not a.save(asked(in_a, "in A"))
    assert b.save(asked(in_b, "in B")), "another chat has written since"
    assert not b.save(asked(in_b, "in B again"))
    assert not a.save(asked(in_a, "in A again"))
    assert questions(a) == [["first", "in A", "in A again"], ["first", "in B", "in B again"]]
    a.delete(a.path_of(in_a))
    assert not a.save(in_a), "nothing is there to be lost"
    assert len([*tmp_path.iterdir()]) == 2


def test_a_file_that_changes_within_a_clock_tick_is_noticed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    conversation = asked(Conversation(), "q")
    store.save(conversation)
    path = store.path_of(conversation)
    stamp = path.stat().st_mtime_ns
    SessionStore(tmp_path).save(store.load(path))  # the same text, in a new file
    os.utime(path, ns=(stamp, stamp))
    assert store.save(conversation)


@pytest.mark.anyio
async def test_a_chat_says_that_another_one_has_changed_its_conversation(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    async with chat(store=store) as pilot:
        await ask(pilot, "echo one")
        SessionStore(tmp_path).save(asked(store.load(store.latest()), "elsewhere"))
        await ask(pilot, "echo two")
        await until(pilot, lambda: any("saved as a copy" in note for note in notes(pilot)))
        assert "another chat" in seen(pilot)
        await ask(pilot, "echo three")
        assert sum("saved as a copy" in note for note in notes(pilot)) == 1
    assert questions(store) == [["echo one", "echo two", "echo three"], ["echo one", "elsewhere"]]


def test_the_list_counts_the_turns_that_are_shown(tmp_path: Path) -> None:
    store, conversation = SessionStore(tmp_path), asked(asked(Conversation(), "one"), "two")
    assert conversation.leaf is not None
    conversation.ask("two again", instead_of=conversation.leaf)
    store.save(conversation)
    assert [each.num_turns for each in store.list()] == [2]


def test_a_trial_is_saved_once_the_user_goes_on(tmp_path: Path) -> None:
    store, trial = SessionStore(tmp_path), asked(Conversation(is_trial=True), "one")
    before = copy.deepcopy(trial)
    store.save(trial)
    assert store.list() == []
    for go_on in (lambda: asked(trial, "two"), lambda: before.ask("another", instead_of=before.leaf)):
        go_on()
    store.save(trial)
    store.save(before)
    assert len(store.list()) == 2


@pytest.mark.anyio
async def test_the_context_after_a_summary_is_known_after_a_restart(tmp_path: Path) -> None:
    conversation = asked(Conversation(), "q")
    assert conversation.leaf is not None
    answer = conversation.leaf.answer
    answer.num_prompt_tokens, answer.num_output_tokens, answer.time_to_first_token = 400, 44, 0.1
    conversation.shortened = {answer.request_id: 408}
    store = SessionStore(tmp_path)
    store.save(conversation)
    assert store.load(store.latest()).num_known_tokens == 36
