"""The only filter between untrusted text and a terminal.

Model output, prompts, file names, chat templates and server messages are untrusted. Their control characters (ESC, the
8-bit C1 codes, carriage returns) could control the terminal, and bidirectional controls change the displayed order. All
untrusted text passes through `clean` before it reaches a widget, a title, a log line or stdout. `clean` replaces each
dangerous character with a visible substitute. It looks at one character at a time, so a text may be split anywhere.

Markup is not escaped here: widgets that parse markup must not receive untrusted text.
"""

import math
import re
from functools import cache
from typing import Any

_INVISIBLE = (
    0x00AD,  # soft hyphen
    0x061C,  # Arabic letter mark
    0x180E,  # Mongolian vowel separator
    0x200B,  # zero-width space
    0x200E,  # left-to-right mark
    0x200F,  # right-to-left mark
    *range(0x202A, 0x202F),  # bidirectional embeddings and overrides
    *range(0x2060, 0x2070),  # word joiner, invisible operators, isolates, deprecated controls
    0xFEFF,  # byte order mark
    *range(0xFFF9, 0xFFFC),  # interlinear annotations
    *range(0xE0000, 0xE0080),  # tag characters: an invisible alphabet
)  # U+200C and U+200D stay: Persian, Indic scripts and emoji need them


def _stand_ins() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}  # ESC -> ␛
    table[0x7F] = "\u2421"
    table |= {code: f"‹{code:02X}›" for code in range(0x80, 0xA0)}
    table |= {code: f"‹U+{code:04X}›" for code in _INVISIBLE}
    table |= dict.fromkeys((0x2028, 0x2029), "\n")  # line and paragraph separators
    table |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # lone surrogates cannot be encoded
    return table


STAND_INS = _stand_ins()


def clean(text: str) -> str:
    """Replace every terminal control character with a visible substitute.

    Newlines and tabs stay, and ``\\r\\n`` becomes ``\\n``. No escape sequence can begin in the result, because it
    contains no other C0 character, no DEL and no C1 character. The result can be encoded as UTF-8.
    """
    return text.replace("\r\n", "\n").translate(STAND_INS)


def clean_line(text: str, limit: int = 200) -> str:
    """Clean ``text`` for titles, names and messages. Return it on one line, shortened to ``limit`` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def cause(error: BaseException, limit: int = 200) -> str:
    """Return an error's message for a message of ours, on one line. An error of the system has no number and path."""
    return clean_line(getattr(error, "strerror", None) or str(error), limit)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError if it is not JSON, or is nested too deeply."""
    import json  # not at the top: ``minillm --help`` imports this file

    try:
        return json.loads(text)
    except RecursionError:  # Python's own message depends on its version
        raise ValueError("it is nested too deeply") from None


def parse_strict_json(text: str) -> Any:
    """Parse a JSON text from a model or a client. The value can always be encoded as JSON and UTF-8 again.

    Escapes of lone surrogates become U+FFFD. Raises ValueError for text that is not JSON or is nested too deeply, and
    for NaN, infinities and numbers beyond float64.
    """
    import json

    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        return json.loads(_LONE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except RecursionError:  # Python's own message depends on its version
        raise ValueError("it is nested too deeply") from None


_LONE = re.compile("[\ud800-\udfff]")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not a finite number")
    return value


def json_line(value: object, *, ascii_only: bool = False) -> str:
    """Return ``value`` as JSON on one line that is safe for a terminal.

    Every character that `clean` would replace is written as its ``\\u`` escape. So parsing the line gives the same
    value. The escaped characters include lone surrogates (UTF-8 cannot encode them) and U+2028 (some programs take it
    for the end of a line).
    """
    import json

    return json.dumps(value, ensure_ascii=ascii_only).translate(_escapes())


@cache
def _escapes() -> dict[int, str]:
    import json

    escapes = {code: json.dumps(chr(code))[1:-1] for code in STAND_INS if code > 0x7F}  # JSON escapes below 0x20
    return {**escapes, 0x7F: "\\u007f"}
