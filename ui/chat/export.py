"""Export a conversation to a file, for people and for other programs."""

import json
from contextlib import suppress
from pathlib import Path

from minillm.errors import MinillmError, UsageError
from minillm.system import expanded
from minillm.text.safe import cause
from minillm.ui.chat.conversation import Conversation
from minillm.ui.chat.saved import to_data


def to_markdown(conversation: Conversation) -> str:
    """Return the visible path of a conversation as Markdown."""
    turns = conversation.turns
    lines = [f"# {conversation.shown_title or 'An empty conversation'}", ""]
    if conversation.system:
        lines += [f"> {line}" for line in conversation.system.splitlines()] + [""]
    for turn in turns:
        name, several = conversation.model or "The model", turn.answer.candidates
        lines += ["## You", "", turn.question, ""]
        for number, text in enumerate([each.text for each in several] or [turn.answer.text], start=1):
            lines += [f"## {name}" + (f", candidate {number} of {len(several)}" if several else ""), "", text, ""]
    return "\n".join(lines)


def to_json(conversation: Conversation) -> str:
    """Return the whole conversation as JSON, as it is saved."""
    return json.dumps(to_data(conversation), ensure_ascii=False, indent=2) + "\n"


def export(conversation: Conversation, target: Path) -> Path:
    """Write a conversation to the new file ``target``, as JSON or as Markdown by its extension. Return its path.

    Raises:
        MinillmError: the file exists, cannot be written, or has the extension of another format.
    """
    ending = target.suffix.lower()
    if ending not in ("", ".json", ".md", ".markdown", ".txt"):
        raise UsageError(f"/export writes .md, .txt or .json, not {target.suffix}")
    text = to_json(conversation) if ending == ".json" else to_markdown(conversation)
    target = expanded(str(target), "/export")
    try:
        file = target.open("x", encoding="utf-8", errors="replace")
    except FileExistsError:
        raise MinillmError(f"{target} exists; choose another name") from None
    except (OSError, ValueError) as error:
        raise MinillmError(f"{target} cannot be written: {cause(error)}") from None
    try:
        with file:
            file.write(text)
    except OSError as error:
        with suppress(OSError):
            target.unlink()  # the file would be incomplete
        raise MinillmError(f"{target} cannot be written: {error.strerror}") from None
    return target
