"""Saved conversations: a directory with one JSON file for each."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.blockstore.files import blocks_dir, erase
from minillm.errors import MinillmError, UsageError
from minillm.system import data_dir
from minillm.text.reading import read_bytes
from minillm.text.safe import cause, clean_line, parse_json
from minillm.ui.chat.conversation import Conversation, shown_title
from minillm.ui.chat.saved import from_data, to_data

COPY_NOTE = "another chat changed this conversation; this one is saved as a copy from now on"


@dataclass(frozen=True)
class SessionSummary:
    """A saved conversation, as shown in a list."""

    path: Path
    title: str  # see `shown_title`
    num_turns: int  # number of turns in the branch that was shown last
    saved: float  # seconds since 1970
    interrupted: bool  # the app ended during an answer


@dataclass(frozen=True)
class SessionStore:
    """The directory of saved conversations. It is created when the first conversation is saved."""

    directory: Path
    saves: bool = True  # False: a private chat, which writes nothing
    keeps_blocks: bool = True  # whether blocks of saved conversations may be kept on disk

    def owner_of(self, conversation: Conversation) -> str:
        """Return the name under which the engine keeps a conversation's blocks on disk.

        Return "" if the engine keeps no blocks of this conversation on disk.
        """
        kept = self.saves and self.keeps_blocks and conversation.is_worth_saving
        return conversation.file_id if kept else ""

    def save(self, conversation: Conversation) -> bool:
        """Save a conversation. Its file is replaced atomically.

        Return whether another program has changed the file since this program last read or wrote it. In that case, the
        changed file is left as it is, and this conversation is saved in a new file from now on.

        Raises:
            MinillmError: the file cannot be written.
        """
        if not self.saves or not conversation.is_worth_saving:
            return False
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                found = _version(self.path_of(conversation))
                is_foreign = found is not None and found != conversation.file_version
                if is_foreign:
                    conversation.copy_id = uuid.uuid4().hex
                self._write(conversation)
        except OSError as error:
            raise MinillmError(f"the conversation cannot be saved in {self.directory}: {error.strerror}") from None
        return is_foreign

    def _write(self, conversation: Conversation) -> None:
        path = self.path_of(conversation)
        handle, name = tempfile.mkstemp(prefix=".saving-", dir=self.directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(json.dumps(to_data(conversation), ensure_ascii=False, indent=1))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        conversation.file_version = _version(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other chats from saving a conversation until the ``with`` block ends."""
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @classmethod
    def of_user(cls) -> SessionStore:
        return cls(data_dir() / "conversations")

    def keep_draft(self, text: str) -> None:
        """Save an unsent text for the next chat. Do nothing if the text is empty or the chat is private.

        Raises:
            MinillmError: the file cannot be written.
        """
        if not self.saves or not text.strip():
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        except OSError as error:
            raise MinillmError(f"the draft cannot be saved in {self.directory}: {error.strerror}") from None

    def take_draft(self) -> str:
        """Return the unsent text of the last chat and delete its file. Return an empty text if nothing was saved."""
        try:
            text = read_bytes(self._draft).decode("utf-8", "replace")
            self._draft.unlink()
        except OSError:
            return ""
        return text

    @property
    def _draft(self) -> Path:
        return self.directory / ".draft"

    def latest(self) -> Path:
        """Return the file of the conversation that was saved last.

        Raises:
            UsageError: no conversation is saved.
        """
        found = self.list()
        if not found:
            raise UsageError(f"no conversation is saved in {self.directory}")
        return found[0].path

    def path_of(self, conversation: Conversation) -> Path:
        return self.directory / f"{conversation.file_id}.json"

    def load(self, path: Path) -> Conversation:
        """Read a conversation from a file.

        Raises:
            MinillmError: the file cannot be read, or contains no conversation.
        """
        try:
            version = _version(path)  # before the text, so that a later change is noticed
            conversation = from_data(_read(path))
        except (OSError, ValueError) as error:
            raise MinillmError(f"{clean_line(path.name)} cannot be opened: {cause(error, 400)}") from None
        if path == self.path_of(conversation):
            conversation.file_version = version
        return conversation

    def delete(self, path: Path) -> str:
        """Delete a conversation's file, and its blocks on this machine's disk. Return the owner of the blocks.

        Raises:
            MinillmError: the file cannot be deleted.
        """
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise MinillmError(f"the conversation cannot be deleted: {error.strerror}") from None
        with suppress(OSError, UsageError):
            erase(blocks_dir(), path.stem)
        return path.stem

    def list(self, search: str = "") -> list[SessionSummary]:
        """Return the conversations that contain all words of ``search``, the latest first.

        The words may be in the title, in questions or in answers.
        """
        found, words = [], search.casefold().split()
        for path in self.directory.glob("*.json"):
            try:
                data = _read(path)
                turns, title = data["turns"], str(data.get("title", ""))
                texts = [title, *(turn["question"] + "\n" + _all_text(turn["answer"]) for turn in turns)]
                whole = "\n".join(texts).casefold()
                if all(word in whole for word in words):
                    unfinished = any(turn["answer"]["finish_reason"] is None for turn in turns)
                    saved = path.stat().st_mtime
                    title = shown_title(title, turns[0]["question"])
                    found.append(SessionSummary(path, title, _path_length(data), saved, unfinished))
            except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
                continue  # the file is not a valid conversation; `load` reports the reason
        return sorted(found, key=lambda summary: -summary.saved)


def _version(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change whenever a file is written, or None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _path_length(data: Mapping[str, Any]) -> int:
    """Return the number of turns in the branch that was shown last."""
    turns, at = data["turns"], data["leaf"]
    for length in range(len(turns) + 1):
        if at is None:
            return length
        at = turns[at]["parent"]
    raise ValueError("a turn is its own parent")


def _all_text(answer: Mapping[str, Any]) -> str:
    """Return the text of an answer and of its candidates."""
    return "\n".join([answer["text"], *(each["text"] for each in answer.get("candidates", []))])


def _read(path: Path) -> Any:
    return parse_json(read_bytes(path).decode("utf-8", "surrogatepass"))
