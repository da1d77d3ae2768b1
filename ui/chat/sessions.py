"""Saved conversations: a directory of files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError, UsageError
from minillm.system import data_dir
from minillm.text.reading import read_bytes
from minillm.text.safe import parse_json
from minillm.ui.chat.conversation import Conversation, shown_title


@dataclass(frozen=True)
class SessionSummary:
    """A conversation in a list."""

    path: Path
    title: str  # see `shown_title`
    num_turns: int
    saved: float  # seconds since 1970
    interrupted: bool  # the app ended while an answer was being given


@dataclass(frozen=True)
class SessionStore:
    """The directory of saved conversations. It is made when the first one is saved."""

    directory: Path

    def save(self, conversation: Conversation) -> None:
        """Write a conversation. The file is whole at any moment: the old one, or the new one.

        Raises:
            MinillmError: the disk or the directory does not allow it.
        """
        if not conversation.first:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(prefix=".saving-", dir=self.directory)
            try:
                with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(json.dumps(conversation.to_data(), ensure_ascii=False, indent=1))
                os.replace(name, self.path_of(conversation))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise MinillmError(f"the conversation cannot be saved: {error}") from None

    @classmethod
    def of_user(cls) -> SessionStore:
        return cls(data_dir() / "conversations")

    def latest(self) -> Path:
        """The file that was saved last.

        Raises:
            UsageError: there is none.
        """
        found = self.list()
        if not found:
            raise UsageError(f"no conversation is saved in {self.directory}")
        return found[0].path

    def path_of(self, conversation: Conversation) -> Path:
        return self.directory / f"{conversation.conversation_id}.json"

    def load(self, path: Path) -> Conversation:
        """Read a conversation.

        Raises:
            MinillmError: the file cannot be read, or holds no conversation.
        """
        try:
            return Conversation.from_data(_read(path))
        except (OSError, ValueError) as error:
            raise MinillmError(f"{path.name} cannot be opened: {error}") from None

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def list(self, search: str = "") -> list[SessionSummary]:
        """The conversations that hold ``search`` in title, question or answer, the latest first."""
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
                    found.append(SessionSummary(path, title, len(turns), saved, unfinished))
            except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
                continue  # not ours, or broken: opening it says why
        return sorted(found, key=lambda summary: -summary.saved)


def _all_text(answer: Mapping[str, Any]) -> str:
    """An answer's text, or that of its candidates."""
    return "\n".join([answer["text"], *(each["text"] for each in answer.get("candidates", []))])


def _read(path: Path) -> Any:
    return parse_json(read_bytes(path).decode("utf-8", "surrogatepass"))
