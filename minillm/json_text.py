"""JSON that somebody else wrote, and JSON that a terminal may be given. (`minillm --help` needs neither.)"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from minillm.text import STAND_INS


def parse_json(text: str | bytes) -> Any:
    """What ``text`` says.

    Raises:
        ValueError: it is no JSON, or nested without end.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def json_line(value: object) -> str:
    """``value`` as JSON on one line, which a terminal may be given as well as a file.

    Every character that `minillm.text.clean` replaces is written as its ``\\u`` escape: the value is the same for who
    reads it, lone surrogates encode to UTF-8, and no reader takes U+2028 for the end of a line.
    """
    return json.dumps(value, ensure_ascii=False).translate(_escapes())


@cache
def _escapes() -> dict[int, str]:
    escapes = {code: json.dumps(chr(code))[1:-1] for code in STAND_INS if code > 0x7F}  # JSON itself escapes below 0x20
    return {**escapes, 0x7F: "\\u007f"}
