"""Test saved conversations: complete at any moment, searchable, exportable."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
from rich.style import Style
from textual import events
from textual.widgets import OptionList

from lib.block_files import chain, store_in, write
from lib.ui import ask, chat, is_told, say, screen, seen, until
from minillm.blockstore.files import blocks_dir
from minillm.errors import MinillmError
from minillm.service.messages import Command, Erase
from minillm.ui.chat.conversation import LONGEST_TITLE, Conversation
from minillm.ui.chat.export import export, to_json, to_markdown
from minillm.ui.chat.saved import from_data
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.dialogs import SessionsScreen
from minillm.ui.textual_internals import Options


def one_turn(question: str, text: str, reason: str | None = "stop") -> Conversation:
    conversation = Conversation(model="m")
    answer = conversation.ask(question)
    answer.text, answer.finish_reason = text, reason
    return conversation


def test_saved_listed_searched_and_deleted(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "conversations")
    store.save(Conversation())
    assert not store.directory.exists(), "nothing was said: there is nothing to save"
    one, two = one_turn("What is paging?", "Pages of memory."), one_turn("Hello", "Hi", reason=None)
    store.save(one)
    store.save(two)
    os.utime(store.path_of(one), (1, 1))
    assert [summary.title for summary in store.list()] == ["Hello", "What is paging?"]
    assert [summary.interrupted for summary in store.list()] == [True, False]
    assert [summary.title for summary in store.list("PAGES what")] == ["What is paging?"]
    assert store.list("nowhere") == []
    assert store.latest() == store.path_of(two)
    assert store.load(store.path_of(one)).turns[0].answer.text == "Pages of memory."
    store.delete(store.path_of(one))
    assert len(store.list()) == 1
    assert [path.name for path in store.directory.iterdir()] == [store.path_of(two).name], "no file is left behind"
    assert (store.directory.stat().st_mode & 0o077) == 0


def test_a_private_chat_saves_nothing(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "conversations", saves=False)
    conversation = one_turn("What is paging?", "Pages of memory.")
    assert not store.save(conversation)
    store.keep_draft("unsent")
    assert not store.directory.exists()
    assert store.owner_of(conversation) == ""


def test_only_a_conversation_that_is_saved_owns_blocks_on_disk(tmp_path: Path) -> None:
    store, conversation = SessionStore(tmp_path), one_turn("What is paging?", "Pages of memory.")
    assert store.owner_of(Conversation()) == ""
    assert store.owner_of(conversation) == conversation.file_id
    conversation.is_trial = True
    assert store.owner_of(conversation) == ""
    assert SessionStore(tmp_path, keeps_blocks=False).owner_of(one_turn("a", "b")) == ""


@pytest.mark.anyio
async def test_delete_removes_the_conversation_and_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Command] = []
    store, [key] = SessionStore(tmp_path), chain([5])
    async with chat(store=store) as pilot:
        await ask(pilot, "echo hello")
        pane = screen(pilot).chat_pane
        conversation, blocks = pane.conversation, store_in(blocks_dir())
        blocks.add_names(conversation.file_id, [key.name])
        write(blocks, key)
        await say(pilot, "/delete now")
        await until(pilot, lambda: is_told(pilot, "/delete yes"))
        assert blocks.has(key)
        monkeypatch.setattr(pane, "send", sent.append)
        await say(pilot, "/delete yes")
        await until(pilot, lambda: Erase(conversation.file_id) in sent)
        assert pane.conversation is not conversation
        assert not blocks.has(key)
        assert list(tmp_path.glob("*.json")) == []


@pytest.mark.anyio
async def test_the_open_conversation_stays_deleted(tmp_path: Path) -> None:
    async with chat(store=SessionStore(tmp_path)) as pilot:
        await ask(pilot, "echo hello")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        await pilot.press("delete", "delete")
        await until(pilot, lambda: screen(pilot).chat_pane.conversation.leaf is None)
        await pilot.press("escape")
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.anyio
async def test_a_conversation_that_cannot_be_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    told = "the conversation cannot be deleted: Permission denied"
    async with chat(store=SessionStore(tmp_path)) as pilot:
        await ask(pilot, "echo hello")
        monkeypatch.setattr(Path, "unlink", refuse)
        await say(pilot, "/delete yes")
        await until(pilot, lambda: is_told(pilot, told))
        assert len(screen(pilot).chat_pane.conversation.turns) == 1
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
        await pilot.press("delete", "delete")
        await until(pilot, lambda: told in seen(pilot))


def test_titles_are_kept_listed_and_searched(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    named, long = one_turn("What is paging?", "Pages."), one_turn("word " * 40 + "\x1b[31m", "x")
    named.title = "  Memory\x1b[31m,\nvirtual "
    for each in (long, named):
        store.save(each)
        os.utime(store.path_of(each), (each is named, each is named))
    titles = [summary.title for summary in store.list()]
    assert titles[0] == "Memory␛[31m, virtual"
    assert titles[1].startswith("word word")
    assert titles[1].endswith("word …")
    assert len(titles[1]) <= LONGEST_TITLE + 2
    assert one_turn("What is in @a.txt\n\n```a.txt\nits text\n```", "x").shown_title == "What is in @a.txt"
    assert len(store.list("virtual pages")) == 1
    assert store.load(store.path_of(named)).title == named.title
    old = json.loads(store.path_of(named).read_text())
    del old["title"]
    store.path_of(named).write_text(json.dumps(old))
    assert store.load(store.path_of(named)).shown_title == "What is paging?", "a file of before titles"
    assert to_markdown(named).startswith("# Memory␛[31m, virtual\n")


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore(tmp_path)
    conversation = one_turn("q", "old")
    store.save(conversation)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    conversation.turns[0].answer.text = "new"
    with pytest.raises(MinillmError, match="No space left"):
        store.save(conversation)
    assert store.load(store.path_of(conversation)).turns[0].answer.text == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_broken_files_are_skipped_and_named_when_opened(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"turns": []}')
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    (tmp_path / "d.json").write_text("[" * 100_000)
    assert store.list() == []
    for name in "abcd":
        with pytest.raises(MinillmError, match=rf"{name}\.json cannot be opened"):
            store.load(tmp_path / f"{name}.json")
    with pytest.raises(MinillmError, match="no conversation is saved"):
        store.latest()


class _FullDisk(io.StringIO):
    def __init__(self, path: Path) -> None:
        super().__init__()
        path.touch()

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = one_turn("What is `x`?", "It is\n\n```\ncode\n```")
    conversation.system = "be brief\nand kind"
    markdown = to_markdown(conversation)
    for part in (
        "# What is `x`?",
        "> be brief\n> and kind",
        "## You\n\nWhat is `x`?",
        "## m\n\nIt is\n\n```\ncode\n```",
    ):
        assert part in markdown
    assert from_data(json.loads(to_json(conversation))).turns[0].question == "What is `x`?"
    assert export(conversation, tmp_path / "a.md").read_text() == markdown
    for name in ("a.json", "b.JSON"):
        assert export(conversation, tmp_path / name).read_text() == to_json(conversation)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, **options: _FullDisk(path))
        with pytest.raises(MinillmError, match=r"full\.md cannot be written: No space left on device"):
            export(conversation, tmp_path / "full.md")
    assert not (tmp_path / "full.md").exists()
    with pytest.raises(MinillmError, match="exists"):
        export(conversation, tmp_path / "a.md")
    with pytest.raises(MinillmError, match=r"a\.md cannot be written: No such file or directory"):
        export(conversation, tmp_path / "no" / "a.md")


@pytest.mark.anyio
async def test_a_click_on_a_conversation_that_is_listed_no_more_is_none(tmp_path: Path) -> None:
    async with chat(store=SessionStore(tmp_path)) as pilot:
        for words in ("echo one", "echo two", "echo three"):
            await pilot.press("ctrl+n")
            await ask(pilot, words)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: pilot.app.screen.query(Options))
        options = pilot.app.screen.query_one(Options)
        await until(pilot, lambda: options.option_count == 3)
        gone = events.Click(options, 1, 1, 0, 0, 1, False, False, False, style=Style(meta={"option": 2}))
        last = options.get_option_at_index(2)
        await pilot.press(*"two")
        await until(pilot, lambda: options.option_count == 1)
        options.post_message(gone)
        options.post_message(OptionList.OptionSelected(options, last, 2))
        await pilot.pause()
        await pilot.pause()
        assert len(pilot.app.screen_stack) == 2, "neither an error nor another conversation"
        await pilot.press("enter")
        await until(pilot, lambda: "echo two" in seen(pilot))
