"""Calls of tools in the text of an answer.

Models write them in one of these forms:

- Hermes, and so Qwen, SmolLM2 and what we tell to models without a form of their own:
  ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, with one call or a list of them
- Llama 3: the whole answer is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``
- Mistral: the whole answer is a list of ``{"name": …, "arguments": {…}}``, behind a control token, which has no text
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from minillm.server.parts import Arguments, Called, Part, Said
from minillm.text.safe import parse_strict_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
# What an answer that is a call as a whole begins with, without its spaces.
_BARE = tuple(f"{bracket}{{{key}" for bracket in ("", "[") for key in ('"name":', '"type":"function"'))
_BETWEEN = " \t\r\n;,"  # bare calls


@dataclass
class JsonScanner:
    """Finds where an object or a list of JSON ends, in text that comes in pieces."""

    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def feed(self, text: str) -> int | None:
        """The number of characters of this piece up to the end; None where it goes on."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


class CallReader:
    """Finds the calls in an answer that is free to have any. What is no valid call of a known tool is text.

    Args:
        names: of the tools that may be called.
        most: calls; those beyond are dropped.
    """

    def __init__(self, names: Collection[str], most: int) -> None:
        self._names, self._most = names, most
        self._stage = self._start
        self._held = ""  # text that is not read yet
        self._opening = ""  # the text before the JSON that is being read
        self._scanner, self._num_scanned = JsonScanner(), 0
        self._count = 0  # of calls
        self._space = ""  # that was said, unless a call follows
        self._has_said = self._after_call = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[Part]:
        parts = self._read(final=True)
        if self._space and not self._after_call:
            parts.append(Said(self._space))
        return parts

    def _read(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._stage(parts, final):
            pass
        return parts

    # Each stage returns whether another one may go on with what is held.

    def _start(self, parts: list[Part], final: bool) -> bool:
        """Nothing has been said yet: the answer may be a call as a whole."""
        text = self._held.lstrip().removeprefix(_PYTHON_TAG).lstrip()
        begun = re.sub(r"\s+", "", text[:100])
        if any(begun.startswith(each) for each in _BARE):
            self._begin_json(len(self._held) - len(text))
            return True
        tag = self._held.lstrip()
        waits = any(each.startswith(begun) for each in _BARE) or _PYTHON_TAG.startswith(tag)
        if waits and not final:
            return False
        self._stage = self._text
        return True

    def _text(self, parts: list[Part], final: bool) -> bool:
        before, opening, behind = self._held.partition(_OPEN)
        if not opening:
            kept = 0 if final else _overlap(self._held, _OPEN)
            self._say(parts, self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        json_text = behind.lstrip()
        if not json_text and not final:
            self._say(parts, before)
            self._held = opening + behind
            return False
        self._say(parts, before)
        self._held = opening + behind
        if json_text[:1] in ("{", "["):
            self._begin_json(len(self._held) - len(json_text))
        else:
            self._say(parts, opening)
            self._held = behind
        return True

    def _begin_json(self, start: int) -> None:
        self._opening, self._held = self._held[:start], self._held[start:]
        self._scanner, self._num_scanned = JsonScanner(), 0
        self._stage = self._json

    def _json(self, parts: list[Part], final: bool) -> bool:
        end = self._scanner.feed(self._held[self._num_scanned :])
        if end is None and not final:
            self._num_scanned = len(self._held)
            return False
        calls = [] if end is None else calls_in(self._held[: self._num_scanned + end], self._names)
        if end is None or not calls:
            self._say(parts, self._opening)
            self._stage = self._text
            return True
        self._held = self._held[self._num_scanned + end :]
        for name, arguments in calls[: self._most - self._count]:
            parts += [Called(self._count, call_id(), name), Arguments(self._count, arguments)]
            self._count += 1
        self._space, self._after_call = "", True
        self._stage = self._closing
        return True

    def _closing(self, parts: list[Part], final: bool) -> bool:
        if not self._opening.startswith(_OPEN):
            self._held = self._held.lstrip(_BETWEEN)
            if not self._held and not final:
                return False
            self._stage = self._start
            return True
        rest = self._held.lstrip()
        if _CLOSE.startswith(rest) and rest != _CLOSE and not final:
            return False
        self._held = rest.removeprefix(_CLOSE)
        self._stage = self._text
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            text = f"\n{text}" if self._has_said else text
            self._after_call = False
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._has_said = True
            parts.append(Said(said))


class ForcedReader:
    """Reads an answer that consists of calls, as a grammar of `minillm.server.tool_choice` has it: piece by piece."""

    _HEAD = re.compile(r'[^{]*\{"name": "([^"\\]+)", "(?:arguments|parameters)": ')

    def __init__(self) -> None:
        self._held = ""
        self._scanner: JsonScanner | None = None  # of the arguments that are being read
        self._count = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held:
            if self._scanner is None:
                head = self._HEAD.match(self._held)
                if head is None:
                    break
                parts.append(Called(self._count, call_id(), head[1]))
                self._held, self._scanner = self._held[head.end() :], JsonScanner()
                continue
            end = self._scanner.feed(self._held)
            piece = self._held[:end]
            parts.append(Arguments(self._count, piece))
            self._held = self._held[len(piece) :]
            if end is not None:
                self._scanner = None
                self._count += 1
        return parts

    def finish(self) -> list[Part]:
        return []


def calls_in(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The calls that a text of JSON says, each a name and its arguments as JSON; none unless all are valid."""
    try:
        value = parse_strict_json(text)
    except ValueError:
        return []
    found = [_call(each, names) for each in (value if isinstance(value, list) else [value])]
    calls = [each for each in found if each is not None]
    return calls if len(calls) == len(found) else []


def _call(value: Any, names: Collection[str]) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = parse_strict_json(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def call_id() -> str:
    """An id of nine letters and digits: Mistral's templates take no other."""
    return secrets.token_hex(5)[:9]


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``tag``."""
    return next((count for count in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:count])), 0)
