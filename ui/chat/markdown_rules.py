r"""Rules of the Markdown parser that keep text as written where CommonMark would change it.

CommonMark removes the backslash of ``\(`` and ``\,``, turns ``__init__.py`` into a bold "init.py", and strips the
indentation of code without a fence.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

_LONGEST = 2000  # maximum characters of a formula
_FORMULA = re.compile(
    rf"\\\(.{{1,{_LONGEST}}}?\\\)|\\\[.{{1,{_LONGEST}}}?\\\]|\$\$.{{1,{_LONGEST}}}?\$\$|\$(?=\S)[^$\n]{{1,{_LONGEST}}}?(?<=\S)\$(?![\w$])",
    re.DOTALL,
)
_ESCAPED = re.compile(r"\\[^*_`#~<>.|+\-&\n]")  # a backslash before a character without a meaning in Markdown
_NAME = re.compile(r"__[a-z0-9]+(?:_[a-z0-9]+)*__(?!\w)")  # __init__
# 2*x*4. Only ASCII characters count, because Chinese text has no space before emphasis.
_TIMES = re.compile(r"(?<=[A-Za-z0-9_])\*{1,2}(?=[A-Za-z0-9_])")
_CLOSED_BY = {"\\[": "\\]", "$$": "$$", "\\b": "\\end{"}  # opening -> closing of a formula of several lines
_CODE = re.compile(
    r"(?:(?:async|def|class|for|while|if|elif|with|match|case|function|func|fn|public|private|protected|static|struct|impl"
    r"|switch|interface|enum|export|const|void|int)\s|(?:else|try|except|finally|do)\b).*[:{]\s*(?:(?:#|//).*)?$"
)
_CODE_GOES_ON = re.compile(r"(?:else|elif|except|finally|catch|case)\b|[}\])]")
_ITEM = re.compile(r"[-*+]\s|\d+[.)]\s")
_INDENTATION = 4


def keep_as_written(parser: MarkdownIt) -> None:
    """Add the rules of this module to a parser."""
    parser.inline.ruler.before("escape", "as_written", _inline)
    for name, rule in (("formula", _formula), ("unfenced_code", _unfenced_code)):
        parser.block.ruler.before("fence", name, rule, {"alt": ["paragraph", "reference", "blockquote", "list"]})


def _inline(state: StateInline, silent: bool) -> bool:
    """Match a formula, a backslash, or the ``_`` and ``*`` of ``__init__`` and ``2*x*4``, to keep them as written."""
    text, at = state.src, state.pos
    patterns = {"\\": (_FORMULA, _ESCAPED), "$": (_FORMULA,), "_": (_NAME,), "*": (_TIMES,)}.get(text[at], ())
    found = next(filter(None, (pattern.match(text, at, state.posMax) for pattern in patterns)), None)
    if found is None or (text[at] == "_" and at and (text[at - 1].isalnum() or text[at - 1] == "_")):
        return False
    if not silent:
        for number, line in enumerate(found[0].split("\n")):
            if number:
                state.push("softbreak", "br", 0)
            state.pending += line
    state.pos = found.end()
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].rstrip()


def _formula(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Match a formula of several lines and keep it as a code block.

    The formula begins with ``\\[``, ``$$`` or ``\\begin``. It ends with the closing line or before an empty line.
    """
    first = _line(state, start)
    closing = _CLOSED_BY.get(first[:2], "")
    if not closing or state.is_code_block(start) or (first[:2] == "\\b" and not first.startswith("\\begin{")):
        return False
    after = first[2:].rpartition(closing)[2] if closing in first[2:] else ""
    if re.sub(r"^\w*\*?\}", "", after).strip(" .,;"):
        return False  # a sentence continues after the formula
    last = start
    while closing not in (_line(state, last)[2:] if last == start else _line(state, last)):
        if last + 1 >= end or state.isEmpty(last + 1) or state.sCount[last + 1] < state.blkIndent:
            break
        last += 1
    return silent or _add_fence(state, start, last)


def _unfenced_code(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Match a line such as ``def f(x):`` with the indented lines after it, and keep them as a code block."""
    if state.is_code_block(start) or not _CODE.match(_line(state, start)):
        return False
    level = state.sCount[start]
    if (
        start + 1 >= end
        or state.sCount[start + 1] < level + _INDENTATION
        or state.isEmpty(start + 1)
        or _ITEM.match(_line(state, start + 1))
    ):
        return False
    last = start
    for number in range(start + 1, end):
        if state.isEmpty(number):
            continue
        text = _line(state, number)
        if state.sCount[number] <= level and not (_CODE_GOES_ON.match(text) or _CODE.match(text)):
            break
        if state.sCount[number] < state.blkIndent:
            break
        last = number
    return silent or _add_fence(state, start, last)


def _add_fence(state: StateBlock, start: int, last: int) -> bool:
    token = state.push("fence", "code", 0)
    token.content = state.getLines(start, last + 1, state.blkIndent, True)
    token.map = [start, last + 1]
    token.markup = "```"
    state.line = last + 1
    return True
