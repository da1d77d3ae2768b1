"""Find tool calls in the text of an answer, which arrives in pieces.

Models write tool calls in one of these formats:

- Hermes, used by Qwen, SmolLM2 and models without a format of their own:
  ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, with one call, several, or a list of them
- Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``
- Llama 3.1: ``<function=name>{…}</function>``
- Llama 3: the whole answer is ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``
- Llama 3.2 and 4: the whole answer is ``[name(key="value")]``
- Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}]`` or ``[TOOL_CALLS]name[ARGS]{…}``. The markers are control
  tokens in most tokenizers, so they have no text.
- any of the JSON and Python formats in a code block at the beginning of an answer
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection

from minillm.server.parsers.call_formats import Calls, Scanner, Tools, json_calls, named_call, python_calls, xml_call
from minillm.server.parsers.parts import ArgumentsPart, CallPart, Part, PlainReader, Reader, TextPart
from minillm.text.stop import overlap

_TAG, _CLOSE, _FUNCTION, _MISTRAL, _FENCE = "<tool_call>", "</tool_call>", "<function=", "[TOOL_CALLS]", "```"
_PYTHON_TAG = "<|python_tag|>"
# Names of formats, to limit a reader to some of them. A format with a tag is named after the tag. Formats without a tag
# are "json", "python" and NAMED. NAMED is Mistral's format if its markers have no text: a tool's name, then arguments.
UNTAGGED = ("json", "python")
FORMATS = frozenset((_TAG, _FUNCTION, _MISTRAL, _FENCE, *UNTAGGED))
NAMED = "named"
# An answer without a tag is a call if it begins with one of these texts. White space is removed before comparing.
_BARE = tuple(f"{bracket}{{{key}" for bracket in ("", "[") for key in ('"name":', '"type":"function"'))
_BETWEEN = " \t\r\n;,"  # characters that may be between two calls
_FENCED = re.compile(r"```[\w-]{0,16}[ \t\r]*\n")
_FENCE_BEGUN = re.compile(r"`{1,3}|```[\w-]{0,16}[ \t\r]*")
_PYTHON = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_PYTHON_BEGUN = re.compile(r"\[\s*(?:([A-Za-z_][\w.]*)\s*)?")
_WORD = re.compile(r"[\w.-]*")
_TO_ARGUMENTS = re.compile(r"\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_TO_ARGUMENTS_BEGUN = re.compile(r"\s*(?:\[[\w\[\]\s]{0,80})?")
_FUNCTION_HEAD = re.compile(r"([^>\s<]{1,64})>\s*")
_FUNCTION_BEGUN = re.compile(r"[^>\s<]{0,64}")
_FUNCTION_CLOSE = "</function>"
_MOST_BLANKS = 1000  # maximum characters between two calls, or between the ends of a parameter and of its function
_BODIES = ("{", "<parameter=", _FUNCTION_CLOSE)  # text that may follow a function's tag


class CallReader:
    """Finds the calls in an answer that may contain calls. All other text is content.

    The *buffered text* has arrived, but was not read yet. The *opening* of a call is its beginning before the JSON,
    Python or XML to parse, such as ``<tool_call>``. If no valid call follows, the opening is content.

    Args:
        tools: maps the name of each tool that may be called to the schema of its parameters.
        most: maximum number of calls; later ones are dropped.
        formats: names of the formats to look for, from `FORMATS` and `NAMED`.
    """

    def __init__(self, tools: Tools, most: int, formats: Collection[str] = FORMATS) -> None:
        self._tools, self._most, self._formats = tools, most, formats
        self._tags = [each for each in (_TAG, _FUNCTION, _MISTRAL) if each in formats]
        self._stage = self._start
        self._buffer = ""  # the buffered text
        self._blanks: list[str] = []  # white space after the buffered text; it is content only if more text follows
        self._opening = ""  # the opening of the current call so far
        self._tag = ""  # the tag of the current call; empty: the call is at the beginning of the answer
        self._closers: list[str] = []  # texts that may follow the piece to parse
        self._name = ""  # the name of the tool, if the piece to parse contains only arguments
        self._parse: Callable[[str], Calls] = self._json_calls
        self._scanner, self._num_scanned = Scanner(), 0
        self._count = 0  # number of calls so far
        self._space: list[str] = []  # white space that is content, unless a call follows
        self._has_said = self._after_call = False

    def push(self, text: str) -> list[Part]:
        self._blanks.append(text)
        return [] if text.isspace() else self._read(final=False)  # a model may generate white space for very long

    def finish(self) -> list[Part]:
        parts = self._read(final=True)
        if self._space and not self._after_call:
            parts.append(TextPart("".join(self._space)))
        return parts

    def _read(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        self._buffer += "".join(self._blanks)
        self._blanks.clear()
        while self._stage(parts, final):
            pass
        return parts

    # Each stage reads a part of the buffered text. It returns whether the next stage can continue with the rest.

    def _start(self, parts: list[Part], final: bool) -> bool:
        """Begin to read an answer, or continue after a call. Return False if more text is needed.

        The next stage checks whether a call comes next.
        """
        rest = self._buffer.lstrip()
        self._say(parts, self._buffer[: len(self._buffer) - len(rest)])
        self._buffer, self._tag, self._opening, self._closers = rest, "", "", []
        if not final and (not rest or (_PYTHON_TAG.startswith(rest) and rest != _PYTHON_TAG)):
            return False
        if rest.startswith(_PYTHON_TAG):
            self._open(len(_PYTHON_TAG))
        self._stage = self._item
        return True

    def _text(self, parts: list[Part], final: bool) -> bool:
        found = min((each for each in map(self._find, self._tags) if each[0] >= 0), default=None)
        if found is None:
            kept = 0 if final else max((overlap(self._buffer, tag) for tag in self._tags), default=0)
            self._say(parts, self._buffer[: len(self._buffer) - kept])
            self._buffer = self._buffer[len(self._buffer) - kept :]
            return False
        start, tag = found
        self._say(parts, self._buffer[:start])
        self._buffer, self._opening, self._closers = self._buffer[start:], "", []
        self._open(len(tag))
        self._tag = tag
        self._stage = self._function if tag == _FUNCTION else self._item
        return True

    def _find(self, tag: str) -> tuple[int, str]:
        return self._buffer.find(tag), tag

    def _item(self, parts: list[Part], final: bool) -> bool:
        """Find the kind of call that begins here, and select the stage that reads such a call.

        If no call begins here, the text is content. Return False if more text is needed to decide.
        """
        self._open(len(self._buffer) - len(self._buffer.lstrip()))
        kind = self._kind()
        if kind is None and not final:
            return False
        if kind == _FENCE:
            self._open(_FENCED.match(self._buffer).end())  # type: ignore[union-attr]
            self._closers.append(_FENCE)
        elif kind == _FUNCTION:
            self._open(len(_FUNCTION))
            self._stage = self._function
        elif kind == NAMED:
            self._name = _WORD.match(self._buffer)[0]  # type: ignore[index]
            self._open(len(self._name))
            self._stage = self._named
        elif kind:
            self._begin(self._python_calls if kind == "python" else self._json_calls)
        else:
            self._give_up(parts)
        return True

    def _kind(self) -> str | None:
        """Return the kind of call that begins with the buffered text.

        The result "" means that no call begins here. None means that more text is needed to decide.
        """
        buffer, formats = self._buffer, self._formats
        if not buffer:
            return None
        if buffer[0] == "`" and _FENCE in formats and not self._closers:
            return _FENCE if _FENCED.match(buffer) else None if _FENCE_BEGUN.fullmatch(buffer) else ""
        if buffer[0] == "<" and self._tag == _TAG and _FUNCTION in formats:
            return _FUNCTION if buffer.startswith(_FUNCTION) else None if _FUNCTION.startswith(buffer) else ""
        if buffer[0] in "{[":
            return self._bracket_kind()
        if (self._tag == _MISTRAL or (not self._tag and NAMED in formats)) and (word := _WORD.match(buffer)[0]):  # type: ignore[index]
            if word == buffer:
                return None if any(name.startswith(word) for name in self._tools) else ""
            return NAMED if word in self._tools else ""
        return ""

    def _bracket_kind(self) -> str | None:
        """Return the result of `_kind` for a buffered text that begins with a bracket: "json", "python", "" or None."""
        buffer, is_tagged = self._buffer, bool(self._tag)
        fenced = bool(self._closers)
        unknown = False
        if is_tagged or fenced or "python" in self._formats:
            found = _PYTHON.match(buffer)
            if found and found[1] in self._tools:
                return "python"
            begun = _PYTHON_BEGUN.fullmatch(buffer)
            unknown = begun is not None and any(name.startswith(begun[1] or "") for name in self._tools)
        if is_tagged:
            return None if unknown else "json"
        if fenced or "json" in self._formats:
            begun_text = re.sub(r"\s+", "", buffer[:100])
            if any(begun_text.startswith(each) for each in _BARE):
                return "json"
            unknown = unknown or any(each.startswith(begun_text) for each in _BARE)
        return None if unknown else ""

    def _function(self, parts: list[Part], final: bool) -> bool:
        """Read a tool's name after ``<function=``, and check whether JSON or parameters follow the name.

        Return False if more text is needed to decide.
        """
        head = _FUNCTION_HEAD.match(self._buffer)
        body = "" if head is None else self._buffer[head.end() :]
        if head is None:
            waits = _FUNCTION_BEGUN.fullmatch(self._buffer) is not None
        else:
            waits = any(each.startswith(body) and each != body for each in _BODIES)
        if waits and not final:
            return False
        if head is None or head[1] not in self._tools or not body.startswith(_BODIES):
            self._give_up(parts)
            return True
        self._name = head[1]
        self._open(head.end())
        if body.startswith("{"):
            self._closers.insert(0, _FUNCTION_CLOSE)
            self._begin(self._arguments)
        else:
            self._begin(self._parameters)
            self._stage = self._xml
        return True

    def _named(self, parts: list[Part], final: bool) -> bool:
        """Check whether arguments follow a tool's name, in Mistral's format. Return False if more text is needed."""
        if found := _TO_ARGUMENTS.match(self._buffer):
            self._open(found.end())
            self._begin(self._arguments)
        elif _TO_ARGUMENTS_BEGUN.fullmatch(self._buffer) and not final:
            return False
        else:
            self._give_up(parts)
        return True

    def _begin(self, parse: Callable[[str], Calls]) -> None:
        self._parse, self._stage = parse, self._brackets
        self._scanner, self._num_scanned = Scanner("\"'" if parse == self._python_calls else '"'), 0

    def _brackets(self, parts: list[Part], final: bool) -> bool:
        end = self._scanner.feed(self._buffer[self._num_scanned :])
        end = None if end is None else self._num_scanned + end
        self._num_scanned = len(self._buffer)
        return self._piece(parts, end, final)

    def _xml(self, parts: list[Part], final: bool) -> bool:
        end = self._buffer.find(_FUNCTION_CLOSE, self._num_scanned)
        while end > 0 and not self._buffer[max(0, end - _MOST_BLANKS) : end].rstrip().endswith("</parameter>"):
            end = self._buffer.find(_FUNCTION_CLOSE, end + 1)  # the closing tag just found is part of a value
        self._num_scanned = max(0, len(self._buffer) - len(_FUNCTION_CLOSE))
        return self._piece(parts, end + len(_FUNCTION_CLOSE) if end >= 0 else None, final)

    def _piece(self, parts: list[Part], end: int | None, final: bool) -> bool:
        """Parse the buffered text up to ``end``, and add the calls in it to ``parts``.

        If ``end`` is None, the end has not arrived yet: return False, unless the answer is ``final``. If there is no
        valid call, the text becomes content.
        """
        if end is None and not final:
            return False
        calls = [] if end is None else self._parse(self._buffer[:end])
        if end is None or not calls:
            self._give_up(parts)
            return True
        self._buffer = self._buffer[end:]
        for name, arguments in calls[: self._most - self._count]:
            parts += [CallPart(self._count, call_id(), name), ArgumentsPart(self._count, arguments)]
            self._count += 1
        self._opening, self._space, self._after_call = "", [], True
        self._stage = self._closing
        return True

    def _json_calls(self, text: str) -> Calls:
        return json_calls(text, self._tools, bare=not self._tag)

    def _python_calls(self, text: str) -> Calls:
        return python_calls(text, self._tools)

    def _arguments(self, text: str) -> Calls:
        call = named_call(self._name, text, self._tools)
        return [] if call is None else [call]

    def _parameters(self, text: str) -> Calls:
        call = xml_call(self._name, text.removesuffix(_FUNCTION_CLOSE), self._tools)
        return [] if call is None else [call]

    def _closing(self, parts: list[Part], final: bool) -> bool:
        """Read the text that closes a call, such as ``</tool_call>``. Then select the stage that reads the next text.

        The next text may be another call in the same tag, a new call, or content. Return False if more text is needed.
        """
        while True:
            rest = self._buffer.lstrip(_BETWEEN)
            if len(self._buffer) - len(rest) > _MOST_BLANKS:
                self._buffer = rest
            if self._has_another(rest):
                self._open(len(self._buffer) - len(rest))
                self._stage = self._item
                return True
            closer = self._closers[0] if self._closers else _CLOSE if self._tag == _TAG else ""
            waits = (closer, _FUNCTION) if self._tag == _TAG else (closer,)
            if not final and (not rest or any(each.startswith(rest) and rest != each for each in waits)):
                return False
            if closer and rest.startswith(closer):
                self._buffer = rest.removeprefix(closer)
            if not self._closers:
                break
            del self._closers[0]
        if self._tag in (_TAG, _FUNCTION):
            self._stage = self._text
        else:
            self._buffer, self._stage = rest, self._start
        return True

    def _has_another(self, rest: str) -> bool:
        """Return whether another call follows in the same tag or code block."""
        if _FUNCTION_CLOSE in self._closers:
            return False
        return rest[:1] in ("{", "[") if self._closers else self._tag == _TAG and rest.startswith(("{", "[", _FUNCTION))

    def _open(self, count: int) -> None:
        """Move the first ``count`` characters of the buffered text to the end of the call's opening.

        The opening is the text of a call before its JSON, Python or XML, such as ``<tool_call>``.
        """
        self._opening, self._buffer = self._opening + self._buffer[:count], self._buffer[count:]

    def _give_up(self, parts: list[Part]) -> None:
        """Treat the call's opening as content, because no valid call follows. The next stage searches the buffer."""
        self._say(parts, self._opening)
        self._opening, self._stage = "", self._text

    def _say(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            text = f"\n{text}" if self._has_said else text
            self._after_call = False
        said = text.rstrip()
        if said:
            self._has_said = True
            parts.append(TextPart("".join([*self._space, said])))
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])


class ForcedReader:
    """Reads an answer that consists only of calls, because a grammar of `tool_choice.py` allows nothing else."""

    _HEAD = re.compile(r'[^{]*\{"name": "([^"\\]+)", "(?:arguments|parameters)": ')

    def __init__(self) -> None:
        self._buffer = ""
        self._scanner: Scanner | None = None  # finds the end of the current arguments; None between calls
        self._count = 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            if self._scanner is None:
                head = self._HEAD.match(self._buffer)
                if head is None:
                    break
                parts.append(CallPart(self._count, call_id(), head[1]))
                self._buffer, self._scanner = self._buffer[head.end() :], Scanner()
                continue
            end = self._scanner.feed(self._buffer)
            piece = self._buffer[:end]
            parts.append(ArgumentsPart(self._count, piece))
            self._buffer = self._buffer[len(piece) :]
            if end is not None:
                self._scanner = None
                self._count += 1
        return parts

    def finish(self) -> list[Part]:
        return []


class CallsOrTextReader:
    """Reads an answer that a grammar of `tool_choice.py` makes either calls alone, or text without calls.

    Args:
        heads: an answer that consists of calls begins with one of these texts.
    """

    def __init__(self, heads: tuple[str, ...]) -> None:
        self._heads, self._buffer = heads, ""
        self._reader: Reader | None = None  # None until the kind of answer is known

    def push(self, text: str) -> list[Part]:
        if self._reader is None:
            self._buffer += text
            if self._buffer.startswith(self._heads):
                self._reader = ForcedReader()
            elif any(head.startswith(self._buffer) for head in self._heads):
                return []
            else:
                self._reader = PlainReader()
            text = self._buffer
        return self._reader.push(text)

    def finish(self) -> list[Part]:
        return PlainReader().push(self._buffer) if self._reader is None else self._reader.finish()


def call_id() -> str:
    """Return a random id of nine letters and digits, the only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]
