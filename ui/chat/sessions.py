"""Conversations on disk: a JSON file each in the user's data directory, replaced as a whole at every save."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import MinillmError, UsageError
from minillm.system import data_dir
from minillm.text.safe import clean_line, parse_json
from minillm.ui.chat.conversation import Conversation


@dataclass(frozen=True)
class SessionSummary:
    """A conversation in a list."""

    path: Path
    title: str  # the first question; not cleaned for a terminal
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
            data = json.dumps(conversation.to_data(), ensure_ascii=False, indent=1)
            handle, name = tempfile.mkstemp(prefix=".saving-", dir=self.directory)
            try:
                with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(data)
                os.replace(name, self.path_of(conversation))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise MinillmError(f"the conversation cannot be saved: {error}") from None

    @classmethod
    def of_user(cls) -> SessionStore:
        """That of the user: ``conversations`` in the data directory."""
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
            return Conversation.from_data(parse_json(path.read_text(encoding="utf-8", errors="surrogatepass")))
        except (OSError, ValueError) as error:
            raise MinillmError(f"{path.name} cannot be opened: {error}") from None

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def list(self, search: str = "") -> list[SessionSummary]:
        """The conversations that hold ``search`` in a question or an answer, the latest first."""
        found = []
        words = search.casefold().split()
        for path in self.directory.glob("*.json"):
            try:
                data = parse_json(path.read_text(encoding="utf-8", errors="surrogatepass"))
                texts = [turn["question"] + "\n" + turn["answer"]["text"] for turn in data["turns"]]
                whole = "\n".join(texts).casefold()
                if all(word in whole for word in words):
                    unfinished = any(turn["answer"]["finish_reason"] is None for turn in data["turns"])
                    title = data["turns"][0]["question"]
                    found.append(SessionSummary(path, title, len(texts), path.stat().st_mtime, unfinished))
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                continue  # not ours, or broken: opening it says why
        return sorted(found, key=lambda summary: -summary.saved)


def to_markdown(conversation: Conversation) -> str:
    """The shown path as Markdown, for people."""
    lines = [
        f"# {clean_line(conversation.turns[0].question, 80) if conversation.turns else 'An empty conversation'}",
        "",
    ]
    if conversation.system:
        lines += [f"> {line}" for line in conversation.system.splitlines()] + [""]
    for turn in conversation.turns:
        lines += ["## You", "", turn.question, "", f"## {conversation.model or 'The model'}", "", turn.answer.text, ""]
    return "\n".join(lines)


def to_json(conversation: Conversation) -> str:
    """The whole tree as JSON, all branches included."""
    return json.dumps(conversation.to_data(), ensure_ascii=False, indent=2) + "\n"


def export(conversation: Conversation, target: Path) -> Path:
    """Write a conversation to a file: ``.json`` as JSON, anything else as Markdown. An existing file is not touched.

    Raises:
        MinillmError: the file exists, or cannot be written.
    """
    text = to_json(conversation) if target.suffix == ".json" else to_markdown(conversation)
    target = target.expanduser()
    try:
        with target.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise MinillmError(f"{target} exists; choose another name") from None
    except OSError as error:
        raise MinillmError(f"{target} cannot be written: {error}") from None
    return target
