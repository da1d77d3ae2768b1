"""The fenced blocks of a Markdown page, and the commands in them. `test_pages` tells the convention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A fenced block: its name, its text, the line where it begins, and the characters where it begins and ends."""

    kind: str
    text: str
    line: int
    start: int
    end: int
    gap: str  # the text between the fence before it and this one

    def is_output_of(self, block: Fence) -> bool:
        """Return whether this block directly follows ``block`` and is plain text."""
        return self.kind == "text" and not self.gap.strip() and self.start >= block.end


def fences_of(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) % 2 == 0, f"{page}: a fence is not closed"
    found, end = [], 0
    for each in _FENCE.finditer(text):
        indent = len(each[1])
        inside = "".join(line[indent:] if line.strip() else line for line in each[3].splitlines(keepends=True))
        line = text.count("\n", 0, each.start()) + 1
        found.append(Fence(each[2], inside, line, each.start(), each.end(), text[end : each.start()]))
        end = each.end()
    return found


def steps_of(fence: Fence) -> list[tuple[str, str]]:
    """Return the commands of an ``sh`` or ``console`` fence, each with the output that the page shows."""
    steps: list[tuple[str, str]] = []
    going_on = False
    for line in fence.text.splitlines():
        begins = line.startswith("$ ") if fence.kind == "console" else not going_on
        if begins:
            steps.append((line.removeprefix("$ ") if fence.kind == "console" else line, ""))
        elif going_on:
            steps[-1] = (f"{steps[-1][0]}\n{line}", "")
        else:
            steps[-1] = (steps[-1][0], f"{steps[-1][1]}{line}\n")
        if begins or going_on:
            going_on = _goes_on(steps[-1][0])
    return [(command, output) for text, output in steps if (command := normalized(text))]


def _scan(command: str) -> tuple[int, str]:
    """Return the position of a command's comment, or its length, and the quotation mark that is open at its end."""
    quote = escaped = ""
    for position, character in enumerate(command):
        if escaped:
            escaped = ""
        elif character == "\\" and quote != "'":
            escaped = character
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (not position or command[position - 1].isspace()):
            return position, ""
    return len(command), quote


def _goes_on(command: str) -> bool:
    """Return whether a command ends in a backslash, or within quotation marks."""
    return command.endswith("\\") or bool(_scan(command)[1])


def normalized(command: str) -> str:
    """Return a command without its comment, on one line unless a quotation has several."""
    joined = re.sub(r"\s*\\\n\s*", " ", command).strip()
    return joined[: _scan(joined)[0]].strip()


def matches(expected: str, output: str) -> bool:
    """Return whether output is as a page shows it. ``…`` matches any text, also several lines."""

    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())

    pattern = ".*?".join(map(re.escape, lines(expected).split("…")))
    return re.fullmatch(pattern, lines(output), re.DOTALL) is not None
